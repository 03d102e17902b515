"""The sharing rule and its run-time guard, and the two regressions behind it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icefrog.estimate.occupancy import OccupancyPoint, fit_occupancy, mem_bytes, util_pct
from icefrog.estimate.sharing import Sharer, may_share, split_verdict
from icefrog.profile import OccupancyParams
from icefrog.testing.builders import profile


def test_worked_values() -> None:
    assert may_share(30e9, 42, 35e9, 45, 80e9)  # 71.5 GB, 87 %
    assert not may_share(30e9, 42, 45e9, 45, 80e9)  # 82.5 GB
    assert not may_share(30e9, 56, 35e9, 45, 80e9)  # 101 %


@given(*[st.floats(0, 1e11)] * 2, *[st.floats(0, 100)] * 2)
def test_the_rule_does_not_depend_on_the_order(mem_1: float, mem_2: float, util_1: float, util_2: float) -> None:
    assert may_share(mem_1, util_1, mem_2, util_2, 8e10) == may_share(mem_2, util_2, mem_1, util_1, 8e10)


OLD, NEW = Sharer("old", 10.0), Sharer("new", 20.0)


def test_a_quarter_above_is_still_stable_and_more_is_not() -> None:
    assert not split_verdict(OLD, NEW, [101.0] * 15 + [90.0] * 45).split
    verdict = split_verdict(OLD, NEW, [101.0] * 16 + [90.0] * 44)
    assert (verdict.split, verdict.evict) == (True, "new")
    assert "16 of 60" in verdict.reason


def test_the_later_one_goes_even_if_the_other_suffers() -> None:
    assert split_verdict(Sharer("old", 10.0, speed=0.74), NEW, []).evict == "new"
    assert split_verdict(NEW, Sharer("old", 10.0, speed=0.74), []).evict == "new"
    assert not split_verdict(Sharer("old", 10.0, speed=0.75), NEW, []).split


def test_equal_submission_has_a_stated_victim() -> None:
    assert split_verdict(Sharer("a", 1.0, 0.1), Sharer("b", 1.0), []).evict == "b"
    assert split_verdict(Sharer("b", 1.0), Sharer("a", 1.0, 0.1), []).evict == "b"


# -- regressions -----------------------------------------------------------------------------------------------------------


def points(noise: float, seed: int = 0) -> list[OccupancyPoint]:
    rng = np.random.default_rng(seed)
    found = []
    for batch in (16, 32, 64, 128):
        for theta, omega in ((1.0, 1.0), (0.7, 0.9), (0.4, 0.7), (0.1, 0.3)):
            mem = 2e9 + 1e8 * batch + 3e9 * theta + 4e9 * omega
            util = 10 + 0.2 * batch + 30 * theta + 5 * omega
            jitter = 1.0 + noise * rng.normal(size=2)
            found.append(OccupancyPoint(batch, theta, omega, mem * jitter[0], util * jitter[1]))
    return found


def test_the_fit_recovers_exact_points() -> None:
    params = fit_occupancy(points(0.0))
    np.testing.assert_allclose(params.mem_bytes, (2e9, 1e8, 3e9, 4e9), rtol=1e-6)
    np.testing.assert_allclose(params.util_pct, (10, 0.2, 30, 5), rtol=1e-6)


def test_the_fit_predicts_under_noise() -> None:
    job = profile(occupancy=fit_occupancy(points(0.03)))
    for batch in (24, 96):
        assert float(mem_bytes(job, batch, 0)) == pytest.approx(2e9 + 1e8 * batch + 7e9, rel=0.05)


def test_points_without_freezing_still_predict_full_training() -> None:
    full = [point for point in points(0.0) if point.theta == 1.0]
    job = profile(occupancy=fit_occupancy(full))
    assert float(mem_bytes(job, 48, 0)) == pytest.approx(2e9 + 1e8 * 48 + 7e9, rel=1e-6)
    with pytest.raises(ValueError, match="no occupancy points"):
        fit_occupancy([])


def test_predictions_stay_in_range() -> None:
    job = profile(occupancy=OccupancyParams(mem_bytes=(-1e9, 0, 0, 0), util_pct=(90, 1, 0, 0)))
    assert float(mem_bytes(job, 8)) == 0.0
    assert float(util_pct(job, 50)) == 100.0


def test_a_depth_that_was_never_measured_is_not_believed_to_free_anything() -> None:
    """One point (nothing frozen, a busy device): a fully frozen prefix must not look like a way to fit beside a partner."""
    measured = OccupancyPoint(batch_per_gpu=64, theta=1.0, omega=1.0, mem_bytes=1e9, util_pct=99.0)
    params = fit_occupancy([measured])
    assert params.util_pct == pytest.approx((99.0, 0.0, 0.0, 0.0), abs=1e-9)
    assert params.mem_bytes == pytest.approx((1e9, 0.0, 0.0, 0.0), abs=1e-3)
    deeper = OccupancyPoint(batch_per_gpu=64, theta=0.5, omega=0.5, mem_bytes=0.8e9, util_pct=79.0)
    base, _, per_theta, per_omega = fit_occupancy([measured, deeper]).util_pct
    assert base + 0.25 * (per_theta + per_omega) + 64 * fit_occupancy([measured, deeper]).util_pct[1] == pytest.approx(
        69.0
    )
