"""Tuned FreezeOut: the freezing rule that the paper gives its baselines ("lucid+", "optimus+", "pollux+"). Pure.

FreezeOut (Brock et al., arXiv:1706.04983) anneals every layer's learning rate on a schedule of its own and freezes the layer
when the rate has reached zero:

    lr_i(t) = 0.5 lr_i(0) (1 + cos(pi t / t_i))   for t < t_i, then 0       t: share of the training that is done, 0..1

``t_i`` rises from ``t_0`` for the first layer to 1 for the last, linearly or cubed. *Tuned* means that (t_0, shape) is
chosen for each job by effective progress at its GPU request (:func:`choose`). The schedule never opens a layer again.

What freezing by schedule costs is priced like any other freezing, by the frozen penalty (Eq. 3) on the job's gradient
variances. The annealing before a layer freezes is not charged: any training anneals. Both favour the baselines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from icefrog.profile import FloatArray

Shape = Literal["linear", "cubed"]
START_GRID = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Values of t_0 that are tried; 1.0 freezes nothing before the end."""
_POINTS = 40
JUDGED_AT: FloatArray = (np.arange(_POINTS) + 0.5) / _POINTS
"""Points of progress at which a schedule is judged."""
IntArray: TypeAlias = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Schedule:
    """One FreezeOut schedule. ``t_0`` in (0, 1]: the progress at which the first layer freezes."""

    t_0: float
    shape: Shape = "linear"

    def __post_init__(self) -> None:
        if not 0.0 < self.t_0 <= 1.0:
            raise ValueError(f"t_0 must be in (0, 1], got {self.t_0}")

    def ends(self, num_layers: int) -> FloatArray:
        """t_i of every layer, shape (L,), from t_0 to 1. Cubed: the cube of a line, so that front layers freeze sooner."""
        if num_layers == 1:
            return np.ones(1)
        place = np.arange(num_layers) / (num_layers - 1)
        if self.shape == "linear":
            return np.asarray(self.t_0 + (1.0 - self.t_0) * place)
        root = np.cbrt(self.t_0)
        return np.asarray((root + (1.0 - root) * place) ** 3)

    def lr_factors(self, progress: float, num_layers: int) -> FloatArray:
        """lr_i(t) / lr_i(0), shape (L,)."""
        ends = self.ends(num_layers)
        return np.where(progress < ends, 0.5 * (1.0 + np.cos(np.pi * np.minimum(progress / ends, 1.0))), 0.0)

    def depth(self, progress: float, num_layers: int) -> int:
        """Layers that are frozen at this progress; the last one never is."""
        return min(int(np.count_nonzero(self.ends(num_layers) <= progress)), num_layers - 1)


SchedulePenalty: TypeAlias = Callable[[Schedule, IntArray], FloatArray]
"""psi under a schedule that has frozen so many layers, at JUDGED_AT; both of shape (P,)."""


def choose(speed: FloatArray, variance_at: Callable[[float], FloatArray]) -> Schedule:
    """The schedule of least training time by Eq. 3.

    Args:
        speed: T by depth, samples/s, shape (D + 1,): the job may freeze D layers at most. 0: not legal.
        variance_at: per-sample variance by layer, shape (L,), at a progress in 0..1, of the run without freezing.

    Returns:
        Among equals the one that freezes least: (1.0, linear) where freezing does not pay.
    """
    return tuned(speed, len(variance_at(0.0)), penalty_of_variance(variance_at))


def tuned(speed: FloatArray, num_layers: int, penalty: SchedulePenalty) -> Schedule:
    """The schedule of least training time: of the integral of 1 / (psi T) over progress (Eq. 2); see :func:`choose`."""
    best, least_s = Schedule(1.0), np.inf
    for start in reversed(START_GRID):
        for shape in ("linear", "cubed"):
            schedule = Schedule(start, shape)
            seconds = _training_s(schedule, speed, num_layers, penalty)
            if seconds < least_s * (1.0 - 1e-9):
                best, least_s = schedule, seconds
    return best


def _training_s(schedule: Schedule, speed: FloatArray, num_layers: int, penalty: SchedulePenalty) -> float:
    """Seconds per effective sample, averaged over progress."""
    ends = schedule.ends(num_layers)
    depth = np.minimum((ends[None, :] <= JUDGED_AT[:, None]).sum(axis=1), len(speed) - 1)
    progress = penalty(schedule, depth) * speed[depth]
    return float(np.mean(np.divide(1.0, progress, out=np.full_like(progress, np.inf), where=progress > 0)))


def penalty_of_variance(variance_at: Callable[[float], FloatArray]) -> SchedulePenalty:
    """Eq. 3: what still varies, over that and what varied when each frozen layer's rate reached zero."""
    grid = np.linspace(0.0, 1.0, _POINTS + 1)
    curves = np.array([variance_at(float(point)) for point in grid])  # (P + 1, L)
    num_layers = curves.shape[1]
    live = np.array([np.interp(JUDGED_AT, grid, curves[:, layer]) for layer in range(num_layers)]).T
    suffix = np.cumsum(live[:, ::-1], axis=1)[:, ::-1]  # [p, l]: what still varies with l layers frozen

    def penalty(schedule: Schedule, depth: IntArray) -> FloatArray:
        ends = schedule.ends(num_layers)
        at_freeze = np.array([np.interp(ends[layer], grid, curves[:, layer]) for layer in range(num_layers)])
        stored = np.concatenate(([0.0], np.cumsum(at_freeze)))
        kept = suffix[np.arange(len(depth)), depth]
        total = stored[depth] + kept
        return np.where(depth == 0, 1.0, np.divide(kept, total, out=np.zeros_like(kept), where=total > 0))

    return penalty
