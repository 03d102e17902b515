"""Layer-aware throughput: the sanity checks of the specification, limits, monotonicity, broadcasting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icefrog.estimate.terms import backward_s, compute_s, power_sum, sync_s, synchronise_s
from icefrog.estimate.throughput import step_s, throughput
from icefrog.profile import ComputeCurve, SyncCurve, ThroughputParams
from icefrog.testing.builders import profile

seconds = st.floats(1e-6, 10.0)


@st.composite
def parameters(draw: st.DrawFn) -> ThroughputParams:
    bwd = ComputeCurve(alpha_s=draw(seconds), beta_s=draw(seconds), smooth=draw(st.floats(1.0, 8.0)))
    return ThroughputParams(
        fwd=ComputeCurve(alpha_s=draw(seconds), beta_s=draw(seconds)),
        bwd=bwd,
        sync=SyncCurve(
            intra_alpha_s=draw(seconds),
            intra_beta_s=draw(seconds),
            inter_alpha_s=draw(seconds),
            inter_beta_s=draw(seconds),
            pair_beta_s=draw(seconds),
        ),
        overlap_gamma=draw(st.floats(1.0, 20.0)),
        flop_alpha_s=draw(seconds),
        flop_gamma=draw(st.floats(0.2, 2.0)),
        straggler=draw(st.floats(0.0, 2.0)),
        sync_alpha_s=draw(seconds),
    )


def plain_step_s(params: ThroughputParams, gpus: int, nodes: int, batch: int) -> float:
    """The full-layer model, written out without any freezing term."""
    wait = 1.0 + params.straggler * (gpus - 1.0) / (gpus + 1.0)
    backward = compute_s(params.bwd, batch) * wait
    sync = sync_s(params.sync, gpus, nodes)
    return float(compute_s(params.fwd, batch) * wait + power_sum(backward, sync, params.overlap_gamma))


@given(parameters(), st.integers(1, 32), st.integers(1, 8), st.integers(1, 4096))
def test_nothing_frozen_gives_back_the_full_profile_to_the_last_bit(
    params: ThroughputParams, gpus: int, nodes: int, batch: int
) -> None:
    job = profile(throughput=params)
    assert float(step_s(job, gpus, nodes, batch, 0)) == plain_step_s(params, gpus, nodes, batch)


@given(parameters(), st.integers(1, 32), st.integers(1, 8), st.integers(1, 4096), st.integers(1, 6))
def test_freezing_deeper_is_never_slower_and_time_stays_above_the_fixed_parts(
    params: ThroughputParams, gpus: int, nodes: int, batch: int, accum: int
) -> None:
    job = profile(num_layers=8, throughput=params)
    steps = step_s(job, gpus, nodes, batch, np.arange(9), accum)
    assert np.all(np.diff(steps) <= 1e-12 * steps[0])
    assert np.all(steps > 0)
    fixed = min(params.flop_alpha_s, params.bwd.alpha_s)
    assert float(backward_s(params, 0.0, batch)) == pytest.approx(fixed)
    assert float(backward_s(params, 0.0, batch)) <= float(compute_s(params.bwd, 0)) * (1 + 1e-12)


@given(parameters(), st.floats(0.0, 1.0))
def test_one_gpu_never_synchronises(params: ThroughputParams, omega: float) -> None:
    assert float(synchronise_s(params, omega, 1, 1)) == 0.0


def test_sync_of_a_frozen_prefix_follows_the_bytes_not_the_layers() -> None:
    params = ThroughputParams(
        fwd=ComputeCurve(alpha_s=0, beta_s=1e-9),
        bwd=ComputeCurve(alpha_s=0, beta_s=1e-9),
        sync=SyncCurve(intra_alpha_s=1.0),
        sync_alpha_s=0.2,
    )
    assert float(synchronise_s(params, 0.5, 2, 1)) == pytest.approx(0.2 + 0.8 * 0.5)


def test_two_nodes_pay_for_crowding_and_more_nodes_do_not() -> None:
    curve = SyncCurve(inter_alpha_s=1.0, pair_beta_s=0.5)
    np.testing.assert_allclose(sync_s(curve, [2, 4, 8, 8], [2, 2, 2, 4]), [1.0, 1.5, 2.5, 1.0])


def test_accumulation_repeats_compute_and_synchronises_once() -> None:
    job = profile()
    params = job.throughput
    forward, backward = float(compute_s(params.fwd, 16)), float(compute_s(params.bwd, 16))
    sync = float(sync_s(params.sync, 4, 1))
    assert float(step_s(job, 4, 1, 16, 0, 3)) == pytest.approx(3 * (forward + backward) + sync)  # gamma = 1: no overlap


def test_overlap_hides_the_shorter_of_the_two() -> None:
    assert float(power_sum(3.0, 4.0, 1.0)) == 7.0
    assert float(power_sum(3.0, 4.0, 2.0)) == pytest.approx(5.0)
    assert float(power_sum(3.0, 4.0, 100.0)) == pytest.approx(4.0)
    assert float(power_sum(0.0, 0.0, 3.0)) == 0.0


def test_shared_runs_at_nine_tenths() -> None:
    job = profile()
    assert float(throughput(job, 1, 1, 32, 2, shared=True)) == pytest.approx(0.9 * float(throughput(job, 1, 1, 32, 2)))


def test_throughput_counts_every_micro_step() -> None:
    job = profile()
    assert float(throughput(job, 2, 1, 16, 0, 4)) == pytest.approx(2 * 16 * 4 / float(step_s(job, 2, 1, 16, 0, 4)))


def test_one_call_prices_a_whole_grid() -> None:
    job = profile(num_layers=5)
    gpus = np.array([1, 2, 4]).reshape(-1, 1, 1)
    batch = np.array([8, 16]).reshape(1, -1, 1)
    grid = step_s(job, gpus, 1, batch, np.arange(5))
    assert grid.shape == (3, 2, 5)
    assert grid[2, 1, 3] == pytest.approx(float(step_s(job, 4, 1, 16, 3)))
