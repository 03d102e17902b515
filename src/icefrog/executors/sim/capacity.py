"""Capacity that changes over time: a file of how many nodes (or GPUs) are in service when, and what that means by node.

Two forms, told apart by the header:

- ``time_s,nodes`` or ``time_s,gpus``: seconds since the start of the simulation;
- Helios' ``cluster_gpu_number.csv`` (HeliosArtifact, SC'21): ``date,<vc>...,total``, GPUs by day; choose a VC or ``total``.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from icefrog.errors import UserError
from icefrog.executors.sim.failures import NodeChange
from icefrog.spec import ClusterSpec

Unit = Literal["nodes", "gpus"]
_MAX_BYTES = 50_000_000


@dataclass(frozen=True, slots=True)
class Capacity:
    """What is in service over time: ``steps[i] = (time in s, count from then on)``, ascending in time."""

    unit: Unit
    steps: tuple[tuple[float, int], ...]
    source: str


def read_capacity(text: str, start: datetime | None = None) -> Capacity:
    """Read ``FILE`` or ``FILE:COLUMN`` (a VC of a Helios file; default ``total``).

    Args:
        text: as given to ``--capacity``.
        start: the time of a dated file at which the simulation starts; None: its first date.

    Raises:
        UserError: naming file and line.
    """
    path, column = _split(text)
    rows = _rows(path)
    if not rows:
        raise UserError(f"--capacity: {path} is empty", "a header and at least one row: time_s,nodes")
    header = [name.strip().lower() for name in rows[0][1]]
    if header[:1] == ["time_s"]:
        return _by_seconds(path, header, column, rows[1:])
    if header[:1] == ["date"]:
        return _by_date(path, [name.strip() for name in rows[0][1]], column, rows[1:], start)
    raise UserError(
        f"--capacity: {path}:1: the first column is {rows[0][1][0]!r}",
        "time_s,nodes or time_s,gpus or Helios' date,<vc>...,total",
    )


def planned_changes(capacity: Capacity, cluster: ClusterSpec) -> tuple[NodeChange, ...]:
    """The changes of single nodes. The last nodes of the cluster leave first and are the last to come back.

    GPUs that do not fill a node are rounded down: as many nodes serve as have no more GPUs together than stated. What holds
    before time 0 holds at its start; before the first step everything serves.

    Raises:
        UserError: the capacity exceeds the cluster.
    """
    sizes = cluster.gpus_per_node
    total = len(sizes) if capacity.unit == "nodes" else cluster.num_gpus
    most = max(count for _, count in capacity.steps)
    if most > total:
        raise UserError(
            f"--capacity: {capacity.source} has up to {most} {capacity.unit}, the cluster has {total}",
            f"give --cluster at least {most} {capacity.unit}",
        )
    changes: list[NodeChange] = []
    serving = len(sizes)
    for time_s, count in _from_zero(capacity.steps):
        wanted = count if capacity.unit == "nodes" else _nodes_within(sizes, count)
        reason = f"capacity of {capacity.source}"
        changes += (NodeChange(time_s, node, False, True, reason) for node in range(wanted, serving))
        changes += (NodeChange(time_s, node, True, True) for node in range(serving, wanted))
        serving = wanted
    return tuple(changes)


def _from_zero(steps: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    past = [count for time_s, count in steps if time_s <= 0.0]
    return ([(0.0, past[-1])] if past else []) + [step for step in steps if step[0] > 0.0]


def _nodes_within(sizes: Sequence[int], gpus: int) -> int:
    """The most leading nodes that have no more than ``gpus`` GPUs together."""
    nodes, used = 0, 0
    while nodes < len(sizes) and used + sizes[nodes] <= gpus:
        used += sizes[nodes]
        nodes += 1
    return nodes


# -- reading ---------------------------------------------------------------------------------------------------------------


def _split(text: str) -> tuple[Path, str | None]:
    """``FILE:COLUMN``; a file whose own name has a colon is tried first."""
    if Path(text).exists() or ":" not in text:
        return Path(text), None
    name, _, column = text.rpartition(":")
    return Path(name), column


def _rows(path: Path) -> list[tuple[int, list[str]]]:
    """(line, cells) of every line that is not blank."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UserError(f"--capacity: {path} is larger than {_MAX_BYTES} bytes", "is this a table of capacities?")
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            return [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except (OSError, ValueError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(f"--capacity: {path}: {why}", "give a CSV file, or FILE:VC for one of its columns") from error


def _by_seconds(path: Path, header: list[str], column: str | None, rows: Sequence[tuple[int, list[str]]]) -> Capacity:
    units = [name for name in header[1:] if name in ("nodes", "gpus")]
    if len(units) != 1 or column not in (None, units[0]):
        raise UserError(f"--capacity: {path}:1: columns {', '.join(header)}", "time_s,nodes or time_s,gpus")
    index = header.index(units[0])
    steps = [(_seconds(path, line, row[0]), _count(path, line, row, index)) for line, row in rows]
    return _checked(path, "nodes" if units[0] == "nodes" else "gpus", steps, [line for line, _ in rows], path.name)


def _by_date(
    path: Path, header: list[str], column: str | None, rows: Sequence[tuple[int, list[str]]], start: datetime | None
) -> Capacity:
    chosen = "total" if column is None else column
    if chosen not in header[1:]:
        raise UserError(f"--capacity: {path} has no column {chosen!r}", f"give FILE:VC, one of {', '.join(header[1:])}")
    index = header.index(chosen)
    dates = [_date(path, line, row[0]) for line, row in rows]
    origin = start or (dates[0] if dates else datetime.min)
    steps = [
        ((date - origin).total_seconds(), _count(path, line, row, index))
        for date, (line, row) in zip(dates, rows, strict=True)
    ]
    return _checked(path, "gpus", steps, [line for line, _ in rows], f"{path.name}:{chosen}")


def _checked(path: Path, unit: Unit, steps: list[tuple[float, int]], lines: list[int], source: str) -> Capacity:
    if not steps:
        raise UserError(f"--capacity: {path} has a header and no rows", "one row for each change")
    for line, before, after in zip(lines[1:], steps, steps[1:], strict=False):
        if after[0] <= before[0]:
            raise UserError(f"--capacity: {path}:{line}: times do not ascend", "sort the rows by time, each once")
    return Capacity(unit, tuple(steps), source)


def _seconds(path: Path, line: int, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"--capacity: {path}:{line}: time {text!r} is not a number", "seconds since the start")
    return value


def _date(path: Path, line: int, text: str) -> datetime:
    try:
        return datetime.fromisoformat(text.strip()).replace(tzinfo=None)
    except ValueError as error:
        raise UserError(f"--capacity: {path}:{line}: {text!r} is not a date", "for example 2020-09-01") from error


def _count(path: Path, line: int, row: Sequence[str], index: int) -> int:
    text = row[index].strip() if index < len(row) else ""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0 and value == int(value)):
        raise UserError(f"--capacity: {path}:{line}: {text!r} is not a count", "a whole number, 0 or more")
    return int(value)
