"""SGD's fused kernel cannot start momentum for some parameters while others have theirs: it ends in a TypeError.

That is the state of every layer that was frozen before its first step and is opened later. Its momentum is made here, as zeros,
right before that step: the update is the one that the other kernels make (with ``dampening`` d, (1 - d) of it, once).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

_KEY = "momentum_buffer"


def start_late_momentum(optimizer: torch.optim.Optimizer) -> list[RemovableHandle]:
    """Hook the optimizer's steps, where that is needed."""
    fused = isinstance(optimizer, torch.optim.SGD) and any(group.get("fused") for group in optimizer.param_groups)
    return [optimizer.register_step_pre_hook(_complete)] if fused else []


def _complete(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for group in optimizer.param_groups:
        if not group.get("fused") or not group["momentum"]:
            continue
        moving = [param for param in group["params"] if param.grad is not None]
        late = [param for param in moving if optimizer.state[param].get(_KEY) is None]
        if len(late) < len(moving):
            for param in late:
                optimizer.state[param][_KEY] = torch.zeros_like(param, memory_format=torch.preserve_format)
