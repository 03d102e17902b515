"""The optimizer's momentum of layers that open: made where it is missing, forgotten where a rule wants that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from icefrog.runtime.layers import Layer

_SGD = "momentum_buffer"
_FIRST_MOMENTS = (_SGD, "exp_avg")


def forget_momentum(optimizer: torch.optim.Optimizer, layers: Sequence[Layer]) -> None:
    """First moments become zero; second moments, step counts and all else stay.

    A moving average of gradients that are long past would go on moving the layer for ten steps or so (momentum 0.9): after a
    freeze in the first steps of training, with far larger gradients than now.
    """
    for layer in layers:
        for param in layer.params.values():
            state = optimizer.state.get(param, {})
            for key in _FIRST_MOMENTS:
                if isinstance(state.get(key), torch.Tensor):
                    state[key].zero_()


def start_late_momentum(optimizer: torch.optim.Optimizer) -> list[RemovableHandle]:
    """Hook the steps of an SGD with the fused kernel, which cannot start momentum for some parameters while others have it.

    That is the state of every layer that was frozen before its first step and is opened later (the kernel ends in a
    TypeError). Momentum is made here, as zeros, right before that step: the update is the other kernels' own (with
    ``dampening`` d, (1 - d) of it, once).
    """
    fused = isinstance(optimizer, torch.optim.SGD) and any(group.get("fused") for group in optimizer.param_groups)
    return [optimizer.register_step_pre_hook(_complete)] if fused else []


def _complete(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for group in optimizer.param_groups:
        if not group.get("fused") or not group["momentum"]:
            continue
        moving = [param for param in group["params"] if param.grad is not None]
        late = [param for param in moving if optimizer.state[param].get(_SGD) is None]
        if len(late) < len(moving):
            for param in late:
                optimizer.state[param][_SGD] = torch.zeros_like(param, memory_format=torch.preserve_format)
