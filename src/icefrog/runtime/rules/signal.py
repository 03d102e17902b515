"""What each layer adds to progress, measured cheaply: on a sample of rows of each parameter, from successive gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn

from icefrog.runtime.rules.base import Hands

_SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "sum")
_DENSE_STEPS = 12
"""Measured step by step in the beginning, so that a short job can decide soon; then one pair of steps in ``_PERIOD``."""
_PERIOD = 4
_DECAY = 0.95
_READY_PAIRS = 10
_SAMPLED = 16384
"""About as many elements of each parameter are looked at, in whole rows: on a large model that is a few percent of it."""


class SignalMeter:
    """Per layer, the first-order progress of a step and the distance moved since the first.

    A step of size eta along P g, P the optimizer's preconditioner, lowers the loss by eta G . P G to first order, with G the
    mean gradient. G . P G is estimated by g_t . P g_(t-1): the noise of two batches is independent. P is 1 / (sqrt(v) + eps)
    under optimizers that keep second moments, 1 under others. It costs memory for two samples of the gradient, and
    a few operations on them in every fourth step.
    """

    def __init__(self) -> None:
        self.moved: list[float] | None = None
        """By layer, |w - w_0| / |w_0| after the dense steps; None before."""
        self._first: int | None = None  # step
        self._start: dict[str, torch.Tensor] = {}  # w_0, sampled
        self._last: dict[str, torch.Tensor] = {}  # gradient of the step before, sampled
        self._last_step = -2
        self._ema: list[float] = []
        self._weight: list[float] = []  # of the bias correction, by layer
        self._pairs = 0

    def progress(self) -> list[float] | None:
        """G . P G by layer, clamped at 0, any common unit; None before enough steps were seen."""
        if self._pairs < _READY_PAIRS or min(self._weight, default=0.0) <= 0.0:
            return None
        return [max(value / weight, 0.0) for value, weight in zip(self._ema, self._weight, strict=True)]

    def observe(self, hands: Hands) -> None:
        """Take in the gradients of a step, before the optimizer acts on them."""
        if self._first is None:
            self._first = hands.step
            self._ema, self._weight = [0.0] * len(hands.layers), [0.0] * len(hands.layers)
            self._start = _sampled_weights(hands)
        age = hands.step - self._first
        if self.moved is None and age >= _DENSE_STEPS:
            self.moved, self._start = _movement(hands, self._start), {}
        if age >= _DENSE_STEPS and hands.step % _PERIOD > 1:
            return
        now = {
            name: _sample(param.grad).clone()
            for layer in hands.layers[hands.frozen_layers :]
            for name, param in layer.params.items()
            if param.grad is not None
        }
        if self._last_step == hands.step - 1:
            self._take(hands, now)
        self._last, self._last_step = now, hands.step

    def _take(self, hands: Hands, now: dict[str, torch.Tensor]) -> None:
        sums = []
        for layer in hands.layers:
            parts = [
                _product(hands.optimizer, param, now[name], self._last[name])
                for name, param in layer.params.items()
                if name in now and name in self._last
            ]
            sums.append(
                torch.stack([part.to(parts[0].device) for part in parts]).sum() if parts else torch.tensor(math.nan)
            )
        values = torch.stack([value.to(sums[-1].device) for value in sums]).tolist()  # one wait for the device
        if not any(math.isfinite(value) for value in values):
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
            "moved": self.moved,
            "first": self._first,
            "last_step": self._last_step,
            "ema": list(self._ema),
            "weight": list(self._weight),
            "pairs": self._pairs,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        self.moved, self._first, self._last_step = state["moved"], state["first"], state["last_step"]
        self._ema, self._weight, self._pairs = list(state["ema"]), list(state["weight"]), state["pairs"]
        self._start, self._last = {}, {}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The samples."""
        return {
            f"{kind}.{name}": value for kind in ("start", "last") for name, value in getattr(self, f"_{kind}").items()
        }

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Inverse of :meth:`tensors`."""
        for key, value in tensors.items():
            kind, _, name = key.partition(".")
            (self._start if kind == "start" else self._last)[name] = value


def _sample(value: torch.Tensor) -> torch.Tensor:
    """A view of evenly spread rows, of this rank's part where the tensor is sharded."""
    local: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    local = local.detach()
    return local[:: max(-(-local.numel() // _SAMPLED), 1)] if local.ndim else local


def _product(
    optimizer: torch.optim.Optimizer | None, param: nn.Parameter, now: torch.Tensor, last: torch.Tensor
) -> torch.Tensor:
    """The parameter's part of g_t . P g_(t-1), scaled up from the sample; NaN before the optimizer has a P."""
    product = now.float() * last.to(now.device).float()
    state = optimizer.state.get(param, {}) if optimizer is not None else {}
    key = next((key for key in _SECOND_MOMENTS if key in state), None)
    if key is not None:
        # v without its bias correction: one factor for all parameters, and only shares matter.
        product = product / (_sample(state[key]).float().sqrt() + 1e-8)
    elif optimizer is not None and _keeps_moments(optimizer):
        return torch.full((), math.nan, device=now.device)
    total = param.grad if param.grad is not None else param
    return product.sum() * (_numel(total) / max(product.numel(), 1))


def _keeps_moments(optimizer: torch.optim.Optimizer) -> bool:
    return any(key in state for state in optimizer.state.values() for key in _SECOND_MOMENTS) or any(
        "betas" in group for group in optimizer.param_groups
    )


def _numel(value: torch.Tensor) -> int:
    local: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    return local.numel()


def _sampled_weights(hands: Hands) -> dict[str, torch.Tensor]:
    return {name: _sample(param).clone() for layer in hands.layers for name, param in layer.params.items()}


def _movement(hands: Hands, start: dict[str, torch.Tensor]) -> list[float]:
    """|w - w_0| / |w_0| by layer; infinite where nothing can be said (w_0 = 0, or resumed without it)."""
    found = []
    for layer in hands.layers:
        pairs = [(start[name], _sample(param)) for name, param in layer.params.items() if name in start]
        before = sum(float(old.float().square().sum()) for old, _ in pairs)
        moved = sum(float((new.float() - old.to(new.device).float()).square().sum()) for old, new in pairs)
        found.append(float(np.sqrt(moved / before)) if before > 0 else math.inf)
    return found
