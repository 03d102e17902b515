"""What-if: one set-up and changed ones, on the same jobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from icefrog.errors import UserError
from icefrog.experiment.aggregate import Document, Replicates, condition_findings, findings
from icefrog.experiment.cells import Cell
from icefrog.experiment.changes import Setup
from icefrog.experiment.spec import TraceEntry
from icefrog.experiment.sweep import Planned, Result, Sweep

BASE = "as it is"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A set-up that is run."""

    setup: Setup

    @property
    def name(self) -> str:
        """How the table calls it."""
        return self.setup.variant.name

    def cells(self, trace: TraceEntry, seeds: Sequence[int]) -> Iterator[Cell]:
        """A cell a seed."""
        return (Cell(trace, seed, self.setup.variant, self.setup.condition) for seed in seeds)


def scenarios(base: Setup, changes: Sequence[Setup]) -> list[Scenario]:
    """The base first. Raises :class:`UserError` where two changes are the same text."""
    names = [setup.variant.name for setup in changes]
    if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
        raise UserError(f"--change: {twice!r} is given twice", "give each scenario once")
    return [Scenario(base), *(Scenario(setup) for setup in changes)]


def whatif_findings(title: str, chosen: Sequence[Scenario], planned: Sequence[Planned], sweep: Sweep) -> Document:
    """A findings document with a row a scenario."""
    results: dict[str, dict[tuple[str, int], Result]] = {}
    for one in planned:
        if (result := sweep.results.get(one.key)) is not None:
            results.setdefault(one.cell.variant.name, {})[one.cell.replicate] = result
    rows = [Replicates(s.setup.variant, results[s.name]) for s in chosen if s.name in results]
    conditions = [condition_findings(chosen[0].setup.condition, rows, BASE)] if rows else []
    about = "What if? Each row is a changed set-up, simulated on the same jobs as the base."
    return findings(title, about, BASE, planned, sweep, conditions)
