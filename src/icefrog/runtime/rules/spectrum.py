"""Tells layers that have learnt from fresh ones by the largest singular value of their weights.

Weights drawn independently with standard deviation s fill an m x n matrix whose largest singular value is close to
s (sqrt(m) + sqrt(n)), the edge of the Marchenko-Pastur law, whatever they are drawn from. Training adds few strong
directions, which stand out of that edge (Martin and Mahoney, "Implicit Self-Regularization in Deep Neural Networks", JMLR
2021). So

    structure(W) = largest singular value of (W - mean) / (s (sqrt(m) + sqrt(n)))

is at most about 1 where nothing was learnt, and more than 1 where something was. Nothing is trained, and no data is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

LEARNT = 1.05
"""Structure above which weights count as learnt. Default initialisations measure 0.9 to 1.0, the mean over a few layers
0.94 to 0.98; layers of a small network that was trained for two minutes 1.1, of a pre-trained encoder 1.7 to 3.8."""

_MOST = 1024
"""Rows and columns looked at, evenly spread: a part of independent weights is independent, too."""
_LEAST = 8
"""Of smaller matrices the edge says little."""
_ITERATIONS = 12
"""Of the power method. It stays below the largest value where there is none that stands out."""


@torch.no_grad()
def structure(params: Iterable[torch.Tensor]) -> float:
    """Of a layer: the largest among its matrices (a convolution's kernel counts as outputs x rest); NaN without one.

    Args:
        params: of one layer; whole, not a rank's shard.
    """
    found = [value for param in params if (value := _of_matrix(param)) is not None]
    return max(found, default=math.nan)


def _of_matrix(param: torch.Tensor) -> float | None:
    if param.ndim < 2 or param.numel() == 0 or not param.is_floating_point():
        return None
    weights = param.detach().reshape(param.shape[0], -1)
    weights = weights[:: -(-weights.shape[0] // _MOST) or 1, :: -(-weights.shape[1] // _MOST) or 1].float()
    rows, columns = weights.shape
    if min(rows, columns) < _LEAST:
        return None
    weights = weights - weights.mean()
    deviation = float(weights.std())
    if not (math.isfinite(deviation) and deviation > 0):
        return None
    right = torch.linspace(-1.0, 1.0, columns, device=weights.device) + 0.5  # any fixed direction does
    largest = right.new_zeros(())
    for _ in range(_ITERATIONS):
        left = weights @ right
        right = weights.T @ (left / left.norm().clamp_min(1e-30))
        largest = right.norm()
        right = right / largest.clamp_min(1e-30)
    return float(largest) / (deviation * (math.sqrt(rows) + math.sqrt(columns)))
