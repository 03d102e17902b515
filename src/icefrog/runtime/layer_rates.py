"""A learning-rate factor for each layer, without touching parameter groups (LR schedulers keep their groups).

A step of an optimizer is theta -> theta + lr u, where u and the optimizer's state do not depend on lr: so for SGD with
momentum, Adam, AdamW (its weight decay is lr wd theta), RMSprop, Adagrad and their like. The factor f then moves the layer
to theta + f lr u, by interpolation between the values before and after the step: the same as the learning rate f lr, up to
rounding. Optimizers that are not linear in lr (Rprop, ASGD, Adafactor) have their *update* scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from icefrog.runtime.layers import Layer


def scaled_step(real_step: Callable[[], Any], layers: Sequence[Layer], factors: Sequence[float]) -> Any:
    """One optimizer step in which each layer moves ``factors[i]`` times as far; layers with another than 1 are copied.

    Args:
        real_step: the optimizer's own step.
        layers: all of them; a parameter without a gradient is left alone.
        factors: one a layer, >= 0.

    Returns:
        What the optimizer returned.
    """
    held = [
        (param, param.detach().clone(), factor)
        for layer, factor in zip(layers, factors, strict=True)
        if factor != 1.0
        for param in layer.params.values()
        if param.grad is not None
    ]
    result = real_step()
    with torch.no_grad():
        for param, before, factor in held:
            param.copy_(torch.lerp(before, param, factor))
    return result
