"""What frozen steps are worth by the measured table, and how the signal is spread over the layers."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icefrog.workloads import load_catalogue
from icefrog.workloads.worth import FrozenWorth

SHARES = st.floats(0.0, 1.0)
TABLE: dict[str, Any] = json.loads((resources.files("icefrog.workloads") / "frozen_worth.json").read_text())
KINDS = {kind: FrozenWorth.of(curves) for kind, curves in TABLE["kinds"].items()}


def test_between_depths_and_starts_worth_is_linear() -> None:
    table = FrozenWorth((0.0, 0.5), ((0.0, 0.5, 1.0), (0.0, 0.5, 1.0)), ((1.0, 0.8, 0.0), (1.0, 0.6, 0.0)))
    assert [table.worth(depth, 0.0) for depth in (0.0, 0.25, 0.5, 0.75, 1.0)] == pytest.approx([1, 0.9, 0.8, 0.4, 0])
    assert table.worth(0.5, 0.25) == pytest.approx(0.7)
    assert table.worth(0.5, 0.9) == pytest.approx(0.6)  # as the last start


@pytest.mark.parametrize("kind", KINDS)
@given(depth=SHARES, deeper=SHARES, start=SHARES)
def test_the_measured_worth_is_1_for_nothing_and_falls_with_depth(
    kind: str, depth: float, deeper: float, start: float
) -> None:
    worth = KINDS[kind].worth
    assert worth(0.0, start) == 1.0
    assert 0.0 <= worth(max(depth, deeper), start) <= worth(min(depth, deeper), start) <= 1.0


@pytest.mark.parametrize(
    ("depths", "worths"),
    [((0.0, 1.0), (0.9, 0.0)), ((0.0, 0.5, 1.0), (1.0, 1.1, 0.0)), ((0.0, 0.5), (1.0, 0.0)), ((0.0, 1.0), (1.0, 0.1))],
)
def test_a_curve_that_does_not_fall_from_1_to_0_is_refused(depths: tuple[float], worths: tuple[float]) -> None:
    with pytest.raises(ValueError, match="must fall"):
        FrozenWorth((0.0,), (depths,), (worths,))


def test_every_cell_is_made_of_runs_that_are_listed() -> None:
    """Their number, and one task's means again from its runs."""
    listed = [dict(zip(TABLE["run_columns"], run, strict=True)) for run in TABLE["runs"]]
    cells = [cell for curves in TABLE["kinds"].values() for curve in curves for cell in curve["cells"]]
    assert sum(cell["runs"] for cell in cells) == len(listed)
    assert sum(cell["bounds"] for cell in cells) == sum(run["is_upper_bound"] for run in listed)
    assert all(run["worth"] < 1.0 for run in listed if run["is_upper_bound"])  # others say nothing
    for depth, units in ((0.5, 5), (0.6, 6)):  # of 10; all of them froze in the first steps
        runs = [run for run in listed if run["task"] == "resnet-transfer" and run["units_frozen"] == units]
        transfer = np.mean([np.log(run["worth"]) for run in runs])
        of_it = [cell for cell in cells if cell["depth"] == depth and "resnet-transfer" in cell["tasks"]]
        measured = [cell["tasks"]["resnet-transfer"] for cell in of_it]
        assert measured == [pytest.approx(min(np.exp(transfer), 1.0), abs=2e-3)]


def test_every_workload_has_a_worth_and_a_signal() -> None:
    catalogue = load_catalogue()
    for workload in catalogue.values():
        curves = workload.curves.bind(workload.profile.num_layers, workload.task.batch.min)
        assert curves.worth(0.5, 0.4) == KINDS[workload.task.gradients.worth].worth(0.5, 0.4)
        for progress in (0.0, 0.33, 1.0):
            signal = curves.signal(progress)
            assert signal.shape == (workload.profile.num_layers,)
            assert signal.min() >= 0.0
            assert signal.sum() == pytest.approx(1.0)
    tuned = {name for name, workload in catalogue.items() if workload.task.gradients.worth == "finetune"}
    assert tuned == {"bert-squad", "llama-3b-squad", "llama-7b-sst2"}
