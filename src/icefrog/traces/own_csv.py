"""IceFrog's own trace: ``job_id,submit_s,num_gpus,duration_s`` and, if known, the other fields of a ``TraceJob``.

``submit_s`` counts seconds from any zero. Instead of it, or beside it, ``submit_time`` is an ISO local time, as
``2017-10-03 03:00:00``. This is the user's own file, so nothing is guessed or dropped but blank lines: a bad cell
is an error.
"""

from __future__ import annotations

import csv
import io
import re
from dataclasses import fields
from datetime import datetime, timedelta

import polars as pl

from icefrog.spec import JOB_ID_PATTERN
from icefrog.traces.rows import MAX_S, build_jobs, rewards_text
from icefrog.traces.source import Source
from icefrog.traces.table import Table, empty_rows, numbers, require, whole_table
from icefrog.traces.trace import ReadReport, Trace, TraceJob

NAME = "icefrog-csv"
COLUMNS = ("job_id", "submit_s", "num_gpus", "duration_s")
_TEXTS = ("user", "vc", "gpu_type", "state", "kind", "application")
_COUNTS = ("num_replicas", "batch_size")
_NUMBERS = ("gpu_demand", "queue_s", "time_limit_s", "deadline_s")
OPTIONAL = (*_TEXTS, *_COUNTS, *_NUMBERS, "rewards")
DESCRIPTION = "IceFrog's own CSV (job_id,submit_s|submit_time,num_gpus,duration_s[,user][,vc]...)"
_TIME_FORMATS = ("%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%dT%H:%M:%S%.f")
_NUMBER = r"(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
_REWARDS = rf"^{_NUMBER}:-?{_NUMBER}(;{_NUMBER}:-?{_NUMBER})*$"


def matches(source: Source) -> bool:
    """Whether the header belongs to this format."""
    header = set(source.header)
    return {"job_id", "num_gpus", "duration_s"} <= header and bool({"submit_s", "submit_time"} & header)


def read(source: Source) -> Trace:
    """Jobs in order of submission; ``submit_s`` is kept as given, ``submit_time`` counts from the first job.

    Raises:
        UserError: any bad or missing cell, or a job id given twice.
    """
    table = whole_table(source)
    empty = empty_rows(table)
    ids = _ids(table, empty)
    submit_s, start = _submissions(table, empty)
    columns = [
        ids,
        submit_s.alias("submit_s"),
        _positive(table, empty, "num_gpus", "a whole number >= 1, at most 1000000", whole=True),
        _positive(table, empty, "duration_s", f"a number of seconds > 0, at most {MAX_S:g}", whole=False),
        *_optional(table),
    ]
    frame = pl.DataFrame(columns)
    kept = frame.filter(~empty).sort("submit_s", maintain_order=True)
    report = ReadReport(frame.height, frame.height).drop("empty line", frame.height - kept.height)
    return Trace(build_jobs(kept), report, f"{source.path.name} ({NAME})", start)


def write_text(trace: Trace) -> str:
    """The trace in this format. Reading it back gives the same jobs (absolute times to the microsecond)."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    dated = [] if trace.start is None else ["submit_time"]
    defaults = {item.name: item.default for item in fields(TraceJob)}
    used = [
        name
        for name in OPTIONAL
        if name in ("user", "vc") or any(getattr(job, name) != defaults[name] for job in trace.jobs)
    ]
    writer.writerow(["job_id", *dated, "submit_s", "num_gpus", "duration_s", *used])
    for job in trace.jobs:
        at = [] if trace.start is None else [_iso(trace.start, job.submit_s)]
        rest = [rewards_text(job.rewards) if name == "rewards" else getattr(job, name) for name in used]
        writer.writerow([job.job_id, *at, job.submit_s, job.num_gpus, job.duration_s, *rest])
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
        return seconds, start if isinstance(start, datetime) else None
    allowed, hint = f"a number of seconds >= 0, at most {MAX_S:g}", "submit_s counts from the start of the trace"
    seconds = numbers(table, "submit_s", allowed, hint)
    require(table, empty | ((seconds >= 0) & (seconds <= MAX_S)), "submit_s", allowed, hint)
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
    good = (values >= 1) & (values == values.floor()) & (values <= 1e6) if whole else (values > 0) & (values <= MAX_S)
    require(table, empty | good, column, allowed, hint)
    return values


def _optional(table: Table) -> list[pl.Series]:
    """The columns that may be there; an empty cell is a value that is not known."""
    hint = "leave the cell empty where it is not known"
    columns = []
    for name in OPTIONAL:
        if name not in table.columns:
            continue
        text = table.frame[name]
        if name in _TEXTS:
            columns.append(text)
        elif name == "rewards":
            require(table, text.is_null() | text.str.contains(_REWARDS), name, "seconds:worth;seconds:worth;...", hint)
            columns.append(text)
        else:
            limit = "a whole number >= 1" if name in _COUNTS else f"a number {'>=' if name == 'queue_s' else '>'} 0"
            allowed = limit if name in _COUNTS else f"{limit}, at most {MAX_S:g}"
            values = numbers(table, name, allowed, hint)
            good = values >= 0 if name == "queue_s" else values > 0
            if name in _COUNTS:
                good &= (values == values.floor()) & (values < 2**53)
            else:
                good &= values <= MAX_S
            require(table, values.is_null() | good, name, allowed, hint)
            columns.append(values)
    return columns
