"""Small experiments for tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from icefrog.experiment.backends import Outcome
from icefrog.experiment.cells import Cell, Experiment, expand
from icefrog.experiment.spec import read_experiment

SMALL = """
traces: {source: synth:philly-120, name: philly, jobs: 6}
cluster: 2x4
seeds: 2
policies: [fifo, srtf]
"""


def load(folder: Path, text: str = SMALL, name: str = "small.yaml") -> Experiment:
    path = folder / name
    path.write_text(text)
    return expand(read_experiment(path))


def result(jct_s: list[float | None], **summary: Any) -> dict[str, Any]:
    """A cell's result with these completion times."""
    done = [value for value in jct_s if value is not None]
    n = len(jct_s)
    return {
        "summary": {
            **{"jobs": n, "completed": len(done), "unfinished": n - len(done), "avg_jct_s": sum(done) / len(done)},
            **{"wall_s": 1.0, "decision_s": None, **summary},
        },
        "jobs": {"job_id": [f"j{i}" for i in range(n)], "jct_s": jct_s, "class": ["small", "large"] * n},
        "trace": {},
        "cpu_s": 0.5,
    }


def fake(index: int, cell: Cell, program: str) -> Outcome:
    """Instead of a simulation."""
    return Outcome(index, result([10.0 * (cell.seed + 1), 20.0]))


def deadly(index: int, cell: Cell, program: str) -> Outcome:
    """Seed 1 takes its worker with it."""
    if cell.seed == 1 and cell.variant.name == "fifo":
        os._exit(9)
    return fake(index, cell, program)
