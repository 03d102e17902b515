"""Running an experiment: what is finished is read, what is missing is computed and kept at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from icefrog.errors import UserError
from icefrog.experiment.backends import Backend
from icefrog.experiment.cells import Cell
from icefrog.experiment.digest import program_digest, trace_digest
from icefrog.experiment.store import CellStore, NotFiniteError

Result = Mapping[str, Any]
"""What :func:`icefrog.experiment.cell_run.run_cell` returns."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A cell and the name of its result."""

    cell: Cell
    key: str


@dataclass(frozen=True, slots=True)
class Sweep:
    """What came of the cells."""

    results: Mapping[str, Result]
    """By key."""
    failed: Mapping[str, str]
    """Why, by key."""
    reused: int
    """Distinct cells that were finished before."""


def plan(cells: Sequence[Cell]) -> list[Planned]:
    """Name every cell's result. Raises :class:`icefrog.errors.UserError` for a trace that cannot be read."""
    traces = {path: trace_digest(path) for path in {cell.trace.path for cell in cells}}
    return [Planned(cell, cell.key(program_digest(), traces[cell.trace.path])) for cell in cells]


def run_sweep(
    planned: Sequence[Planned],
    store: CellStore,
    backend: Backend,
    progress: Callable[[int, int, str], None] | None = None,
) -> Sweep:
    """Compute what the store lacks. An interruption (any exception) leaves the store whole; call again to go on.

    Args:
        planned: the cells; equal ones are computed once.
        store: where results are, and go.
        backend: what computes.
        progress: called with (cells done, cells in all, what was last done), first before anything is computed.
    """
    results: dict[str, Result] = {}
    missing: dict[str, Cell] = {}
    for one in planned:
        if one.key in results or one.key in missing:
            continue
        found = store.get(one.key)
        if found is None:
            missing[one.key] = one.cell
        else:
            results[one.key] = found
    reused, total, failed = len(results), len(results) + len(missing), {}
    if progress is not None:
        progress(reused, total, "")
    keys = list(missing)
    with closing(backend.run(list(missing.values()))) as outcomes:
        for outcome in outcomes:
            key = keys[outcome.index]
            if outcome.result is None:
                failed[key] = outcome.error
            elif (changed := _changed(missing[key], key)) is not None:
                failed[key] = changed
            else:
                try:
                    store.put(key, missing[key], outcome.result)
                    results[key] = outcome.result
                except NotFiniteError as error:
                    failed[key] = str(error)
            if progress is not None:
                progress(len(results) + len(failed), total, missing[key].label())
    return Sweep(results, failed, reused)


def _changed(cell: Cell, key: str) -> str | None:
    """Why a result that has just been computed is not the one that was planned: it would be kept under a false name."""
    try:
        same = cell.key(program_digest(), trace_digest(cell.trace.path)) == key
    except UserError as error:
        return f"{error.message} any more ({error.hint})"
    return None if same else f"the trace {cell.trace.path} was changed meanwhile (the same command computes it anew)"


def default_out(name: str) -> Path:
    """Where an experiment's results go if nothing is said."""
    return Path("runs") / name
