"""Which layers the optimizer trains. It may hold a part of the model only: the rest gets gradients and never moves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from icefrog.runtime.checksum import checksum
from icefrog.runtime.layers import Layer
from icefrog.runtime.shards import local_part


def trained_by(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    """Ids of its parameters."""
    return frozenset(id(param) for group in optimizer.param_groups for param in group["params"])


def trained_params(layers: Sequence[Layer], optimizer: torch.optim.Optimizer | None) -> list[dict[str, nn.Parameter]]:
    """By layer, the parameters that the optimizer holds, by name; all of them where there is none to ask."""
    if optimizer is None:
        return [layer.params for layer in layers]
    own = trained_by(optimizer)
    return [{name: param for name, param in layer.params.items() if id(param) in own} for layer in layers]


def last_trained(layers: Sequence[Layer], optimizer: torch.optim.Optimizer) -> int:
    """Index of the last layer of which the optimizer holds a parameter: at most so many layers may be frozen. 0: of none."""
    own = trained_by(optimizer)
    places = [i for i, layer in enumerate(layers) if any(id(param) in own for param in layer.params.values())]
    return max(places, default=0)


class Foreign:
    """Finds layers that some other optimizer trains: nothing is known of what freezing them would cost.

    A layer without a parameter of ours costs nothing to freeze, unless its parameters move all the same.

    Args:
        optimizer: ours.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._sums: dict[str, list[int]] = {}
        self._found: set[str] = set()

    def restart(self) -> None:
        """Values were put back from a checkpoint: they have not moved by training."""
        self._sums.clear()

    def first(self, layers: Sequence[Layer]) -> int | None:
        """Index of the first layer that moved since the last call or an earlier one, though not by our optimizer."""
        own = trained_by(self._optimizer)
        for layer in layers:
            params = layer.params.values()
            if layer.name in self._found or any(id(param) in own for param in params):
                continue
            sums = [int(checksum(local_part(param))) for param in params if not param.is_meta]
            if self._sums.setdefault(layer.name, sums) != sums:
                self._found.add(layer.name)
        return next((index for index, layer in enumerate(layers) if layer.name in self._found), None)
