"""Helios ``cluster_log.csv`` (SenseTime, SC'21): one row a job, GPU and CPU jobs alike.

Times are naive local times (the clusters stand in China; the log does not say so). The duration is end - start; the
log's own ``duration`` and ``queue`` follow from the times and are not read.
"""

from __future__ import annotations

from icefrog.traces.rows import Part, Rows, assemble, gpu_jobs, parts_of
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
    return rows.part(
        **gpu_jobs(rows, FORMATS),
        vc=rows.text("vc"),
    )
