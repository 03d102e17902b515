"""What freezing saves: what full steps promise, and what steps at a frozen depth kept of it. Pure.

A full step tells when the gradients of each layer are ready, and so what every depth would save if backward stopped there. A
graph or a wrapper that computes on, or a data loader that cannot follow, spends that time elsewhere in the step. So a depth
that was tried counts with its *whole* step, and what it did not keep is taken off the promises of depths that were not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from icefrog.profile import FloatArray

if TYPE_CHECKING:
    from icefrog.runtime.profiling import PointKey

LEAST_PROMISE = 0.05
"""Part of a step below which a saving is not told from noise, so that its absence is not reported."""
LEAST_KEPT = 0.5
"""Part of the promise below which it counts as broken."""
PRIOR_SAVED_SHARE = 0.05
"""A saving of this part of the backward pass, once measured, weighs as much as the belief that promises are kept."""
EXPONENTS = np.concatenate([np.geomspace(0.01, 0.2, 24, endpoint=False), np.geomspace(0.2, 5.0, 65)])
"""Of theta; the smallest one says that freezing saves nothing."""


@dataclass(frozen=True, slots=True)
class Saving:
    """A frozen depth's step as a part of a full step: what the full steps promised, and what was measured."""

    predicted: float
    measured: float

    @property
    def absent(self) -> bool:
        """Whether less than half of a promise worth the name was kept."""
        promised = 1.0 - self.predicted
        return promised >= LEAST_PROMISE and 1.0 - self.measured < LEAST_KEPT * promised

    def __str__(self) -> str:
        return f"predicted {self.predicted:.2f} of a full step, measured {self.measured:.2f}"


def promised_share(full: FloatArray, depth: int) -> float | None:
    """T_bwd(l) / T_bwd(0) that the gradient-ready times of full steps promise; None where they do not say.

    Args:
        full: rest, backward, synchronisation, ready by layer, s; shape (3 + L,).
        depth: l, 1..L-1.
    """
    first, ready = float(full[3]), float(full[3 + depth])
    if not (first > 0 and math.isfinite(first) and math.isfinite(ready)):
        return None
    return min(max(ready / first, 0.0), 1.0)


def measured_share(full: FloatArray, frozen: FloatArray, sent: float) -> float:
    """T_bwd(l) / T_bwd(0) such that the whole step takes what was measured.

    Args:
        full: as in :func:`promised_share`.
        frozen: the same at depth l.
        sent: T_sync(l) / T_sync(0) of the throughput model: omega_l; 1 on one GPU, where that time is not synchronisation.
    """
    saved_s = float(full[0] - frozen[0] + full[1] - frozen[1] + full[2] * sent - frozen[2])
    return min(max(1.0 - saved_s / max(float(full[1]), 1e-12), 0.0), 1.0)


def saving(full: FloatArray, frozen: FloatArray, depth: int, sent: float) -> Saving | None:
    """Promise and measurement at one depth; arguments as in :func:`measured_share`. None: nothing was promised."""
    promised = promised_share(full, depth)
    step_s = float(full[:3].sum())
    if promised is None or step_s <= 0:
        return None
    predicted_s = float(full[0] + promised * full[1] + sent * full[2])
    return Saving(predicted_s / step_s, float(frozen[:3].sum()) / step_s)


def fit_depth(
    points: Mapping[PointKey, FloatArray],
    theta: FloatArray,
    omega: FloatArray,
    *,
    pipelined: bool = False,
    most_fixed: float = 0.9,
) -> tuple[float, float]:
    """(fixed share of T_bwd, exponent of theta) from gradient-ready times of full steps and from frozen steps.

    Minimises the squared error of T_bwd(l) / T_bwd(0) = f + (1 - f) theta^g on a grid; a prior of (0, 1) without points.

    Args:
        points: medians, shape (3 + L,) each: see :func:`promised_share`.
        theta: by depth, shape (L + 1,).
        omega: by depth, shape (L + 1,).
        pipelined: stages work at the same time, so a step is not the sum of its parts: only backward is compared.
        most_fixed: largest f.
    """
    where: list[int] = []
    share: list[float] = []
    weight: list[float] = []
    promises: list[tuple[float, float]] = []  # (promised, measured) savings, as shares of the backward pass
    for key, full, frozen in tried_depths(points):
        depth = key.frozen_layers
        sent = float(omega[depth]) if key.num_gpus > 1 else 1.0
        kept = float(frozen[1] / full[1]) if pipelined else measured_share(full, frozen, sent)
        where.append(depth)
        share.append(min(max(kept, 0.0), 1.0))
        weight.append(float(len(theta)))
        if (promised := promised_share(full, depth)) is not None:
            promises.append((1.0 - promised, 1.0 - share[-1]))
    faith = _faith(promises)
    for key, row in points.items():
        if key.frozen_layers > 0:
            continue
        for depth in range(1, len(row) - 3):
            if (promised := promised_share(row, depth)) is not None:
                where.append(depth)
                share.append(1.0 - faith * (1.0 - promised))
                weight.append(1.0)
    if not where:
        return 0.0, 1.0
    target, importance = np.asarray(share), np.asarray(weight)
    shape = theta[where] ** EXPONENTS[:, None]  # (exponents, comparisons): a decision is too frequent for a Python loop
    free = 1.0 - shape
    fixed = np.sum(importance * free * (target - shape), axis=1) / np.maximum(
        np.sum(importance * free**2, axis=1), 1e-12
    )
    fixed = np.clip(fixed, 0.0, most_fixed)
    error = np.sum(importance * (fixed[:, None] + (1.0 - fixed[:, None]) * shape - target) ** 2, axis=1)
    best = int(np.argmin(error))
    return float(fixed[best]), float(EXPONENTS[best])


def tried_depths(points: Mapping[PointKey, FloatArray]) -> Iterator[tuple[PointKey, FloatArray, FloatArray]]:
    """(key, medians of full steps, medians of its own) of every frozen depth with full steps beside it."""
    for key, row in points.items():
        full = points.get(key._replace(frozen_layers=0))
        if key.frozen_layers > 0 and full is not None and full[1] > 0:
            yield key, full, row


def _faith(promises: list[tuple[float, float]]) -> float:
    """Part of the promised savings that was kept, 0..1 (least squares towards 1)."""
    belief = PRIOR_SAVED_SHARE**2
    found = sum(promised * saved for promised, saved in promises) + belief
    return min(max(found / (sum(promised**2 for promised, _ in promises) + belief), 0.0), 1.0)
