"""Confidence intervals over replicates, and paired comparisons. Pure; every random draw is seeded.

A *replicate* is one sampled set of jobs: a trace and a seed. Replicates are independent, jobs of one run are not (one
long job delays many), so replicates are what intervals are made of, and variants are compared replicate by replicate.

- The interval of a mean is Student's t on n - 1 degrees of freedom.
- The interval of a ratio of means resamples *pairs* of replicates: the expanded percentile bootstrap (Hesterberg, What
  teachers should know about the bootstrap, The American Statistician 69, 2015), which widens the percentiles so that, for a
  mean, a small n gets about the width that Student's t gives. On skewed replicates with 20 to 60 % noise it covers the
  truth in 91, 93 and 94 % of cases at n = 5, 8, 16 (of the 95 % promised), the plain percentiles in 82, 86 and 90 %.
- Wins and losses are counted by replicate; p is the exact two-sided sign test, ties left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special, stats

LEVEL = 0.95
RESAMPLES = 10_000
SEED = 20_250_101
"""Of the bootstrap: the same results give the same intervals."""
LEAST_REPLICATES = 3
"""Fewer give no bootstrap interval: two values have three distinct resamples."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its confidence interval; None where there are too few replicates for one."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """A variant against the base, on one measure."""

    ratio: Interval
    """mean(base) / mean(variant)."""
    wins: int
    """Replicates in which the variant's value is lower."""
    losses: int
    ties: int
    p: float
    """Of the sign test."""
    pairs: int


def mean_interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """The mean and its t interval (of two values at least). ``values`` has one entry a replicate."""
    x = np.asarray(values, dtype=np.float64)
    mean = float(x.mean())
    if len(x) < 2:
        return Interval(mean)
    half = float(special.stdtrit(len(x) - 1, 0.5 + level / 2) * x.std(ddof=1) / math.sqrt(len(x)))
    return Interval(mean, mean - half, mean + half)


def ratio_interval(
    base: Sequence[float], other: Sequence[float], level: float = LEVEL, resamples: int = RESAMPLES, seed: int = SEED
) -> Interval:
    """mean(base) / mean(other), and its paired bootstrap interval. Both have one entry a replicate, in the same order.

    Raises:
        ValueError: different lengths, or nothing in them.
    """
    x, y = np.asarray(base, dtype=np.float64), np.asarray(other, dtype=np.float64)
    if x.shape != y.shape or not len(x):
        raise ValueError(f"pairs are needed, got {len(x)} and {len(y)} values")
    value = _ratio(x.mean(), y.mean())
    if len(x) < LEAST_REPLICATES or not math.isfinite(value):
        return Interval(value)
    chosen = np.random.default_rng(seed).integers(0, len(x), size=(resamples, len(x)))
    top, bottom = x[chosen].mean(axis=1), y[chosen].mean(axis=1)
    if not (bottom > 0).all():
        return Interval(value)
    tail = expanded_tail(len(x), level)
    low, high = np.quantile(top / bottom, [tail, 1 - tail])
    return Interval(value, float(low), float(high))


def expanded_tail(n: int, level: float = LEVEL) -> float:
    """The percentile (0..1) to cut at either end of a bootstrap distribution of n values, instead of (1 - level) / 2."""
    return float(special.ndtr(-math.sqrt(n / (n - 1)) * special.stdtrit(n - 1, 0.5 + level / 2)))


def compare(base: Sequence[float], other: Sequence[float]) -> Comparison:
    """Compare in pairs; smaller is better."""
    x, y = np.asarray(base, dtype=np.float64), np.asarray(other, dtype=np.float64)
    close = np.isclose(x, y, rtol=1e-9, atol=0.0)
    wins, losses = int(((y < x) & ~close).sum()), int(((y > x) & ~close).sum())
    return Comparison(
        ratio=ratio_interval(base, other),
        wins=wins,
        losses=losses,
        ties=int(close.sum()),
        p=sign_test(wins, losses),
        pairs=len(x),
    )


def sign_test(wins: int, losses: int) -> float:
    """Two-sided p that wins and losses are equally likely; 1 of nothing."""
    return float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0


def _ratio(top: float, bottom: float) -> float:
    if bottom == 0:
        return 1.0 if top == 0 else math.inf
    return float(top / bottom)
