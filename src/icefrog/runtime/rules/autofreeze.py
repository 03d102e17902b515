"""AutoFreeze (Liu, Agarwal and Venkataraman, 2021, arXiv:2102.01386): front layers whose gradients change least freeze."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from icefrog.errors import UserError
from icefrog.runtime.rules.base import FreezingRule, Hands, Proposal, Situation
from icefrog.runtime.trained import trained_params


class AutoFreeze(FreezingRule):
    """At each interval T, freezes the leading open layers whose gradient norm changes less than the ``percentile``-th does.

    With D_T,l the gradients of layer l added up over the interval's steps, and its change

        eta_l = | |D_T-1,l| - |D_T,l| | / |D_T-1,l|

    the new boundary is the first open layer whose eta is not below the percentile of eta over all open layers. One open
    layer is always left, and none is opened again. Norms are sums of absolute values, as in the authors' code. What the
    optimizer does not train does not count; a layer of which it trains nothing does not stop the boundary.

    Deviations: an interval is the time between two decisions (the authors: a twentieth of training; choose
    ``tune_every_steps``); gradients are taken as the optimizer gets them, that is clipped where the loop clips. It costs
    memory of one more gradient on rank 0, and an addition a step.

    Args:
        percentile: of eta, 0..100.

    Raises:
        UserError: a percentile outside of 0..100.
    """

    name = "autofreeze"

    def __init__(self, percentile: float = 50.0) -> None:
        if not 0.0 <= percentile <= 100.0:
            raise UserError(f"AutoFreeze's percentile must be from 0 to 100, got {percentile}", "the paper takes 50")
        self.percentile = percentile
        self._sums: dict[str, torch.Tensor] = {}  # by parameter: gradients of the interval so far
        self._layers: list[list[str]] = []
        self._before: list[float] | None = None

    def observe(self, hands: Hands) -> None:
        """Add the step's gradients."""
        trained = trained_params(hands.layers, hands.optimizer)
        self._layers = [list(params) for params in trained]
        for params in trained[hands.frozen_layers :]:
            for name, param in params.items():
                if param.grad is None:
                    continue
                held = self._sums.get(name)
                if held is None or held.shape != param.grad.shape:
                    self._sums[name] = param.grad.detach().to(torch.float32, copy=True)
                else:
                    self._sums[name] = held.to(param.grad.device).add_(param.grad)

    def propose(self, now: Situation) -> Proposal:
        """Close the interval."""
        norms = self._close()
        if norms is None:
            return now.stay("no gradients were seen in this interval")
        before, self._before = self._before, norms
        if before is None:
            return now.stay("the first interval has nothing to be compared with")
        first = now.frozen_layers
        change = [
            _change(old, new) if names else -math.inf
            for old, new, names in zip(before[first:], norms[first:], self._layers[first:], strict=True)
        ]
        known = [eta for eta in change if math.isfinite(eta)]
        if not known:
            return now.stay("no layer's gradients could be compared")
        limit = float(np.percentile(known, self.percentile))
        more = next(place for place, eta in enumerate(change) if eta >= limit)
        return now.at(first + more, f"{more} more layers change by less than {limit:.3g} of their gradient norm")

    def _close(self) -> list[float] | None:
        """|D_l| by layer, and a new interval; None if nothing was seen, or something overflowed."""
        sums, self._sums = self._sums, {}
        norms = [sum(float(sums[name].abs().sum()) for name in names if name in sums) for names in self._layers]
        return norms if sums and all(map(math.isfinite, norms)) else None

    def state_dict(self) -> dict[str, Any]:
        """The norms of the interval before."""
        return {"before": self._before, "layers": self._layers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        self._before = state["before"]
        self._layers = state["layers"]
        self._sums = {}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The interval so far."""
        return dict(self._sums)

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Inverse of :meth:`tensors`."""
        self._sums = dict(tensors)


def _change(old: float, new: float) -> float:
    """eta; infinite for a layer that was not open in the interval before."""
    return abs(old - new) / old if old > 0 else math.inf
