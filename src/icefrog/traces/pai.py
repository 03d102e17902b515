"""Alibaba PAI ``cluster-trace-gpu-v2020`` (Weng et al., NSDI'22): a job table and a task table, headers in own files.

A job has tasks (worker, ps, ...), a task ``inst_num`` instances that each ask for ``plan_gpu`` percent of a GPU. GPUs of
a job = sum of inst_num x plan_gpu / 100, rounded up to whole ones; the exact sum is kept in ``gpu_demand``. The job's
``start_time`` is its submission, its service time runs from the first start to the last end of its GPU tasks. The clock is
shifted: only relative seconds mean anything. Rows of both tables are counted: a task's row is merged into its job's.
With the task table alone, a job is submitted when its first task starts and its user is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import polars as pl

from icefrog.errors import UserError
from icefrog.traces.rows import Part, Rows, assemble, parts_of, state_of, tally
from icefrog.traces.source import Source, open_source
from icefrog.traces.table import Table
from icefrog.traces.trace import Trace

NAME = "pai"
TASK = (
    "job_name",
    "task_name",
    "inst_num",
    "status",
    "start_time",
    "end_time",
    "plan_cpu",
    "plan_mem",
    "plan_gpu",
    "gpu_type",
)
JOB = ("job_name", "inst_id", "user", "status", "start_time", "end_time")
COLUMNS = TASK
DESCRIPTION = "Alibaba PAI gpu-v2020: a folder with pai_job_table and pai_task_table (.csv, .header), or the latter"
_NAMES = {"task": ("pai_task_table", TASK), "job": ("pai_job_table", JOB)}
_MERGED, _ORPHAN = "task, merged into its job", "task without a job in the job table"


def matches(source: Source) -> bool:
    """Whether this is the folder, or one of its tables."""
    if source.is_folder:
        return _file(source.path, "task") is not None
    return set(TASK) <= set(source.header) or set(JOB) <= set(source.header) or _kind(source) is not None


def read(source: Source) -> Trace:
    """GPU jobs that ran to an end, in order of submission; the others are dropped and counted.

    Raises:
        UserError: there is no task table (it alone tells GPUs).
    """
    tables = _tables(source)
    tasks = parts_of(tables["task"], _task_part)
    jobs = parts_of(tables["job"], _job_part) if "job" in tables else []
    name = source.path.name or str(source.path)

    def merge(kept: pl.DataFrame) -> tuple[pl.DataFrame, Mapping[str, int]]:
        return _merge(kept, with_jobs=bool(jobs))

    parts = [_aligned(part, is_task=True) for part in tasks] + [_aligned(part, is_task=False) for part in jobs]
    return assemble(parts, f"{name} ({NAME})", merge=merge, dated=False)


def _tables(source: Source) -> dict[str, Source]:
    found: dict[str, Source] = {}
    kind = None if source.is_folder else _kind(source) or ("task" if set(TASK) <= set(source.header) else "job")
    folder = source.path if source.is_folder else source.path.parent
    for name, (_, columns) in _NAMES.items():
        path = source.path if name == kind else _file(folder, name)
        if path is None:
            continue
        opened = source if name == kind else open_source(path)
        if not set(columns) <= set(opened.header):  # neither a header line nor a .header file: the published order
            if len(opened.cells(",")) != len(columns):
                raise UserError(
                    f"{path}, line 1: {len(opened.cells(','))} cells, allowed: {len(columns)} ({','.join(columns)})",
                    f"put its .header file beside it, or use the published {path.name.split('.')[0]}",
                )
            opened = Source(path, opened.head, columns, header_apart=True)
        found[name] = opened
    if "task" not in found:
        raise UserError(
            f"{source.path}: PAI's job table does not tell the GPUs of a job",
            "put pai_task_table.csv beside it, or give the folder of both",
        )
    return found


def _kind(source: Source) -> str | None:
    """Which table a file without a header is, by its name."""
    return next((kind for kind, (stem, _) in _NAMES.items() if source.path.name.startswith(stem)), None)


def _file(folder: Path, kind: str) -> Path | None:
    stem = _NAMES[kind][0]
    return next((p for end in (".csv", ".csv.gz", ".tar.gz", "") if (p := folder / f"{stem}{end}").is_file()), None)


def _seconds(rows: Rows, column: str) -> pl.Series:
    """Shifted seconds; 0 means missing."""
    value = rows.number(column)
    return value.set((value <= 0).fill_null(False), None)


def _task_part(table: Table, first_row: int) -> Part:
    rows = Rows(table, first_row)
    instances, percent = rows.count("inst_num"), rows.number("plan_gpu")
    rows.drop("task with a negative GPU plan", (percent < 0) | (percent > 1e8))
    rows.drop("task without a job name", rows.text("job_name").is_null())
    rows.drop("task without an instance count", instances.is_null() & (percent > 0).fill_null(False))
    return rows.part(
        job_id=rows.text("job_name"),
        start_s=_seconds(rows, "start_time"),
        end_s=_seconds(rows, "end_time"),
        gpus=(instances * percent / 100.0).fill_null(0.0),
        gpu_type=rows.text("gpu_type"),
        state=state_of(rows.text("status")),
    )


def _job_part(table: Table, first_row: int) -> Part:
    rows = Rows(table, first_row)
    rows.drop("job without a name", rows.text("job_name").is_null())
    return rows.part(
        job_id=rows.text("job_name"),
        start_s=_seconds(rows, "start_time"),
        end_s=_seconds(rows, "end_time"),
        user=rows.text("user"),
        state=state_of(rows.text("status")),
    )


_SCHEMA = {
    "row": pl.Int64,
    "job_id": pl.String,
    "start_s": pl.Float64,
    "end_s": pl.Float64,
    "gpus": pl.Float64,
    "gpu_type": pl.String,
    "user": pl.String,
    "state": pl.String,
}


def _aligned(part: Part, *, is_task: bool) -> Part:
    columns = [
        (pl.col(name) if name in part.kept.columns else pl.lit(None)).cast(kind).alias(name)
        for name, kind in _SCHEMA.items()
    ]
    return Part(part.kept.select(*columns, pl.lit(is_task).alias("task")), part.read, part.dropped, part.examples)


def _merge(kept: pl.DataFrame, *, with_jobs: bool) -> tuple[pl.DataFrame, Mapping[str, int]]:
    """One row a job that has GPUs and times."""
    tasks = kept.filter(pl.col("task"))
    on_gpu = pl.col("gpus") > 0
    grouped = tasks.group_by("job_id", maintain_order=True).agg(
        pl.col("gpus").sum().alias("gpu_demand"),
        pl.col("start_s").filter(on_gpu).min().alias("first_s"),
        pl.col("end_s").filter(on_gpu).max().alias("last_s"),
        pl.col("end_s").filter(on_gpu).null_count().alias("open"),
        pl.col("gpu_type").filter(on_gpu & (pl.col("gpu_type") != "CPU")).drop_nulls().unique().sort().str.join("+"),
        pl.col("state").filter(on_gpu).sort().first().alias("task_state"),  # cancelled < completed < failed < running
        pl.col("state").filter(on_gpu).is_in(["running", "waiting"]).any().alias("busy"),
        pl.col("state").filter(on_gpu).eq("failed").any().alias("failed"),
        pl.col("row").min().alias("task_row"),
        pl.len().alias("tasks"),
    )
    lost: dict[str, int] = {}
    if with_jobs:
        jobs = kept.filter(~pl.col("task"))
        unique = jobs.unique("job_id", keep="first", maintain_order=True)
        tally(lost, "job given twice", jobs.height - unique.height)
        merged = unique.select("row", "job_id", "user", "state", pl.col("start_s").alias("submit_s")).join(
            grouped, on="job_id", how="left", maintain_order="left"
        )
        # The job's own status decides: of a finished job a task may still be noted as running.
        merged = merged.with_columns(pl.col("state").is_in(["running", "waiting"]).alias("busy"))
        joined = int(merged["tasks"].fill_null(0).sum())
        tally(lost, _MERGED, joined)
        tally(lost, _ORPHAN, tasks.height - joined)
    else:
        state = pl.when("failed").then(pl.lit("failed")).otherwise("task_state")
        merged = grouped.with_columns(
            pl.col("task_row").alias("row"), pl.col("first_s").alias("submit_s"), state.alias("state")
        )
        tally(lost, _MERGED, tasks.height - grouped.height)
    steps = (
        ("no task in the task table", pl.col("tasks").is_null()),
        ("CPU job (0 GPUs)", pl.col("gpu_demand") <= 0),
        ("no submission time", pl.col("submit_s").is_null()),
        ("never started", pl.col("first_s").is_null()),
        ("still running at the end of the log", pl.col("busy") | pl.col("last_s").is_null()),
        ("negative duration", pl.col("last_s") < pl.col("first_s")),
        ("0 s long", pl.col("last_s") == pl.col("first_s")),
        ("more than a million GPUs", pl.col("gpu_demand") > 1e6),
    )
    for reason, condition in steps:
        before = merged.height
        merged = merged.filter(~condition.fill_null(False))
        tally(lost, reason, before - merged.height)
    wait_s = pl.col("first_s") - pl.col("submit_s")
    demand = pl.col("gpu_demand")
    return merged.with_columns(
        (pl.col("submit_s") - pl.col("submit_s").min()),
        pl.max_horizontal(demand.ceil(), pl.lit(1.0)).alias("num_gpus"),
        pl.when(demand == demand.ceil()).then(None).otherwise(demand).alias("gpu_demand"),
        (pl.col("last_s") - pl.col("first_s")).alias("duration_s"),
        (pl.when(wait_s >= 0).then(wait_s) if with_jobs else pl.lit(None, dtype=pl.Float64)).alias("queue_s"),
    ), lost
