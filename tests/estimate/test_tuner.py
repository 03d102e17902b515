"""The Layer Tuner: worked decisions, agreement with brute force, legality, hysteresis, and un-freezing over time."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icefrog.errors import UserError
from icefrog.estimate.occupancy import mem_bytes
from icefrog.estimate.penalty import GradientTracker, frozen_penalty
from icefrog.estimate.throughput import throughput
from icefrog.estimate.tuner import (
    TunerRule,
    TunerTable,
    best_per_gpu_count,
    max_frozen_layers,
    penalties,
    split_batch,
    tune,
)
from icefrog.profile import ComputeCurve, LayerCost, OccupancyParams, Profile, SyncCurve, ThroughputParams
from icefrog.testing import builders as b
from icefrog.testing.builders import profile
from icefrog.types import Config


def two_layer_job(full_rate: float, frozen_rate: float) -> Profile:
    """One GPU, batch 100: ``full_rate`` samples/s in full, ``frozen_rate`` with the first of two layers frozen."""
    full_s, frozen_s = 100 / full_rate, 100 / frozen_rate
    backward = 2 * (full_s - frozen_s)  # theta_1 = 1/2 halves it
    return profile(
        num_layers=2,
        throughput=ThroughputParams(
            fwd=ComputeCurve(alpha_s=full_s - backward, beta_s=0.0), bwd=ComputeCurve(alpha_s=backward, beta_s=0.0)
        ),
    )


@pytest.mark.parametrize(
    ("full", "frozen", "variance", "depth", "progress"),
    [
        (100, 140, [20, 80], 1, 112),  # 0.8 x 140
        (100, 120, [20, 80], 0, 100),  # 0.8 x 120 = 96: not worth it
        (800, 1200, [30, 70], 1, 840),
        (800, 1200, [30, 30], 0, 800),  # psi fell to 0.5: 600 < 800, un-freeze
    ],
)
def test_worked_values(full: float, frozen: float, variance: list[float], depth: int, progress: float) -> None:
    choice = tune(two_layer_job(full, frozen), variance, num_gpus=1, global_batches=[100], max_frozen_layers=1)
    assert choice.config.frozen_layers == depth
    assert choice.effective_progress == pytest.approx(progress)


def test_time_to_accuracy_of_the_worked_example() -> None:
    choice = tune(two_layer_job(800, 1200), [30, 70], num_gpus=1, global_batches=[100], max_frozen_layers=1)
    assert choice.estimate(0.0, 720_000).tta_s == pytest.approx(857, abs=0.2)
    assert choice.estimate(1800.0, 720_000).tta_s == pytest.approx(2657, abs=0.2)
    assert (1800 + 720) / choice.estimate(1800.0, 720_000).tta_s == pytest.approx(0.948, abs=5e-4)


def test_the_tuner_freezes_and_later_unfreezes_on_recorded_statistics() -> None:
    """Per-layer statistics of one job, as it would feed them: the front converges first, then the rest falls too."""
    job = profile(num_layers=4)
    tracker = GradientTracker(4)
    depths, psis = [], []
    for epoch in range(12):
        front = 10.0 * 0.3**epoch
        rest = 10.0 * (1.0 if epoch < 5 else 0.15 ** (epoch - 4))
        variance = [front, 2 * front, rest, rest]
        for _ in range(100):
            tracker.observe([math.nan] * tracker.frozen_layers + variance[tracker.frozen_layers :], [1.0] * 4)
        seen = tracker.variance if tracker.ready else None
        current = Config(1, 64, frozen_layers=tracker.frozen_layers)
        choice = tune(job, seen, num_gpus=1, global_batches=[64], max_frozen_layers=3, current=current)
        tracker.set_boundary(choice.config.frozen_layers)
        depths.append(choice.config.frozen_layers)
        psis.append(choice.psi)
    assert depths[0] == 0
    assert max(depths) == 2
    peak = depths.index(2)
    assert min(depths[peak:]) < 2, depths  # opened again, nothing forced
    assert depths == sorted(depths[: peak + 1]) + depths[peak + 1 :]
    assert all(0 < psi <= 1 for psi in psis)


profiles = st.builds(
    lambda flops, bytes_, gamma, alpha, straggler: profile(
        layers=tuple(
            LayerCost(name=str(i), flops=f, param_bytes=b) for i, (f, b) in enumerate(zip(flops, bytes_, strict=False))
        ),
        throughput=ThroughputParams(
            fwd=ComputeCurve(alpha_s=0.002, beta_s=0.0005),
            bwd=ComputeCurve(alpha_s=0.004, beta_s=0.001),
            sync=SyncCurve(intra_alpha_s=0.02, intra_beta_s=0.002, inter_alpha_s=0.08, inter_beta_s=0.002),
            overlap_gamma=gamma,
            flop_alpha_s=alpha,
            straggler=straggler,
        ),
        max_local_batch=48,
        min_local_batch=4,
    ),
    st.lists(st.floats(0.0, 1e9), min_size=6, max_size=6),
    st.lists(st.floats(1.0, 1e9), min_size=6, max_size=6),
    st.floats(1.0, 5.0),
    st.floats(0.0, 0.01),
    st.floats(0.0, 1.0),
)


@given(
    profiles,
    st.lists(st.floats(0.0, 100.0), min_size=6, max_size=6),
    st.one_of(st.none(), st.floats(0.0, 1e4)),
    st.sampled_from([(64,), (32, 64, 128), (96,), (50,)]),
    st.integers(0, 5),
)
def test_it_is_the_argmax_over_all_legal_configurations(
    job: Profile, variance: list[float], phi: float | None, batches: tuple[int, ...], deepest: int
) -> None:
    psi = frozen_penalty(variance)
    rule = TunerRule(((1, 1), (2, 1), (4, 1), (8, 2)), batches, batches[0], deepest)
    choices = best_per_gpu_count(TunerTable.of(job, rule), penalties(job, variance), phi=phi)
    for gpus, nodes in rule.placements:
        best = 0.0
        for batch, depth in itertools.product(batches, range(deepest + 1)):
            for m, k in split_batch(job, batch, gpus):
                assert gpus * m * k == batch
                assert 4 <= m <= 48
                noise = phi or 0.0
                worth = (noise + batches[0]) / (noise + batch) if len(batches) > 1 else 1.0
                if not np.isnan(psi[depth]):
                    best = max(best, psi[depth] * worth * float(throughput(job, gpus, nodes, m, depth, k)))
        if best == 0.0:
            assert gpus not in choices
            continue
        choice = choices[gpus]
        assert choice.effective_progress == pytest.approx(best)
        assert choice.config.num_gpus == gpus
        assert choice.config.global_batch in batches
        assert choice.config.frozen_layers <= deepest
        found = choice.config
        rate = throughput(job, gpus, nodes, found.batch_per_gpu, found.frozen_layers, found.accum_steps)
        assert choice.throughput == pytest.approx(float(rate))


def test_psi_of_one_makes_progress_equal_throughput() -> None:
    choice = tune(profile(), [0, 0, 0, 5], num_gpus=2, global_batches=[64], max_frozen_layers=3)
    assert choice.psi == 1.0
    assert choice.effective_progress == choice.throughput
    assert choice.config.frozen_layers == 3


def test_without_statistics_nothing_is_frozen() -> None:
    choice = tune(profile(), None, num_gpus=1, global_batches=[64], max_frozen_layers=3)
    assert (choice.config.frozen_layers, choice.psi) == (0, 1.0)
    assert "no gradient statistics" in choice.reason


def test_zero_variance_everywhere_offers_only_full_training() -> None:
    assert tune(profile(), [0] * 4, num_gpus=1, global_batches=[64], max_frozen_layers=3).config.frozen_layers == 0


def test_the_depth_limit_leaves_a_layer() -> None:
    assert max_frozen_layers(20, 0.9) == 18
    assert max_frozen_layers(10, 0.3) == 3  # 0.3 x 10 is 2.9999...
    assert max_frozen_layers(4, 1.0) == 3
    assert max_frozen_layers(1, 0.9) == 0
    assert (
        tune(profile(), [0, 0, 0, 1], num_gpus=1, global_batches=[64], max_frozen_layers=99).config.frozen_layers == 3
    )


def test_a_batch_above_the_local_limit_is_accumulated() -> None:
    job = profile(max_local_batch=32)
    config = tune(job, None, num_gpus=2, global_batches=[256], max_frozen_layers=0).config
    assert (config.batch_per_gpu, config.accum_steps, config.global_batch) == (32, 4, 256)


def test_memory_makes_the_tuner_accumulate_or_freeze_and_else_say_no() -> None:
    job = profile(occupancy=OccupancyParams(mem_bytes=(1e9, 1e8, 2e9, 0), util_pct=(10, 0, 0, 0)))
    need = float(mem_bytes(job, 64, 0))
    accumulated = tune(job, None, num_gpus=1, global_batches=[64], max_frozen_layers=0, gpu_mem_bytes=need - 1)
    assert accumulated.config.accum_steps == 2
    frozen = tune(job, [0, 0, 0, 1], num_gpus=1, global_batches=[64], max_frozen_layers=3, gpu_mem_bytes=need - 1e9)
    assert (frozen.config.frozen_layers, frozen.config.accum_steps) == (3, 1)
    with pytest.raises(UserError, match="no global batch"):
        tune(job, None, num_gpus=1, global_batches=[64], max_frozen_layers=0, gpu_mem_bytes=1e9)


def test_a_batch_that_does_not_divide_is_an_error_with_a_hint() -> None:
    with pytest.raises(UserError) as caught:
        tune(profile(), None, num_gpus=3, global_batches=[64], max_frozen_layers=0)
    assert "[64]" in caught.value.message
    assert "divides" in caught.value.hint


def test_hysteresis_keeps_the_current_depth_and_ties_never_move_it() -> None:
    job = two_layer_job(100, 140)
    held = Config(1, 100, frozen_layers=0)

    def depth(hysteresis: float, variance: list[float] = [20, 80]) -> int:  # noqa: B006
        choice = tune(
            job, variance, num_gpus=1, global_batches=[100], max_frozen_layers=1, current=held, hysteresis=hysteresis
        )
        return choice.config.frozen_layers

    assert depth(0.0) == 1  # gains 12 %
    assert depth(0.11) == 1
    assert depth(0.13) == 0
    frozen = Config(1, 100, frozen_layers=1)
    level = two_layer_job(80, 100)  # E = 0.8 x 100 = 80: equal
    kept = tune(level, [20, 80], num_gpus=1, global_batches=[100], max_frozen_layers=1, current=frozen)
    fresh = tune(level, [20, 80], num_gpus=1, global_batches=[100], max_frozen_layers=1)
    assert (kept.config.frozen_layers, fresh.config.frozen_layers) == (1, 0)


def test_a_large_noise_scale_makes_large_batches_worth_it() -> None:
    job = profile()
    batches = [32, 64, 128, 256]
    small = tune(job, None, num_gpus=1, global_batches=batches, max_frozen_layers=0, phi=0.0)
    large = tune(job, None, num_gpus=1, global_batches=batches, max_frozen_layers=0, phi=1e6)
    unknown = tune(job, None, num_gpus=1, global_batches=batches, max_frozen_layers=0, phi=None)
    assert small.config.global_batch == unknown.config.global_batch == 32
    assert large.config.global_batch == 256


def test_variance_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="3 variances for the 4 layers"):
        tune(profile(), [1, 2, 3], num_gpus=1, global_batches=[64], max_frozen_layers=1)


def test_tables_are_built_once_a_profile_and_die_with_it() -> None:
    job, rule = profile(), TunerRule(((1, 1),), (64,), 64, 2)
    assert TunerTable.of(job, rule) is TunerTable.of(job, rule)
    slower = job.model_copy(update={"throughput": job.throughput.model_copy(update={"straggler": 1.0})})
    assert TunerTable.of(slower, rule) is not TunerTable.of(job, rule)
    fewer = job.model_copy(update={"layers": job.layers[:2]})
    assert len(fewer.theta) == 3


def test_the_best_depth_within_the_bounds_is_not_the_bounded_best_depth():
    profile = b.profile(num_layers=10)
    variance = np.array([1.7, *[0.001] * 8, 1.0])  # the first layer is dear, the next eight cost nothing
    free = {"num_gpus": 1, "global_batches": [64], "max_frozen_layers": 9}
    inside = tune(profile, variance, min_frozen_layers=2, **free)
    assert inside.config.frozen_layers == 9
    assert tune(profile, variance, **free).config.frozen_layers == 0
    assert tune(profile, None, min_frozen_layers=2, **free).config.frozen_layers == 0  # nothing deeper is offered yet
