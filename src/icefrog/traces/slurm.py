"""Slurm accounting: ``sacct --parsable2`` (or ``--parsable``), the operator's own log.

    sacct --allusers --duplicates --parsable2 --starttime 2024-01-01 --format \\
      JobID,User,Account,Partition,Submit,Start,End,ElapsedRaw,State,AllocTRES,ReqTRES,NNodes,TimelimitRaw

Needed are JobID, Submit, one of Elapsed and ElapsedRaw (or Start and End), and one of AllocTRES, ReqTRES, AllocGRES and
ReqGRES. Times are local to the cluster, without zone (numbers are seconds since 1970, UTC). Job steps belong to their job
and carry nothing of their own. Of a requeued job (``--duplicates``) the last run counts, submitted when the first was.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import polars as pl

from icefrog.traces.rows import Part, Rows, assemble, state_of, tally
from icefrog.traces.source import Source
from icefrog.traces.table import Table, parse_bare
from icefrog.traces.trace import Trace

NAME = "slurm"
COLUMNS = ("JobID", "Submit", "Elapsed", "State", "AllocTRES")
DESCRIPTION = "Slurm: sacct --parsable2 --format JobID,User,Partition,Submit,Start,Elapsed,State,AllocTRES,..."
_SEPARATORS = "|\t;^"  # of --parsable2, and what is usual for --delimiter (a comma stands in AllocTRES)
_GPU_COLUMNS = ("AllocTRES", "AllocGRES", "ReqTRES", "ReqGRES")
_SOCKETS = re.compile(r"\([^)]*\)")  # gpu:2(S:0-1): which sockets
_NEVER = ("pending", "requeue_hold", "special_exit", "configuring")
_OPEN = ("running", "suspended", "completing", "resizing", "signaling", "stage_out", "stopped")
_RERUN = ("requeued", "preempted", "node_fail", "requeue_fed", "boot_fail", "revoked")


def matches(source: Source) -> bool:
    """Whether the header is one of ``sacct``."""
    names = set(_names(source))
    served = {"elapsed", "elapsedraw"} & names or {"start", "end"} <= names
    return {"jobid", "submit"} <= names and bool(served) and any(c.lower() in names for c in _GPU_COLUMNS)


def read(source: Source) -> Trace:
    """GPU jobs that ran to an end, in order of submission; the others are dropped and counted."""
    parts: list[Part] = []
    ragged, first_row = 0, 0
    example: dict[str, str] = {}
    reason = "line with other cells than the header"
    for block in source.blocks(quotes=False):
        table, wrong, line = parse_bare(source, block, _separator(source))
        parts.append(_part(table, first_row))
        first_row += parts[-1].read
        ragged += wrong
        if wrong and not example:
            example = {reason: f"line {line}"}
    return assemble(
        parts,
        f"{source.path.name} ({NAME})",
        merge=_merge,
        dropped={reason: ragged} if ragged else {},
        examples=example,
    )


def _names(source: Source) -> list[str]:
    return [name.lower() for name in source.cells(_separator(source))]


def _separator(source: Source) -> str:
    return next((mark for mark in _SEPARATORS if mark in source.head), "|")


def _part(table: Table, first_row: int) -> Part:
    names = {name: name.lower() for name in table.columns}
    frame = table.frame.rename(names) if len(set(names.values())) == len(names) else table.frame
    rows = Rows(Table(table.block, frame, table.lines), first_row, missing=_missing())
    job_id = rows.text("jobid")
    rows.drop("no job id", job_id.is_null())
    rows.drop("job step", job_id.str.contains(".", literal=True))
    state = state_of(rows.text("state"))
    rows.drop("never started", state.is_in(_NEVER))
    rows.drop("still running at the end of the log", state.is_in(_OPEN))
    submit, start, end = (_time(rows, name) for name in ("submit", "start", "end"))
    duration_s = _elapsed(rows, start, end)
    known = start.is_not_null() if "start" in frame.columns else pl.repeat(True, rows.height, eager=True)
    rows.drop("never started", ~known | ((duration_s == 0) & state.is_in(["cancelled"])))
    gpus, gpu_type = _gpus(rows)
    rows.drop("CPU job (0 GPUs)", gpus.fill_null(0.0) == 0)
    rows.drop("GPU count above a million", gpus > 1e6)
    rows.drop_impossible(submit, gpus, duration_s)
    queue_s = (start - submit) / 1e6
    vc = rows.text("partition").fill_null(rows.text("account"))
    return rows.part(
        job_id=job_id,
        submit_us=submit,
        num_gpus=gpus,
        duration_s=duration_s,
        user=rows.text("user"),
        vc=vc,
        gpu_type=gpu_type,
        state=state,
        kind=rows.text("qos"),
        queue_s=queue_s.set((queue_s < 0).fill_null(False), None),
        time_limit_s=_time_limit(rows),
        name=rows.text("jobname"),
    )


def _missing() -> tuple[str, ...]:
    return ("None", "N/A", "Unknown", "INVALID", "Invalid", "None assigned", "UNLIMITED", "Partition_Limit")


def _time(rows: Rows, column: str) -> pl.Series:
    """``2024-01-31T12:00:00`` (local) or seconds since 1970, as microseconds."""
    text = rows.text(column)
    at = text.str.to_datetime("%Y-%m-%dT%H:%M:%S", strict=False, time_unit="us").cast(pl.Int64)
    epoch = text.set(~text.str.contains(r"^\d{1,11}$").fill_null(False), None).cast(pl.Int64, strict=False)
    value = at.fill_null(epoch * 1_000_000)
    rows.unreadable(column, text, value)
    return value


def _elapsed(rows: Rows, start: pl.Series, end: pl.Series) -> pl.Series:
    """Seconds of service: ElapsedRaw, else Elapsed, else End - Start."""
    value = rows.number("elapsedraw")
    text = rows.text("elapsed")
    spelled = _clock_s(text)
    rows.unreadable("elapsed", text, spelled)
    return value.fill_null(spelled).fill_null((end - start) / 1e6)


def _time_limit(rows: Rows) -> pl.Series:
    """The user's limit, s: TimelimitRaw (minutes), else Timelimit; null for none, and where it cannot be read."""
    minutes = rows.text("timelimitraw").cast(pl.Float64, strict=False)
    minutes = minutes.set(~(minutes.is_finite() & (minutes > 0)).fill_null(False), None)
    limit_s = (minutes * 60.0).fill_null(_clock_s(rows.text("timelimit")))
    return limit_s.set((limit_s == 0).fill_null(False), None)


def _clock_s(text: pl.Series) -> pl.Series:
    """``[DD-]HH:MM:SS[.f]`` and ``MM:SS`` in seconds; null for anything else."""
    parts = text.str.extract_groups(r"^(?:(\d{1,6})-)?(?:(\d{1,6}):)?(\d{1,4}):(\d\d)(?:\.(\d+))?$").struct.unnest()
    days, hours, minutes, seconds, _ = (parts[name].cast(pl.Float64, strict=False) for name in parts.columns)
    return days.fill_null(0) * 86400.0 + hours.fill_null(0) * 3600.0 + minutes * 60.0 + seconds


def _gpus(rows: Rows) -> tuple[pl.Series, pl.Series]:
    """GPUs and their type: of what was allocated, else of what was requested (per node there, in ReqGRES)."""
    count = pl.repeat(None, rows.height, dtype=pl.Float64, eager=True)
    kind = pl.repeat(None, rows.height, dtype=pl.String, eager=True)
    nodes = rows.text("nnodes").fill_null(rows.text("allocnodes")).cast(pl.Float64, strict=False).fill_null(1.0)
    for column in _GPU_COLUMNS:
        text = rows.text(column.lower())
        if not text.is_not_null().any():
            continue
        found, types = _tres(text)
        count = count.fill_null(found * nodes if column == "ReqGRES" else found)
        kind = kind.fill_null(types)
    return count, kind


def _tres(text: pl.Series) -> tuple[pl.Series, pl.Series]:
    """(GPUs, type) of ``cpu=8,gres/gpu=4,gres/gpu:a100=4`` or ``gpu:a100:4``; null where there is no GPU.

    Where total and types both stand, the total counts; several types are joined by ``+``.
    """
    kinds = text.unique().drop_nulls().to_list()
    counts = {kind: parse_tres(kind) for kind in kinds}
    lookup = pl.DataFrame(
        {"text": kinds, "gpus": [c[0] for c in counts.values()], "type": [c[1] for c in counts.values()]},
        schema={"text": pl.String, "gpus": pl.Float64, "type": pl.String},
    )
    found = pl.DataFrame({"text": text}).join(lookup, on="text", how="left", maintain_order="left")
    return found["gpus"], found["type"]


def parse_tres(text: str) -> tuple[float | None, str | None]:
    """(GPUs, type) of one cell of AllocTRES, ReqTRES, AllocGRES or ReqGRES; ``(None, None)`` without a GPU."""
    total: int | None = None
    typed: Counter[str] = Counter()
    for part in _SOCKETS.sub("", text).split(","):
        name, equals, value = part.strip().partition("=")
        words = name.removeprefix("gres/").removeprefix("gres:").split(":")
        if words[0] != "gpu":
            continue
        if not equals:  # the older form: gpu:4, gpu:a100:4 (gpu alone is one)
            value = words.pop() if len(words) > 1 and _is_count(words[-1]) else "1"
        if not _is_count(value):
            continue
        number = int(value)
        if len(words) > 1 and words[1]:
            typed[words[1]] += number
        else:
            total = (total or 0) + number
    if total is None and not typed:
        return None, None
    types = "+".join(sorted(typed)) or None
    return float(typed.total() if total is None else max(total, typed.total())), types


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _merge(kept: pl.DataFrame) -> tuple[pl.DataFrame, Mapping[str, int]]:
    """Runs of a requeued job become one, components of a heterogeneous job (``123+0``, ``123+1``) too."""
    lost: dict[str, int] = {}
    key = ["job_id", "user", "name"]
    exact = kept.unique([*key, "submit_us", "duration_s", "num_gpus", "state"], keep="first", maintain_order=True)
    tally(lost, "row given twice", kept.height - exact.height)
    order = pl.col("submit_us").rank("ordinal", descending=True).over(key)
    runs = exact.with_columns(pl.col("submit_us").min().over(key).alias("first_us"), order.alias("from_last"))
    # The same id without a requeue is another job (Slurm's counter begins again some day).
    earlier = (pl.col("from_last") > 1) & pl.col("state").is_in(_RERUN)
    last = runs.filter(~earlier.fill_null(False))
    tally(lost, "earlier run of a requeued job", runs.height - last.height)
    alone = pl.len().over(key) == 1
    last = last.with_columns(pl.when(alone).then("first_us").otherwise("submit_us").alias("submit_us"))
    last = last.drop("first_us", "from_last", "name")
    part = pl.col("job_id").str.contains(r"^\d+\+\d+$")
    if not last.select(part.any()).item():
        return last, lost
    whole = last.with_columns(
        pl.when(part).then(pl.col("job_id").str.extract(r"^(\d+)\+", 1)).otherwise("job_id").alias("job_id"),
        part.alias("part"),
    )
    parts = (
        whole.filter("part")
        .group_by("job_id", "submit_us", maintain_order=True)
        .agg(pl.col("num_gpus").sum(), pl.col("duration_s").max(), pl.exclude("num_gpus", "duration_s", "part").first())
    )
    tally(lost, "component of a heterogeneous job, merged", whole.filter("part").height - parts.height)
    merged = pl.concat([whole.filter(~pl.col("part")).drop("part"), parts.select(whole.drop("part").columns)])
    return merged, lost
