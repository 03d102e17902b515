"""Which reader reads a file: by name, or recognised from the header."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from icefrog.errors import UserError
from icefrog.traces import acme, chronus, helios, own_csv, pai, philly_csv, philly_json, pollux, slurm
from icefrog.traces.source import Source, open_source
from icefrog.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """One format: how to recognise it and how to read it."""

    name: str
    description: str
    columns: tuple[str, ...]
    """What its header holds at least (of alternatives, the usual)."""
    matches: Callable[[Source], bool]
    read: Callable[[Source], Trace]


def trace_formats() -> tuple[TraceFormat, ...]:
    """Every format that can be read. A new one is one file and one line here."""
    modules = (own_csv, philly_csv, philly_json, helios, pai, acme, chronus, pollux, slurm)
    return tuple(TraceFormat(m.NAME, m.DESCRIPTION, m.COLUMNS, m.matches, m.read) for m in modules)


def read_trace(path: str | Path, format: str | None = None) -> Trace:
    """Read a job log: plain, gzip or a tar archive of it; for PAI the folder of its tables.

    Raises:
        UserError: the file is unreadable or malformed (with line and column), its format unknown, or no job is in it.
    """
    path = Path(path)
    formats = trace_formats()
    if format is not None and format not in {f.name for f in formats}:
        raise UserError(
            f"unknown trace format {format!r}, allowed: {', '.join(f.name for f in formats)}",
            "leave it out: the header tells the format",
        )
    source = open_source(path)
    trace = _choose(source, formats, format).read(source)
    if not trace.jobs:
        raise UserError(f"{path}: no jobs in it ({trace.report.text()})", "a trace has one line a job below its header")
    return trace


def _choose(source: Source, formats: tuple[TraceFormat, ...], name: str | None) -> TraceFormat:
    known = ", ".join(f.name for f in formats)
    if name is not None:
        chosen = next(f for f in formats if f.name == name)
        if chosen.matches(source):
            return chosen
        raise UserError(
            f"{_place(source)} is not {name}: {','.join(chosen.columns)}",
            "leave the format out to have it recognised from the header",
        )
    found = next((f for f in formats if f.matches(source)), None)
    if found is not None:
        return found
    if source.is_folder:
        raise UserError(
            f"cannot read {source.path}: it is a folder without PAI's pai_task_table.csv", "give the path of a file"
        )
    if "JobID" in source.head and "|" not in source.head:
        raise UserError(
            f"{source.path}, line 1: sacct's columns are not separated by '|'",
            "export with `sacct --parsable2 --format JobID,User,Partition,Submit,Start,End,ElapsedRaw,State,AllocTRES`",
        )
    raise UserError(
        f"{source.path}, line 1: unknown header {_shown(source)}, allowed: the columns of {known}",
        "the simplest is a CSV with the header " + ",".join(formats[0].columns),
    )


def _place(source: Source) -> str:
    return f"{source.path}: the folder" if source.is_folder else f"{source.path}, line 1: header {_shown(source)}"


def _shown(source: Source) -> str:
    joined = ",".join(source.header)
    return repr(joined if len(joined) <= 80 else joined[:80] + "...")
