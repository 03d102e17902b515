"""Which layers lie in which stage of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def balanced_split(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Layers of each stage, in order, such that the costliest stage costs as little as possible.

    Exact, by dynamic programming over the last cut, O(stages x layers^2). Among equals the later stages are the larger
    ones: they keep training when a prefix is frozen.

    Args:
        costs: of each layer, in forward order; all zero: every layer counts the same.
        num_stages: 1..len(costs).

    Raises:
        ValueError: more stages than layers, or none.
    """
    num_layers = len(costs)
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"{num_layers} layers cannot be split into {num_stages} stages")
    each = np.asarray(costs, dtype=np.float64)
    total = np.concatenate(([0.0], np.cumsum(each if each.any() else np.ones(num_layers))))
    best = total.copy()  # best[n]: cost of the costliest stage when the first n layers are split into the stages so far
    cuts = np.zeros((num_stages, num_layers + 1), dtype=np.intp)
    for stage in range(1, num_stages):
        longer = np.full(num_layers + 1, np.inf)
        for end in range(stage + 1, num_layers + 1):
            worst = np.maximum(best[stage:end], total[end] - total[stage:end])
            cut = int(worst.argmin())
            longer[end], cuts[stage, end] = worst[cut], stage + cut
        best = longer
    ends = [num_layers]
    for stage in range(num_stages - 1, 0, -1):
        ends.append(int(cuts[stage, ends[-1]]))
    return tuple(np.diff([0, *reversed(ends)]).tolist())
