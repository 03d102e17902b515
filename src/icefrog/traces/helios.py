"""Helios ``cluster_log.csv`` (SenseTime, SC'21): one row a job, GPU and CPU jobs alike.

Times are naive local times (the clusters stand in China; the log does not say so). The duration is end - start; the
log's own ``duration`` and ``queue`` follow from the times and are not read.
"""

from __future__ import annotations

from icefrog.traces.rows import Part, Rows, assemble, parts_of, served, state_of
from icefrog.traces.source import Source
from icefrog.traces.table import Table
from icefrog.traces.trace import Trace

NAME = "helios"
COLUMNS = ("job_id", "user", "vc", "gpu_num", "state", "submit_time", "start_time", "end_time")
DESCRIPTION = "Helios cluster_log.csv (" + ",".join(COLUMNS) + ",...)"
FORMATS = ("%Y-%m-%d %H:%M:%S",)


def matches(source: Source) -> bool:
    """Whether the header belongs to this format."""
    return set(COLUMNS) <= set(source.header)


def read(source: Source) -> Trace:
    """GPU jobs that ran to an end, in order of submission; the others are dropped and counted."""
    return assemble(parts_of(source, _part), f"{source.path.name} ({NAME})")


def _part(table: Table, first_row: int) -> Part:
    rows = Rows(table, first_row)
    gpus = rows.count("gpu_num")
    submit, start, end = (rows.time(name, *FORMATS) for name in ("submit_time", "start_time", "end_time"))
    rows.drop("CPU job (0 GPUs)", gpus == 0)
    duration_s, queue_s = served(rows, submit, start, end)
    rows.drop_impossible(submit, gpus, duration_s)
    return rows.part(
        job_id=rows.text("job_id"),
        submit_us=submit,
        num_gpus=gpus,
        duration_s=duration_s,
        user=rows.text("user"),
        vc=rows.text("vc"),
        state=state_of(rows.text("state")),
        queue_s=queue_s,
    )
