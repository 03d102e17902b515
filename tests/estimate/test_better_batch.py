"""Which global batch a running job moves to: agreement with the Layer Tuner and with brute force, limits, trials."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icefrog.estimate.batch import TRIAL_COST, BatchLimits, BatchMove, batch_options, better_batch
from icefrog.estimate.throughput import throughput
from icefrog.estimate.tuner import efficiency, tune
from icefrog.profile import ComputeCurve, Profile, SyncCurve, ThroughputParams
from icefrog.testing.builders import profile
from icefrog.types import Config

KNOWN = 10**6


def job(fixed_s: float, sample_s: float, sync_s: float = 0.0) -> Profile:
    """Two layers; a pass takes ``fixed_s`` and ``sample_s`` for each sample, backward twice that."""
    return profile(
        num_layers=2,
        max_local_batch=4,  # as measured: what memory allows is said by the limits
        throughput=ThroughputParams(
            fwd=ComputeCurve(alpha_s=fixed_s, beta_s=sample_s),
            bwd=ComputeCurve(alpha_s=2 * fixed_s, beta_s=2 * sample_s),
            sync=SyncCurve(intra_alpha_s=sync_s, intra_beta_s=0.0, inter_alpha_s=sync_s, inter_beta_s=0.0),
        ),
    )


def better(
    of: Profile,
    config: Config,
    limits: BatchLimits,
    phi: float,
    *,
    hysteresis: float = 0.0,
    largest_measured: int = KNOWN,
) -> BatchMove | None:
    return better_batch(
        of,
        config,
        limits,
        num_nodes=1,
        phi=phi,
        largest_measured=largest_measured,
        measured_s={},
        hysteresis=hysteresis,
    )


def test_options_are_powers_of_two_of_the_first_batch_up_to_one_doubling() -> None:
    limits = BatchLimits(base_batch=6, most_samples=100, batch_per_gpu=1, accumulates=True)
    assert batch_options(6, limits) == (6, 12)
    assert batch_options(48, limits) == (6, 12, 24, 48, 96)
    assert batch_options(96, limits) == (6, 12, 24, 48, 96)
    assert batch_options(32, limits) == (6, 12, 24, 32, 48)  # as granted, on no power of two


@given(
    st.integers(0, 4),
    st.integers(1, 4),
    st.floats(1e-4, 1.0),
    st.floats(1e-4, 1.0),
    st.floats(1e-3, 1e5),
)
def test_the_move_is_the_best_of_the_doublings(
    power: int, num_gpus: int, fixed_s: float, sample_s: float, phi: float
) -> None:
    """One split a batch: local batches as large as they come, one micro-step."""
    base, of = 4 * num_gpus, job(fixed_s, sample_s, sync_s=0.01)
    now = Config(num_gpus, 4 << power, 1, 1)
    limits = BatchLimits(base, base << 6, 10**6, accumulates=False)
    worth = {
        batch: float(throughput(of, num_gpus, 1, batch // num_gpus, 1)) * (phi + base) / (phi + batch)
        for batch in batch_options(now.global_batch, limits)
    }
    move = better(of, now, limits, phi)
    chosen = now.global_batch if move is None else move.config.global_batch
    assert worth[chosen] == pytest.approx(max(worth.values()))
    assert move is None or (move.config.frozen_layers, move.config.accum_steps, move.trial) == (1, 1, False)


@given(st.integers(0, 4), st.floats(1e-4, 1.0), st.floats(1e-4, 1.0), st.floats(1e-3, 1e5))
def test_it_is_the_choice_of_the_layer_tuner_among_the_same_batches(
    power: int, fixed_s: float, sample_s: float, phi: float
) -> None:
    of = job(fixed_s, sample_s)
    now = Config(1, 4 << power)
    limits = BatchLimits(4, 4 << 6, 4 << 6, accumulates=False)
    wide = of.model_copy(update={"max_local_batch": limits.batch_per_gpu})
    batches = batch_options(now.global_batch, limits)
    tuned = tune(
        wide, None, num_gpus=1, global_batches=batches, max_frozen_layers=0, phi=phi, initial_batch=4, current=now
    )
    move = better(of, now, limits, phi)
    assert (now if move is None else move.config) == tuned.config


def test_a_move_must_gain_more_than_the_hysteresis() -> None:
    of, now = job(1.0, 1.0), Config(1, 4)
    limits = BatchLimits(4, 64, 64, accumulates=False)
    gain = 2 * (3.0 * 5) / (3.0 * 9) - 1.0  # T of 8 against 4, without noise in phi's way
    for hysteresis, moves in ((gain - 0.01, True), (gain + 0.01, False)):
        found = better(of, now, limits, 1e12, hysteresis=hysteresis)
        assert (found is not None) == moves
    assert (found := better(of, now, limits, 1e12)) is not None
    assert found.reason == f"batch 4 -> 8: {gain:+.1%} progress, phi 1e+12"


def test_without_noise_it_goes_back_to_the_first_batch_and_no_further() -> None:
    found = better(job(0.1, 1.0), Config(1, 32), BatchLimits(8, 64, 64, accumulates=False), phi=0.1)
    assert found is not None
    assert found.config == Config(1, 8)
    assert better(job(0.1, 1.0), found.config, BatchLimits(8, 64, 64, accumulates=False), phi=0.1) is None


def test_what_memory_forbids_is_accumulated_where_the_job_does() -> None:
    """Two GPUs whose synchronisation takes long: a step of more micro-steps is worth it."""
    of, now = job(0.1, 0.1, sync_s=10.0), Config(2, 4)
    alone = BatchLimits(8, 64, 4, accumulates=False)
    assert better(of, now, alone, 1e6) is None
    found = better(of, now, BatchLimits(8, 64, 4, accumulates=True), 1e6)
    assert found is not None
    assert found.config == Config(2, 4, 2)
    found = better(of, now, BatchLimits(8, 64, 8, accumulates=True), 1e6)
    assert found is not None
    assert found.config == Config(2, 8, 1)
    assert better(of, now, BatchLimits(8, 15, 8, accumulates=True), 1e6) is None


def test_the_present_batch_is_not_dealt_otherwise() -> None:
    """The user chose micro-steps: memory that is there is used by another batch only."""
    of, now = job(1.0, 0.01), Config(1, 4, 4)
    assert better(of, now, BatchLimits(16, 16, 16, accumulates=True), 1e6) is None


def test_ranks_that_do_not_divide_the_batch_leave_it() -> None:
    assert better(job(1.0, 0.01), Config(3, 3), BatchLimits(8, 64, 64, accumulates=True), 1e6) is None


def test_a_batch_of_unknown_speed_is_tried_where_that_costs_little() -> None:
    of, now = job(0.0, 1.0), Config(1, 4)  # a prior that knows of no fixed part: nothing to gain
    limits = BatchLimits(4, 64, 64, accumulates=False)
    edge = (8 * (1 - TRIAL_COST) - 4) / TRIAL_COST  # EFF(8) = 1 - TRIAL_COST
    assert float(efficiency(edge, 4, 8)) == pytest.approx(1 - TRIAL_COST)
    assert better(of, now, limits, edge * 0.99, largest_measured=4) is None
    found = better(of, now, limits, edge * 1.01, largest_measured=4)
    assert found is not None
    assert (found.config, found.trial) == (Config(1, 8), True)
    assert found.reason == f"batch 4 -> 8: tried, it costs at most 5.0%, phi {edge * 1.01:.3g}"
    assert better(of, now, limits, edge * 1.01, largest_measured=8) is None  # known by now
    assert better(of, now, BatchLimits(4, 64, 4, accumulates=True), edge * 2, largest_measured=4) is None  # more passes
