"""The job's own fit, and the batch it chooses by it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from invented import application

from icefrog.executors.sim.pollux.application import LocalBatch
from icefrog.executors.sim.pollux.fit import fit_params, log_row, loss
from icefrog.executors.sim.pollux.goodput import BatchGrid, PerfParams, best_batches

TRUE = PerfParams(0.05, 0.002, 0.08, 0.004, 0.03, 0.002, 1.6)


def times(nodes: int, gpus: int, local: int) -> tuple[float, float]:
    compute, sync = TRUE.alpha_c + TRUE.beta_c * local, TRUE.sync_s(nodes, gpus)
    step = (compute**TRUE.gamma + sync**TRUE.gamma) ** (1.0 / TRUE.gamma)
    return step, step - compute


SEEN = {where: times(*where) for where in [(1, 1, 32), (1, 1, 64), (1, 2, 48), (1, 4, 32), (2, 8, 32), (4, 16, 24)]}


@given(st.lists(st.floats(0.01, 1.0), min_size=6, max_size=6), st.floats(1.1, 5.0))
def test_the_gradient_of_the_loss(values: list[float], gamma: float) -> None:
    rows = [log_row(where, measured) for where, measured in SEEN.items()]
    vector = [*values, gamma]
    _, slope = loss(vector, rows)
    for index in range(7):
        step = 1e-6 * vector[index]
        high, low = vector.copy(), vector.copy()
        high[index] += step
        low[index] -= step
        numeric = (loss(high, rows)[0] - loss(low, rows)[0]) / (2 * step)
        assert slope[index] == pytest.approx(numeric, rel=1e-3, abs=1e-4)


def test_a_fit_predicts_what_it_has_seen() -> None:
    fitted = fit_params(SEEN)
    for (nodes, gpus, local), (step, _) in SEEN.items():
        compute, sync = fitted.alpha_c + fitted.beta_c * local, fitted.sync_s(nodes, gpus)
        assert (compute**fitted.gamma + sync**fitted.gamma) ** (1 / fitted.gamma) == pytest.approx(step, rel=0.1)


def test_what_was_never_seen_keeps_its_prior() -> None:
    """One batch on one GPU: half of the compute time is constant, synchronisation costs next to nothing."""
    fitted = fit_params({(1, 1, 32): (0.2, 0.0)})
    assert fitted.alpha_c == pytest.approx(0.1)
    assert fitted.beta_c * 32 == pytest.approx(0.1, rel=1e-2)
    assert fitted.sync_s(1, 4) < 1e-6
    local = fit_params({(1, 1, 32): (0.2, 0.0), (1, 2, 32): (0.25, 0.05), (1, 4, 32): (0.3, 0.1)})
    assert local.alpha_node == pytest.approx(1.1 * local.alpha_local)
    assert local.beta_node == pytest.approx(1.1 * local.beta_local)


def test_the_parameters_survive_the_form_in_which_they_are_reported() -> None:
    assert PerfParams.of(TRUE.throughput_params()) == TRUE


@pytest.mark.parametrize(("noise", "at_most"), [(0.0, 8), (1e9, 32)])
def test_the_batch_follows_the_noise(tmp_path: Path, noise: float, at_most: int) -> None:
    """Without noise a larger batch is worth nothing (8, the initial one); with noise alone all that is allowed (32)."""
    app = application(tmp_path)
    (best,) = best_batches(TRUE, noise, BatchGrid.of(app, (2,)), (1,), (2,))
    assert 2 * best.batch_per_gpu * (best.accum_steps + 1) == at_most


def test_one_gpu_accumulates_for_more_than_the_initial_batch(tmp_path: Path) -> None:
    app = application(tmp_path)
    (best,) = best_batches(TRUE, 1e9, BatchGrid.of(app, (1,)), (1,), (1,))
    assert LocalBatch(best.batch_per_gpu, best.accum_steps) == LocalBatch(16, 1)
