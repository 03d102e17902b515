"""The Philly job table as shipped with the Sia artifact: ``timestamp,duration,num_gpus,gpu_time,cluster``.

Timestamps are naive local times of submission; ``duration`` is in seconds; ``cluster`` is the virtual
cluster. The log has no job ids: a job is named after its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import polars as pl

from icefrog.traces.table import Table, empty_rows, numbers, require
from icefrog.traces.trace import ReadReport, Trace, TraceJob

NAME = "philly-csv"
COLUMNS = ("timestamp", "duration", "num_gpus", "gpu_time", "cluster")
DESCRIPTION = "Microsoft Philly as one CSV table (" + ",".join(COLUMNS) + ")"
_TIME_FORMAT = "%Y-%m-%d %H:%M:%S"


def matches(header: Sequence[str]) -> bool:
    """Whether a header belongs to this format."""
    return set(COLUMNS) <= set(header)


def read(table: Table) -> Trace:
    """Jobs in order of submission. Empty lines, rows without GPUs, duration or time are dropped and counted.

    Raises:
        UserError: a cell that is present but is no time or no non-negative number.
    """
    columns = {
        "num_gpus": _whole(table, "num_gpus"),
        "duration": _seconds(table, "duration"),
        "time": _times(table),
    }
    frame = table.frame.select("cluster").with_columns(**columns).with_row_index("row")
    reasons = (
        ("empty line", empty_rows(table)),
        ("no submission time", columns["time"].is_null()),
        ("no GPU count", columns["num_gpus"].is_null()),
        ("0 GPUs", columns["num_gpus"] == 0),
        ("no duration", columns["duration"].is_null()),
        ("0 s long", columns["duration"] == 0),
    )
    keep = pl.Series([True]).new_from_index(0, frame.height)
    dropped: dict[str, int] = {}
    for reason, mask in reasons:
        hit = keep & mask.fill_null(False)
        if hit.any():
            dropped[reason] = int(hit.sum())
        keep &= ~hit
    kept = frame.filter(keep).sort("time", "row")
    report = ReadReport(frame.height, kept.height, dropped)
    return Trace(_jobs(kept), report, f"{table.path.name} ({NAME})", _start(kept))


def _start(kept: pl.DataFrame) -> datetime | None:
    first = kept["time"].min() if kept.height else None
    return first if isinstance(first, datetime) else None


def _jobs(kept: pl.DataFrame) -> tuple[TraceJob, ...]:
    submit_s = (
        (kept["time"] - kept["time"].min()).dt.total_seconds().cast(pl.Float64) if kept.height else kept["duration"]
    )
    rows = zip(
        kept["row"].to_list(),
        submit_s.to_list(),
        kept["num_gpus"].cast(pl.Int64).to_list(),
        kept["duration"].to_list(),
        kept["cluster"].fill_null("").to_list(),
        strict=True,
    )
    return tuple(TraceJob(f"philly-{row + 1}", at, gpus, length, vc=vc) for row, at, gpus, length, vc in rows)


def _times(table: Table) -> pl.Series:
    text = table.frame["timestamp"]
    times = text.str.to_datetime(_TIME_FORMAT, strict=False)
    hint = "times are local and without zone, as in 2017-10-03 03:00:00"
    require(table, text.is_null() | times.is_not_null(), "timestamp", "YYYY-MM-DD hh:mm:ss", hint)
    return times


def _seconds(table: Table, column: str) -> pl.Series:
    allowed, hint = "a number of seconds >= 0", "durations are seconds, without a unit"
    values = numbers(table, column, allowed, hint)
    require(table, values.is_null() | (values >= 0), column, allowed, hint)
    return values


def _whole(table: Table, column: str) -> pl.Series:
    allowed, hint = "a whole number >= 0, at most 1000000", "the number of GPUs the job asked for"
    values = numbers(table, column, allowed, hint)
    good = values.is_null() | ((values >= 0) & (values == values.floor()) & (values <= 1e6))
    require(table, good, column, allowed, hint)
    return values
