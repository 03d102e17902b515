"""The fitters: known parameters come back from noisy points; what was not measured keeps the prior."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from icefrog.estimate.fit import ThroughputPoint, fit_error, fit_params, fit_throughput, predict_s
from icefrog.profile import ComputeCurve, SyncCurve, ThroughputParams

TRUTH = ThroughputParams(
    fwd=ComputeCurve(alpha_s=0.010, beta_s=0.0010),
    bwd=ComputeCurve(alpha_s=0.020, beta_s=0.0020),
    sync=SyncCurve(intra_alpha_s=0.03, intra_beta_s=0.005, inter_alpha_s=0.12, inter_beta_s=0.01, pair_beta_s=0.03),
    overlap_gamma=2.0,
    straggler=0.1,
)
FREEZING = TRUTH.model_copy(update={"flop_alpha_s": 0.012, "flop_gamma": 0.8, "sync_alpha_s": 0.02})
PLACEMENTS = ((1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (4, 2), (8, 2), (6, 3), (8, 4), (16, 4))
DEPTHS = ((1.0, 1.0), (0.8, 0.95), (0.5, 0.8), (0.25, 0.5), (0.1, 0.2))


def measured(
    truth: ThroughputParams, depths: tuple[tuple[float, float], ...] = ((1.0, 1.0),), noise: float = 0.0, seed: int = 0
) -> list[ThroughputPoint]:
    rng = np.random.default_rng(seed)
    points = [
        ThroughputPoint(gpus, nodes, batch, 1.0, theta=theta, omega=omega)
        for gpus, nodes in PLACEMENTS
        for batch in (4, 8, 16, 32, 64, 128)
        for theta, omega in depths
    ]
    times = predict_s(truth, points) * np.exp(noise * rng.normal(size=len(points)))
    return [replace(point, step_s=float(time)) for point, time in zip(points, times, strict=True)]


@pytest.mark.parametrize("seed", range(3))
def test_full_layer_parameters_come_back_from_noisy_points(seed: int) -> None:
    found = fit_params(measured(TRUTH, noise=0.03, seed=seed))
    assert found.fwd.beta_s + found.bwd.beta_s == pytest.approx(0.003, rel=0.1)
    assert found.fwd.alpha_s + found.bwd.alpha_s == pytest.approx(0.030, rel=0.25)
    assert found.sync.inter_alpha_s == pytest.approx(0.12, rel=0.25)
    clean = measured(TRUTH)
    assert fit_error(found, clean).median < 0.01
    assert fit_error(found, clean).largest < 0.06


@pytest.mark.parametrize("seed", range(3))
def test_freezing_parameters_come_back_from_noisy_points(seed: int) -> None:
    found = fit_params(measured(FREEZING, DEPTHS, noise=0.02, seed=seed))
    assert found.flop_gamma == pytest.approx(0.8, rel=0.1)
    # What is left of the step when all but nothing is frozen: forward + alpha_flop (each alone is weakly determined).
    deep = [ThroughputPoint(1, 1, batch, 1.0, theta=0.02, omega=0.02) for batch in (8, 32, 128)]
    np.testing.assert_allclose(predict_s(found, deep), predict_s(FREEZING, deep), rtol=0.05)
    synced = [ThroughputPoint(8, 4, 4, 1.0, theta=0.05, omega=omega) for omega in (0.05, 0.5)]
    np.testing.assert_allclose(predict_s(found, synced), predict_s(FREEZING, synced), rtol=0.08)


def test_a_timed_forward_pins_the_split() -> None:
    uneven = FREEZING.model_copy(
        update={
            "fwd": ComputeCurve(alpha_s=0.015, beta_s=0.0015),
            "bwd": ComputeCurve(alpha_s=0.015, beta_s=0.0015),
            "straggler": 0.0,
        }
    )
    points = [replace(p, fwd_s=0.015 + 0.0015 * p.batch_per_gpu) for p in measured(uneven, DEPTHS, noise=0.01)]
    found = fit_params(points)
    assert found.fwd.beta_s == pytest.approx(0.0015, rel=0.05)
    assert found.flop_alpha_s == pytest.approx(0.012, rel=0.35)
    assert found.sync_alpha_s == pytest.approx(0.02, rel=0.5)


def test_unseen_error_is_of_points_that_were_not_fitted() -> None:
    points = measured(TRUTH, noise=0.03)
    spoiled = [replace(p, step_s=3 * p.step_s) if i % 5 == 4 else p for i, p in enumerate(points)]
    result = fit_throughput(spoiled)
    assert result.unseen is not None
    assert result.unseen.num_points == len(points) // 5
    assert result.unseen.median == pytest.approx(2 / 3, abs=0.05)  # the fit without them says a third of what they say
    assert fit_throughput(points[:9]).unseen is None


def test_one_disturbed_point_does_not_bend_the_curve() -> None:
    points = measured(TRUTH)
    points[7] = replace(points[7], step_s=10 * points[7].step_s)
    assert fit_error(fit_params(points), measured(TRUTH)).median < 0.01


def test_the_same_points_give_the_same_fit() -> None:
    points = measured(FREEZING, DEPTHS, noise=0.05)
    assert fit_params(points) == fit_params(points)


def test_what_was_never_measured_keeps_the_prior_to_the_bit() -> None:
    alone = [point for point in measured(TRUTH) if point.num_gpus == 1]
    found = fit_params(alone, prior=FREEZING)
    assert found.sync == FREEZING.sync
    assert (found.overlap_gamma, found.straggler) == (FREEZING.overlap_gamma, FREEZING.straggler)
    assert (found.flop_alpha_s, found.flop_gamma, found.sync_alpha_s) == (0.012, 0.8, 0.02)
    unknown = fit_params(alone)
    assert unknown.sync == SyncCurve()
    assert (unknown.flop_alpha_s, unknown.flop_gamma) == (0.0, 1.0)


def test_several_nodes_unseen_cost_a_little_more_than_one_node() -> None:
    found = fit_params([point for point in measured(TRUTH) if point.num_nodes == 1])
    assert found.sync.inter_alpha_s == pytest.approx(1.1 * found.sync.intra_alpha_s)


def test_a_single_point_is_reproduced() -> None:
    point = ThroughputPoint(1, 1, 32, 0.25)
    result = fit_throughput([point])
    assert result.seen.largest < 0.02
    half, double = predict_s(result.params, [replace(point, batch_per_gpu=16), replace(point, batch_per_gpu=64)])
    assert half < 0.25 < double


def test_an_online_refit_starts_from_the_last_one_and_improves() -> None:
    wrong = ThroughputParams(fwd=ComputeCurve(alpha_s=0.1, beta_s=0.01), bwd=ComputeCurve(alpha_s=0.1, beta_s=0.01))
    points = measured(FREEZING, DEPTHS, noise=0.02)
    assert fit_error(fit_params(points, prior=wrong), points).median < 0.03


@pytest.mark.parametrize("bad", [{"step_s": 0.0}, {"step_s": float("nan")}, {"batch_per_gpu": 0}, {"num_gpus": 0}])
def test_bad_points_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be positive and finite"):
        fit_params([replace(ThroughputPoint(1, 1, 8, 0.1), **bad)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no throughput points"):
        fit_params([])
