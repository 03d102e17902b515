"""What a sample is worth, in truth, while a prefix of the layers is frozen: the one place where a simulated job asks.

Two truths are known. *Eq. 3* on the true variances, as in the paper's simulator; and the *measured* worth of frozen steps in
real trainings (:mod:`icefrog.workloads.worth`). Estimates are made elsewhere and know of neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from icefrog.estimate.freezeout import IntArray, Schedule, SchedulePenalty, penalty_of_variance
from icefrog.profile import FloatArray

LEAST_WORTH = 1e-6
"""A frozen depth with nothing left to learn still ends some day."""

Prefix: TypeAlias = tuple[tuple[int, float], ...]
"""The frozen prefix by when it froze: (layers up to here, frozen since that progress), both ascending."""


def moved(prefix: Prefix, depth: int, progress: float) -> Prefix:
    """The prefix after its boundary has moved to ``depth``: layers that were frozen before keep their time."""
    kept = tuple((min(end, depth), since) for end, since in prefix if _begin(prefix, end) < depth)
    return (*kept, (depth, progress)) if depth > (kept[-1][0] if kept else 0) else kept


def _begin(prefix: Prefix, end: int) -> int:
    """Where the part that goes up to ``end`` begins."""
    return max((other for other, _ in prefix if other < end), default=0)


class Convergence(Protocol):
    """How freezing slows a job's progress, in truth.

    ``variance`` is the true V by layer, shape (L,); of frozen layers as they froze.
    """

    def worth(self, prefix: Prefix, variance: FloatArray) -> float:
        """Of a sample, share of one with nothing frozen, (0, 1]."""
        ...

    def as_tuned(self, prefix: Prefix, variance: FloatArray, seen: float) -> float:
        """What a job believes whose FreezeOut schedule was tuned on this truth; ``seen``: Eq. 3 on what it saw itself."""
        ...

    def schedule_penalty(self, variance_at: Callable[[float], FloatArray]) -> SchedulePenalty:
        """On what such a schedule is tuned; ``variance_at``: true V by progress, of the run without freezing."""
        ...


class VarianceRatio:
    """Eq. 3 is the truth."""

    def worth(self, prefix: Prefix, variance: FloatArray) -> float:
        """psi(l), taken as constant until the next look at the gradients."""
        if not prefix:
            return 1.0
        frozen = prefix[-1][0]
        kept = float(variance[frozen:].sum())
        return max(kept / (float(variance[:frozen].sum()) + kept), LEAST_WORTH) if kept > 0.0 else LEAST_WORTH

    def as_tuned(self, prefix: Prefix, variance: FloatArray, seen: float) -> float:
        """The same equation, on gradients seen with the job's own error."""
        return seen

    def schedule_penalty(self, variance_at: Callable[[float], FloatArray]) -> SchedulePenalty:
        """Eq. 3 over the schedule."""
        return penalty_of_variance(variance_at)


VARIANCE_RATIO = VarianceRatio()


@dataclass(frozen=True, slots=True)
class MeasuredWorth:
    """The measured worth is the truth.

    Where layers froze at several times, each part costs what the table says of it at its time:

        worth = prod_k w(d_k, p_k) / w(d_(k-1), p_k),        d_k the share of the layers up to which they froze at p_k

    so that a prefix that froze at once is worth w(d, p), and freezing more never makes a sample worth more.

    Args:
        table: w(depth, start), shares of 1.
        num_layers: L.
        share: how far the truth lies from Eq. 3 (0) towards the table (1), in the logarithm.
        extra_steps: share of steps needed beyond that whenever layers are frozen.
    """

    table: Callable[[float, float], float]
    num_layers: int
    share: float = 1.0
    extra_steps: float = 0.0

    def worth(self, prefix: Prefix, variance: FloatArray) -> float:
        """As above."""
        if not prefix:
            return 1.0
        measured, begin = 1.0, 0
        for end, since in prefix:
            measured *= self._part(begin, end, since)
            begin = end
        return float(self._moderated(np.array(measured), np.array(VARIANCE_RATIO.worth(prefix, variance))))

    def as_tuned(self, prefix: Prefix, variance: FloatArray, seen: float) -> float:
        """Tuning showed what the schedule costs."""
        return self.worth(prefix, variance)

    def schedule_penalty(self, variance_at: Callable[[float], FloatArray]) -> SchedulePenalty:
        """The worth over the schedule: every layer froze at its own time."""
        by_variance = penalty_of_variance(variance_at)

        def penalty(schedule: Schedule, depth: IntArray) -> FloatArray:
            ends = schedule.ends(self.num_layers).tolist()
            parts = [self._part(layer, layer + 1, end) for layer, end in enumerate(ends)]
            measured = np.concatenate(([1.0], np.cumprod(parts)))[depth]
            return np.where(depth == 0, 1.0, self._moderated(measured, by_variance(schedule, depth)))

        return penalty

    def _part(self, begin: int, end: int, since: float) -> float:
        """Of layers ``begin`` to ``end``, frozen since then."""
        before = self.table(begin / self.num_layers, since)
        return self.table(end / self.num_layers, since) / before if before > 0.0 else 0.0

    def _moderated(self, measured: FloatArray, by_variance: FloatArray) -> FloatArray:
        mixed = np.maximum(measured, LEAST_WORTH) ** self.share * np.maximum(by_variance, LEAST_WORTH) ** (
            1.0 - self.share
        )
        return np.asarray(np.maximum(mixed / (1.0 + self.extra_steps), LEAST_WORTH))
