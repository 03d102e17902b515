"""IceFrog's own trace: ``job_id,submit_s,num_gpus,duration_s[,user][,vc]``.

``submit_s`` counts seconds from any zero. Instead of it, or beside it, ``submit_time`` is an ISO local time, as
``2017-10-03 03:00:00``. This is the user's own file, so nothing is guessed or dropped but blank lines: a bad cell
is an error.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from datetime import datetime, timedelta

import polars as pl

from icefrog.spec import JOB_ID_PATTERN
from icefrog.traces.table import Table, empty_rows, numbers, require
from icefrog.traces.trace import ReadReport, Trace, TraceJob

NAME = "icefrog-csv"
COLUMNS = ("job_id", "submit_s", "num_gpus", "duration_s")
DESCRIPTION = "IceFrog's own CSV (job_id,submit_s|submit_time,num_gpus,duration_s[,user][,vc])"
_TIME_FORMATS = ("%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%dT%H:%M:%S%.f")


def matches(header: Sequence[str]) -> bool:
    """Whether a header belongs to this format."""
    return {"job_id", "num_gpus", "duration_s"} <= set(header) and bool({"submit_s", "submit_time"} & set(header))


def read(table: Table) -> Trace:
    """Jobs in order of submission; ``submit_s`` is kept as given, ``submit_time`` counts from the first job.

    Raises:
        UserError: any bad or missing cell, or a job id given twice.
    """
    empty = empty_rows(table)
    ids = _ids(table, empty)
    submit_s, start = _submissions(table, empty)
    gpus = _positive(table, empty, "num_gpus", "a whole number >= 1, at most 1000000", whole=True)
    lengths = _positive(table, empty, "duration_s", "a number of seconds > 0", whole=False)
    labels = [
        table.frame[name].fill_null("") if name in table.columns else pl.repeat("", table.frame.height, eager=True)
        for name in ("user", "vc")
    ]
    frame = pl.DataFrame([ids, submit_s, gpus, lengths, labels[0].alias("user"), labels[1].alias("vc")])
    kept = frame.filter(~empty).sort("submit_s", maintain_order=True)
    jobs = tuple(TraceJob(i, at, int(num), length, user, vc) for i, at, num, length, user, vc in kept.iter_rows())
    report = ReadReport(frame.height, frame.height).drop("empty line", frame.height - kept.height)
    return Trace(jobs, report, f"{table.path.name} ({NAME})", start)


def write_text(trace: Trace) -> str:
    """The trace in this format. Reading it back gives the same jobs (absolute times to the microsecond)."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    dated = [] if trace.start is None else ["submit_time"]
    writer.writerow(["job_id", *dated, "submit_s", "num_gpus", "duration_s", "user", "vc"])
    for job in trace.jobs:
        at = [] if trace.start is None else [_iso(trace.start, job.submit_s)]
        writer.writerow([job.job_id, *at, job.submit_s, job.num_gpus, job.duration_s, job.user, job.vc])
    return out.getvalue()


def _iso(start: datetime, offset_s: float) -> str:
    return (start + timedelta(seconds=offset_s)).isoformat(sep=" ", timespec="microseconds")


def _ids(table: Table, empty: pl.Series) -> pl.Series:
    ids = table.frame["job_id"]
    allowed = "a letter or digit, then up to 119 letters, digits, '.', '_' or '-'"
    good = ids.str.contains(re.sub(r"\$$", r"\\z", JOB_ID_PATTERN))
    require(table, empty | good, "job_id", allowed, "give every job an id of its own")
    require(
        table,
        empty | ids.is_first_distinct(),
        "job_id",
        "each id once",
        "this id stands on an earlier line too",
    )
    return ids


def _submissions(table: Table, empty: pl.Series) -> tuple[pl.Series, datetime | None]:
    """Seconds per row, and the absolute time of 0 s where the file tells it."""
    times = _times(table, empty) if "submit_time" in table.columns else None
    if "submit_s" not in table.columns:
        assert times is not None
        start = times.min()
        seconds = (times - start).dt.total_microseconds() / 1e6
        return seconds.alias("submit_s"), start if isinstance(start, datetime) else None
    allowed, hint = "a number of seconds >= 0", "submit_s counts from the start of the trace"
    seconds = numbers(table, "submit_s", allowed, hint)
    require(table, empty | (seconds >= 0), "submit_s", allowed, hint)
    row = seconds.arg_min()
    first = times[row] if times is not None and row is not None else None
    if not isinstance(first, datetime) or row is None:
        return seconds, None
    try:
        return seconds, first - timedelta(seconds=float(seconds[row]))
    except OverflowError:
        table.fail(row, "submit_s", "seconds since a time that the calendar holds", hint)


def _times(table: Table, empty: pl.Series) -> pl.Series:
    text = table.frame["submit_time"]
    times = text.str.to_datetime(_TIME_FORMATS[0], strict=False, time_unit="us")
    times = times.fill_null(text.str.to_datetime(_TIME_FORMATS[1], strict=False, time_unit="us"))
    hint = "write local times without zone, as in 2017-10-03 03:00:00"
    require(table, empty | times.is_not_null(), "submit_time", "YYYY-MM-DD hh:mm:ss", hint)
    return times


def _positive(table: Table, empty: pl.Series, column: str, allowed: str, *, whole: bool) -> pl.Series:
    hint = "GPUs the job asked for" if whole else "service time at that GPU count, without queueing, in seconds"
    values = numbers(table, column, allowed, hint)
    good = (values >= 1) & (values == values.floor()) & (values <= 1e6) if whole else values > 0
    require(table, empty | good, column, allowed, hint)
    return values
