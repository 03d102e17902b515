"""psi of the boundary in force: what a sample is worth with these layers frozen. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from icefrog.estimate.penalty import frozen_penalty
from icefrog.profile import FloatArray


def psi_in_force(
    depth: int, judged: float | None, variance: FloatArray, trained_bytes: Callable[[], Sequence[float]], before: float
) -> float:
    """psi, in (0, 1].

    Args:
        depth: layers frozen.
        judged: psi as the freezing rule sees it, which counts; None: Eq. 3 does.
        variance: of the gradient by layer, shape (L,), as last observed.
        trained_bytes: parameters that the optimizer trains, by layer, shape (L,): psi is the share of those that still
            train where layers froze before anything of them was observed.
        before: where the variance says nothing.
    """
    if depth == 0:
        return 1.0
    if judged is not None:
        return judged
    if not np.any(variance[:depth] > 0):
        sizes = trained_bytes()
        return sum(sizes[depth:]) / sum(sizes)
    worth = float(frozen_penalty(variance)[depth])
    return worth if np.isfinite(worth) else before
