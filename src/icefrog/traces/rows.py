"""From a table of strings to jobs, every row either kept or dropped for a reason that is counted.

A reader of a public log fills one :class:`Rows` per block: it parses columns, drops rows, and names the columns of the
jobs. What it cannot read it drops (others wrote the log; one bad line must not cost the rest), but the report counts it
and shows the first place. :func:`assemble` puts the blocks together.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from itertools import repeat
from typing import Any

import polars as pl

from icefrog.traces.source import Source
from icefrog.traces.table import Table, empty_rows, parse_block, shown
from icefrog.traces.trace import ReadReport, Trace, TraceJob

MISSING = ("None", "none", "NULL", "null", "NaN", "nan", "NA", "N/A", "Unknown", "unknown")
"""How logs write that a value is not known."""
MAX_GPUS = 1_000_000
MAX_S = 1e10
"""The longest time, s (317 years): beyond, a simulation's microseconds are lost in a float."""
_WHOLE = ("num_gpus", "num_replicas", "batch_size")
_EPOCH = datetime(1970, 1, 1)
_STATES = {
    **{"pass": "completed", "terminated": "completed", "killed": "cancelled", "canceled": "cancelled"},
    **{"success": "completed", "succeeded": "completed"},
}


@dataclass(frozen=True, slots=True)
class Part:
    """The jobs of one block, and the account of its rows."""

    kept: pl.DataFrame
    read: int
    dropped: Mapping[str, int]
    examples: Mapping[str, str]


class Rows:
    """The rows of one block while they are read. ``first_row``: how many rows earlier blocks had."""

    def __init__(self, table: Table, first_row: int = 0, missing: Sequence[str] = MISSING) -> None:
        self.table = table
        self.height = table.frame.height
        self._first_row = first_row
        self._missing = list(missing)
        self._reason = pl.repeat(None, self.height, dtype=pl.String, eager=True)
        self._examples: dict[str, str] = {}
        self._order: list[str] = []
        self.drop("empty line", empty_rows(table))

    def text(self, column: str) -> pl.Series:
        """A column of strings; null where the cell is empty or says that nothing is known. Absent: all null."""
        if column not in self.table.frame.columns:
            return pl.repeat(None, self.height, dtype=pl.String, eager=True)
        text = self.table.frame[column]
        return text.set(text.is_in(self._missing), None)

    def number(self, column: str) -> pl.Series:
        """Numbers up to :data:`MAX_S` (float64), null where there is none; rows with anything else are dropped."""
        text = self.text(column)
        value = text.cast(pl.Float64, strict=False)
        value = value.set(~value.is_finite() | (value.abs() > MAX_S), None)
        self.unreadable(column, text, value)
        return value

    def count(self, column: str) -> pl.Series:
        """Like :meth:`number` for whole numbers from 0 to a million."""
        value = self.number(column)
        wrong = (value < 0) | (value != value.floor()) | (value > MAX_GPUS)
        self.unreadable(column, self.text(column), value.set(wrong.fill_null(False), None))
        return value.set(wrong.fill_null(False), None)

    def time(self, column: str, *formats: str) -> pl.Series:
        """A column of times as microseconds since 1970 (int64): local where there is no offset, else UTC (``%z``)."""
        text = self.text(column)
        value = _parsed(text, formats)
        self.unreadable(column, text, value)
        return value

    def unreadable(self, column: str, text: pl.Series, value: pl.Series) -> None:
        """Drop the rows where there is a text but no value."""
        reason, bad = f"unreadable {column}", text.is_not_null() & value.is_null()
        if bad.any():
            row = bad.arg_max()
            assert row is not None
            self._examples.setdefault(reason, f"line {self.table.line(row)}, {shown(text[row] or '')}")
        self.drop(reason, bad)

    def drop(self, reason: str, mask: pl.Series) -> None:
        """Drop the rows of the mask that are not dropped yet."""
        self._order.append(reason)
        hit = self._reason.is_null() & mask.fill_null(False)
        if hit.any():
            self._reason = self._reason.set(hit, reason)

    def drop_impossible(self, submit: pl.Series, num_gpus: pl.Series, duration_s: pl.Series) -> None:
        """Drop what cannot be a job: without submission, GPUs or a length."""
        self.drop("no submission time", submit.is_null())
        self.drop("no GPU count", num_gpus.is_null())
        self.drop("0 GPUs", num_gpus == 0)
        self.drop("no duration", duration_s.is_null())
        self.drop("negative duration", duration_s < 0)
        self.drop("0 s long", duration_s == 0)
        self.drop("longer than 317 years", duration_s > MAX_S)

    def part(self, **columns: pl.Series) -> Part:
        """The kept rows with these columns: fields of :class:`TraceJob`, and ``submit_us`` for times with a date."""
        frame = pl.DataFrame([series.alias(name) for name, series in columns.items()])
        row = pl.int_range(self._first_row, self._first_row + self.height, eager=True, dtype=pl.Int64)
        counts = Counter(self._reason.drop_nulls().to_list())
        return Part(
            frame.with_columns(row.alias("row")).filter(self._reason.is_null()),
            self.height,
            {reason: counts[reason] for reason in dict.fromkeys(self._order) if counts[reason]},
            {reason: text for reason, text in self._examples.items() if counts[reason]},
        )


def served(rows: Rows, submit: pl.Series, start: pl.Series, end: pl.Series) -> tuple[pl.Series, pl.Series]:
    """(duration_s, queue_s) of a log with times of submission, start and end (microseconds); rows without are dropped."""
    rows.drop("no submission time", submit.is_null())
    rows.drop("never started", start.is_null())
    rows.drop("still running at the end of the log", end.is_null())
    queue_s = (start - submit) / 1e6
    return (end - start) / 1e6, queue_s.set((queue_s < 0).fill_null(False), None)


def gpu_jobs(rows: Rows, formats: Sequence[str]) -> dict[str, pl.Series]:
    """The columns that the logs of Helios and Acme have in common; rows that were no GPU job or never ran are dropped."""
    gpus = rows.count("gpu_num")
    submit, start, end = (rows.time(name, *formats) for name in ("submit_time", "start_time", "end_time"))
    rows.drop("CPU job (0 GPUs)", gpus == 0)
    duration_s, queue_s = served(rows, submit, start, end)
    rows.drop_impossible(submit, gpus, duration_s)
    return {
        "job_id": rows.text("job_id"),
        "submit_us": submit,
        "num_gpus": gpus,
        "duration_s": duration_s,
        "user": rows.text("user"),
        "state": state_of(rows.text("state")),
        "queue_s": queue_s,
    }


def tally(lost: dict[str, int], reason: str, number: int) -> None:
    """Count dropped rows, if there are any."""
    if number:
        lost[reason] = lost.get(reason, 0) + number


def state_of(text: pl.Series) -> pl.Series:
    """States in one spelling: lower case, ``completed`` for Pass and Terminated, nothing after the first word."""
    word = text.str.to_lowercase().str.extract(r"^([a-z_]+)", 1)
    return word.replace(_STATES)


def parts_of(source: Source, part: Callable[[Table, int], Part]) -> list[Part]:
    """``part(table, first_row)`` of every block of a comma-separated file."""
    parts: list[Part] = []
    first_row = 0
    for block in source.blocks():
        parts.append(part(parse_block(source, block), first_row))
        first_row += parts[-1].read
    return parts


def assemble(
    parts: Iterable[Part],
    source: str,
    *,
    merge: Callable[[pl.DataFrame], tuple[pl.DataFrame, Mapping[str, int]]] | None = None,
    dropped: Mapping[str, int] | None = None,
    examples: Mapping[str, str] | None = None,
    offset_s: float = 0.0,
    zone: str = "",
    dated: bool = True,
) -> Trace:
    """The trace of all blocks, in order of submission.

    Args:
        parts: of the blocks.
        source: what the trace is called.
        merge: makes jobs of the kept rows where several rows are one job; returns them and the rows that went, by reason.
        dropped: rows that never came into a table, by reason.
        examples: the first such row, by reason.
        offset_s: of the local clock to that of ``submit_us`` (UTC).
        zone: what the local clock is, if the log says it.
        dated: whether ``submit_us`` are dates; otherwise seconds from the first job, without a date.
    """
    frames, read, lost, shown_at = [], 0, Counter[str](), dict(examples or {})
    for part in parts:
        frames.append(part.kept)
        read += part.read
        lost.update(part.dropped)
        shown_at = {**part.examples, **shown_at}
    lost.update(dropped or {})
    read += sum((dropped or {}).values())
    kept = pl.concat(frames) if frames else pl.DataFrame()
    if merge is not None and kept.height:
        kept, merged = merge(kept)
        lost.update(merged)
    start = None
    if "submit_us" in kept.columns and kept.height:
        first = kept["submit_us"].min()
        assert isinstance(first, int)
        kept = kept.with_columns(((pl.col("submit_us") - first) / 1e6).alias("submit_s"))
        start = _EPOCH + timedelta(microseconds=first, seconds=offset_s) if dated else None
    if kept.height:
        kept = kept.sort("submit_s", "row").with_columns(_ids(kept.sort("submit_s", "row")))
    jobs = build_jobs(kept) if kept.height else ()
    report = ReadReport(read, len(jobs), dict(lost), shown_at)
    return Trace(jobs, report, source, start, zone if start is not None else "")


def _parsed(text: pl.Series, formats: Sequence[str]) -> pl.Series:
    """Microseconds since 1970; each text in the first format that fits it."""
    value = pl.repeat(None, len(text), dtype=pl.Int64, eager=True)
    for form in formats:
        rest = value.is_null() & text.is_not_null()
        if not rest.any():
            break
        times = text.str.to_datetime(form, strict=False, time_unit="us").cast(pl.Int64)
        value = value.fill_null(times)
    return value


def _ids(kept: pl.DataFrame) -> pl.Series:
    """Ids that are names of jobs: what may not stand in one becomes ``-``; what stands there twice gets its row."""
    row = kept["row"].cast(pl.String)
    ids = kept["job_id"].fill_null("").str.replace_all(r"[^A-Za-z0-9._-]", "-").str.replace(r"^[^A-Za-z0-9]+", "")
    ids = ids.str.slice(0, 80)
    ids = ids.zip_with(ids != "", "row-" + row)
    while not (first := ids.is_first_distinct()).all():
        ids = ids.zip_with(first, ids + ".row" + row)
    return ids.alias("job_id")


def build_jobs(kept: pl.DataFrame) -> tuple[TraceJob, ...]:
    """The rows of a table as jobs; its columns are named like the fields, those that are absent have their defaults.

    Field by field, not job by job: a frozen dataclass sets each of its fields through a Python call, which would take
    longer than reading the file.
    """
    jobs = tuple(map(object.__new__, repeat(TraceJob, kept.height)))
    for item in fields(TraceJob):
        column = _values(kept[item.name]) if item.name in kept.columns else repeat(item.default)
        deque(map(getattr(TraceJob, item.name).__set__, jobs, column), maxlen=0)
    return jobs


def _values(series: pl.Series) -> list[Any]:
    if series.name == "rewards":
        known = {text: parse_rewards(text) for text in series.unique().to_list()}
        return [known[text] for text in series.to_list()]
    if series.dtype == pl.String:
        return _texts(series.fill_null(""))
    return series.cast(pl.Int64).to_list() if series.name in _WHOLE else series.to_list()


def _texts(series: pl.Series) -> list[str]:
    """The strings of a column; one that occurs often is the same object each time, which saves most of the memory."""
    names = series.unique()
    if 2 * len(names) > len(series):
        return series.to_list()
    codes = series.replace_strict(names, pl.int_range(len(names), eager=True))
    return list(map(names.to_list().__getitem__, codes.to_list()))


def parse_rewards(text: str | None) -> tuple[tuple[float, float], ...]:
    """``159:10;189:8`` as pairs of seconds and worth."""
    return tuple(
        (float(at), float(worth)) for at, _, worth in (pair.partition(":") for pair in (text or "").split(";")) if worth
    )


def rewards_text(rewards: tuple[tuple[float, float], ...]) -> str:
    """The inverse of :func:`parse_rewards`."""
    return ";".join(f"{at!r}:{worth!r}" for at, worth in rewards)
