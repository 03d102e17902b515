"""Which reader reads a file: by name, or recognised from the header."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from icefrog.errors import UserError
from icefrog.traces import own_csv, philly_csv
from icefrog.traces.table import Table, header_of, parse_table, read_text
from icefrog.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """One format: how to recognise it and how to read it."""

    name: str
    description: str
    columns: tuple[str, ...]
    matches: Callable[[Sequence[str]], bool]
    read: Callable[[Table], Trace]


def trace_formats() -> tuple[TraceFormat, ...]:
    """Every format that can be read. A new one is one file and one line here."""
    modules = (own_csv, philly_csv)
    return tuple(TraceFormat(m.NAME, m.DESCRIPTION, m.COLUMNS, m.matches, m.read) for m in modules)


def read_trace(path: str | Path, format: str | None = None) -> Trace:
    """Read a job log, plain or gzip.

    Raises:
        UserError: the file is unreadable or malformed (with line and column), or its format unknown.
    """
    path = Path(path)
    formats = trace_formats()
    known = ", ".join(f.name for f in formats)
    if format is not None and format not in {f.name for f in formats}:
        raise UserError(
            f"unknown trace format {format!r}, allowed: {known}", "leave it out: the header tells the format"
        )
    text = read_text(path)
    header = header_of(text)
    if format is None:
        chosen = next((f for f in formats if f.matches(header)), None)
        if chosen is None:
            raise UserError(
                f"{path}, line 1: unknown header {_shown(header)}, allowed: the columns of {known}",
                "the simplest is a CSV with the header " + ",".join(formats[0].columns),
            )
    else:
        chosen = next(f for f in formats if f.name == format)
        if not chosen.matches(header):
            raise UserError(
                f"{path}, line 1: header {_shown(header)} is not {format}: {','.join(chosen.columns)}",
                "leave the format out to have it recognised from the header",
            )
    trace = chosen.read(parse_table(path, text))
    if not trace.jobs:
        raise UserError(f"{path}: no jobs in it ({trace.report.text()})", "a trace has one line a job below its header")
    return trace


def _shown(header: list[str]) -> str:
    joined = ",".join(header)
    return repr(joined if len(joined) <= 80 else joined[:80] + "...")
