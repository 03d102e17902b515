"""The Gittins index of a job whose total service is known only by its distribution. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate


class GittinsIndex:
    """The index for an empirical distribution of total service S (any unit, the same throughout).

        G(a) = P(S - a <= D | S > a) / E[min(S - a, D) | S > a]

    The chance that a job that has attained a is complete within the next quantum D, per unit of service that this takes
    (Gu et al., NSDI'19, section 3.3; Gittins, "Bandit processes and dynamic allocation indices", 1979).

    Args:
        services: a sample of S; positive. Empty: nothing is known, and every index is 0.
    """

    def __init__(self, services: Sequence[float]) -> None:
        self._sorted = sorted(services)
        self._sums = [0.0, *accumulate(self._sorted)]

    def __call__(self, attained: float, quantum: float) -> float:
        """G(attained); 0 where no job of the sample lasted longer.

        Args:
            attained: service so far.
            quantum: D > 0; may be infinite.
        """
        first = bisect_right(self._sorted, attained)
        longer = len(self._sorted) - first
        if longer == 0:
            return 0.0
        end = attained + quantum
        done = len(self._sorted) if math.isinf(end) else bisect_right(self._sorted, end)
        spent = self._sums[done] - self._sums[first] - attained * (done - first)
        if done < len(self._sorted):
            spent += quantum * (len(self._sorted) - done)
        return (done - first) / spent if spent > 0 else math.inf
