"""What each layer adds to progress, measured cheaply: on a sample of rows of each parameter, from successive gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from icefrog.runtime.preconditioning import real
from icefrog.runtime.rules.base import Hands
from icefrog.runtime.rules.spectrum import structure
from icefrog.runtime.trained import trained_by

_SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "sum")
_DENSE_STEPS = 12
"""Measured step by step in the beginning, so that a short job can decide soon; then one pair of steps in ``_PERIOD``."""
_PERIOD = 16
_DECAY = 0.9
_READY_PAIRS = 4
"""Shares after 4 pairs differ from those after 11 by a few hundredths (docs/evidence/layer-elasticity.md)."""
_SAMPLED = 16384
"""About as many elements of each parameter are looked at, in whole rows: on a large model that is a few percent of it."""


class SignalMeter:
    """Per layer, the first-order progress of a step, and whether it had learnt before the first.

    A step of size eta along P g, P the optimizer's preconditioner, lowers the loss by eta G . P G to first order, with G the
    mean gradient. G . P G is estimated by g_t . P g_(t-1): the noise of two batches is independent. P is 1 / (sqrt(v) + eps)
    under optimizers that keep second moments, 1 under others. It costs memory for two samples of the gradient, and
    a few operations on them in two of sixteen steps.
    """

    def __init__(self) -> None:
        self._matrices: list[dict[str, float]] = []  # by layer, structure of its first weights by name
        self._first: int | None = None  # step
        self._last: dict[str, torch.Tensor] = {}  # gradient of the step before, sampled
        self._last_step = -2
        self._ema: list[float] = []
        self._weight: list[float] = []  # of the bias correction, by layer
        self._pairs = 0

    @property
    def structure(self) -> list[float]:
        """By layer, of the weights that the job began with, the largest of its matrices; NaN: it has none, or not known."""
        return [max(told.values(), default=math.nan) for told in self._matrices]

    def progress(self) -> list[float] | None:
        """G . P G by layer, clamped at 0, any common unit; None before enough steps were seen."""
        if self._pairs < _READY_PAIRS or min(self._weight, default=0.0) <= 0.0:
            return None
        return [max(value / weight, 0.0) for value, weight in zip(self._ema, self._weight, strict=True)]

    def observe(self, hands: Hands) -> None:
        """Take in the gradients of a step, before the optimizer acts on them."""
        if self._first is None:
            self._first = hands.step
            # Later than that, weights tell what the job itself has learnt.
            self._matrices = [_structures(layer.params) if hands.step == 0 else {} for layer in hands.layers]
        age = hands.step - self._first
        if age >= _DENSE_STEPS and hands.step % _PERIOD > 1:
            return
        own = trained_by(hands.optimizer) if hands.optimizer is not None else None
        now = {
            name: _sample(param.grad).clone()
            for layer in hands.layers[hands.frozen_layers :]
            for name, param in layer.params.items()
            if param.grad is not None and (own is None or id(param) in own)
        }
        if self._last_step == hands.step - 1:
            self._take(hands, now, own)
        self._last, self._last_step = now, hands.step

    def _take(self, hands: Hands, now: dict[str, torch.Tensor], own: frozenset[int] | None) -> None:
        if not self._ema:  # from here on the layers are in the order in which they run: that is adopted after a step
            self._ema, self._weight = [0.0] * len(hands.layers), [0.0] * len(hands.layers)
            told = {name: value for layer in self._matrices for name, value in layer.items()}
            self._matrices = [{name: told[name] for name in layer.params if name in told} for layer in hands.layers]
        sums: list[torch.Tensor] = []
        moved: list[int] = []
        for place, layer in enumerate(hands.layers):
            parts = [
                _product(hands.optimizer, param, now[name], self._last[name])
                for name, param in layer.params.items()
                if name in now and name in self._last
            ]
            idle = place >= hands.frozen_layers and not any(name in now or name in self._last for name in layer.params)
            if idle or (own is not None and not any(id(param) in own for param in layer.params.values())):
                parts = [torch.zeros(())]  # the model does not use it, or the optimizer does not move it
            else:
                moved.append(place)
            sums.append(
                torch.stack([part.to(parts[0].device) for part in parts]).sum() if parts else torch.tensor(math.nan)
            )
        values = torch.stack([value.to(sums[-1].device) for value in sums]).tolist()  # one wait for the device
        if not any(math.isfinite(values[place]) for place in moved):
            return
        self._pairs += 1
        for place, value in enumerate(values):
            if math.isfinite(value):
                self._ema[place] = _DECAY * self._ema[place] + (1.0 - _DECAY) * value
                self._weight[place] = _DECAY * self._weight[place] + (1.0 - _DECAY)

    # --- memory

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "matrices": [dict(told) for told in self._matrices],
            "first": self._first,
            "last_step": self._last_step,
            "ema": list(self._ema),
            "weight": list(self._weight),
            "pairs": self._pairs,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`. After one of an earlier version it starts afresh."""
        if "matrices" not in state:
            return
        self._matrices = [dict(told) for told in state["matrices"]]
        self._first, self._last_step = state["first"], state["last_step"]
        self._ema, self._weight, self._pairs = list(state["ema"]), list(state["weight"]), state["pairs"]
        self._last = {}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The samples."""
        return dict(self._last)

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Inverse of :meth:`tensors`."""
        self._last = dict(tensors)


def _structures(params: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Of those that are matrices, by name."""
    return {name: value for name, param in params.items() if math.isfinite(value := structure([param]))}


def _sample(value: torch.Tensor) -> torch.Tensor:
    """Evenly spread rows, of this rank's part where the tensor is sharded; a view, unless it is sparse."""
    local: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    local = local.detach()
    every = max(-(-local.numel() // _SAMPLED), 1)
    if local.is_sparse:  # an embedding's gradient
        return local.index_select(0, torch.arange(0, local.shape[0], every, device=local.device)).to_dense()
    return local[::every] if local.ndim else local


def _product(
    optimizer: torch.optim.Optimizer | None, param: nn.Parameter, now: torch.Tensor, last: torch.Tensor
) -> torch.Tensor:
    """The parameter's part of g_t . P g_(t-1), scaled up from the sample; NaN before the optimizer has a P."""
    product = real(now) * real(last.to(now.device))
    state = optimizer.state.get(param, {}) if optimizer is not None else {}
    key = next((key for key in _SECOND_MOMENTS if key in state), None)
    if key is not None:
        # v without its bias correction: one factor for all parameters, and only shares matter.
        product = product / (real(_sample(state[key])).sqrt() + 1e-8)
    elif not state and optimizer is not None and _keeps_moments(optimizer):
        return torch.full((), math.nan, device=now.device)
    total = param.grad if param.grad is not None else param
    return product.sum() * (_numel(total) / max(now.numel(), 1))


def _keeps_moments(optimizer: torch.optim.Optimizer) -> bool:
    return any(key in state for state in optimizer.state.values() for key in _SECOND_MOMENTS) or any(
        "betas" in group for group in optimizer.param_groups
    )


def _numel(value: torch.Tensor) -> int:
    local: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    return local.numel()
