"""The Philly job table as shipped with the Sia artifact: ``timestamp,duration,num_gpus,gpu_time,cluster``.

Timestamps are naive local times of submission; ``duration`` is in seconds; ``cluster`` is the virtual
cluster. The log has no job ids: a job is named after its row.
"""

from __future__ import annotations

import polars as pl

from icefrog.traces.rows import Part, Rows, assemble, parts_of
from icefrog.traces.source import Source
from icefrog.traces.table import Table
from icefrog.traces.trace import Trace

NAME = "philly-csv"
COLUMNS = ("timestamp", "duration", "num_gpus", "gpu_time", "cluster")
DESCRIPTION = "Microsoft Philly as one CSV table (" + ",".join(COLUMNS) + ")"


def matches(source: Source) -> bool:
    """Whether the header belongs to this format."""
    return set(COLUMNS) <= set(source.header)


def read(source: Source) -> Trace:
    """Jobs in order of submission; what cannot be a job is dropped and counted."""
    return assemble(parts_of(source, _part), f"{source.path.name} ({NAME})")


def _part(table: Table, first_row: int) -> Part:
    rows = Rows(table, first_row)
    submit = rows.time("timestamp", "%Y-%m-%d %H:%M:%S")
    gpus, duration_s = rows.count("num_gpus"), rows.number("duration")
    rows.drop_impossible(submit, gpus, duration_s)
    number = pl.int_range(first_row + 1, first_row + 1 + rows.height, eager=True).cast(pl.String)
    return rows.part(
        job_id="philly-" + number, submit_us=submit, num_gpus=gpus, duration_s=duration_s, vc=rows.text("cluster")
    )
