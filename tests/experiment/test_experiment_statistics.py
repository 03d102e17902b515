"""Intervals and comparisons against values worked out by hand, and against what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icefrog.experiment.statistics import (
    Interval,
    compare,
    expanded_tail,
    mean_interval,
    ratio_interval,
    sign_test,
)


def test_a_mean_by_hand() -> None:
    # 1, 2, 3, 4: mean 2.5, standard deviation sqrt(5/3), t(3, 97.5 %) = 3.1824 (any table)
    found = mean_interval([1, 2, 3, 4])
    half = 3.18244630528 * math.sqrt(5 / 3) / 2
    assert (found.value, found.low, found.high) == pytest.approx((2.5, 2.5 - half, 2.5 + half))
    assert mean_interval([7.0]) == Interval(7.0)
    assert mean_interval([7.0, 7.0]) == Interval(7.0, 7.0, 7.0)


def test_a_ratio_of_three_pairs_by_enumeration() -> None:
    """All 27 resamples are equally likely; t(2, 97.5 %) is so large that the interval is the whole range."""
    base, other = [2.0, 4.0, 9.0], [1.0, 4.0, 3.0]
    found = ratio_interval(base, other)
    picks = [(i, j, k) for i in range(3) for j in range(3) for k in range(3)]
    ratios = sorted(sum(base[i] for i in pick) / sum(other[i] for i in pick) for pick in picks)
    assert found.value == pytest.approx(15 / 8)
    assert (found.low, found.high) == pytest.approx((ratios[0], ratios[-1])) == (1.0, 3.0)


def test_the_tail_by_hand() -> None:
    """From tables: t(4) 2.7764, t(9) 2.2622, t(19) 2.0930, times sqrt(n / (n - 1)): 3.1041, 2.3845, 2.1474 sigma."""
    assert [round(100 * expanded_tail(n), 2) for n in (5, 10, 20)] == [0.10, 0.86, 1.59]
    assert expanded_tail(100_000) == pytest.approx(0.025, abs=1e-5)


def test_fewer_than_three_pairs_have_no_interval() -> None:
    assert ratio_interval([2.0, 4.0], [1.0, 1.0]) == Interval(3.0)
    with pytest.raises(ValueError, match="2 and 1"):
        ratio_interval([2.0, 4.0], [1.0])
    with pytest.raises(ValueError, match="0 and 0"):
        ratio_interval([], [])


def test_zeros() -> None:
    assert ratio_interval([0, 0, 0], [0, 0, 0]).value == 1.0
    assert math.isinf(ratio_interval([1, 1, 1], [0, 0, 0]).value)
    assert ratio_interval([1, 2, 3], [0, 0, 3]).low is None  # a resample may divide by zero


@pytest.mark.parametrize(
    ("wins", "losses", "p"), [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 2 / 32), (8, 0, 2 / 256), (7, 1, 18 / 256), (4, 4, 1.0)]
)
def test_signs(wins: int, losses: int, p: float) -> None:
    assert sign_test(wins, losses) == pytest.approx(p)


def test_a_comparison_by_hand() -> None:
    found = compare([10, 10, 10, 10, 10], [5, 5, 20, 10, 5])
    assert (found.wins, found.losses, found.ties, found.pairs) == (3, 1, 1, 5)
    assert found.ratio.value == pytest.approx(50 / 45)
    assert found.p == pytest.approx(10 / 16)


def test_a_constant_ratio_is_certain_however_much_the_replicates_differ() -> None:
    """What pairing is for: the variation that both share is no uncertainty of their ratio."""
    base = [1.0, 10.0, 100.0, 3.0]
    found = ratio_interval(base, [x / 2 for x in base])
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))


@given(
    pairs=st.lists(st.tuples(st.floats(0.1, 1e5), st.floats(0.1, 1e5)), min_size=3, max_size=12),
    scale=st.floats(0.01, 100),
)
def test_laws_of_a_ratio(pairs: list[tuple[float, float]], scale: float) -> None:
    base, other = [x for x, _ in pairs], [y for _, y in pairs]
    found = ratio_interval(base, other, resamples=500)
    assert found.low is not None
    assert found.high is not None
    ratios = [x / y for x, y in pairs]
    assert min(ratios) - 1e-9 <= found.low * (1 + 1e-9)
    assert found.high <= max(ratios) * (1 + 1e-9)
    assert found == ratio_interval(base, other, resamples=500)  # seeded
    scaled = ratio_interval([scale * x for x in base], other, resamples=500)
    assert (scaled.value, scaled.low, scaled.high) == pytest.approx(
        (scale * found.value, scale * found.low, scale * found.high)
    )


@pytest.mark.parametrize(("n", "least"), [(5, 0.87), (8, 0.9), (16, 0.92)])
def test_the_intervals_cover_the_truth_about_as_often_as_they_say(n: int, least: float) -> None:
    """Skewed replicates with a common factor, as loads and long jobs make them; 95 % promised."""
    rng = np.random.default_rng(5)
    common = rng.lognormal(0, 0.5, size=(400, n))
    base = 3 * common * rng.lognormal(-0.08, 0.4, size=(400, n))
    other = 2 * common * rng.lognormal(-0.02, 0.2, size=(400, n))
    hits = 0
    for x, y in zip(base, other, strict=True):
        found = ratio_interval(x.tolist(), y.tolist(), resamples=400)
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 1.5 <= found.high
    assert least <= hits / 400 <= 0.99
