"""Notices clipping in the loop where gradients accumulate: it would act on the sum of a part of the step's samples."""

from __future__ import annotations

import torch
from torch import nn

from icefrog.runtime.ready import on_gradient


class ClipWatch:
    """Looks at one parameter during the first optimizer step: whether its gradient is as the last backward pass left it.

    Args:
        param: always trained.
        accum_steps: k.
    """

    def __init__(self, param: nn.Parameter, accum_steps: int) -> None:
        self._param = param
        self._accum_steps = accum_steps
        self._left: tuple[torch.Tensor, int] | None = None
        self._handle = on_gradient(param, self._made) if accum_steps > 1 else None

    def _made(self, param: torch.Tensor) -> None:
        # A view (DDP's gradient_as_bucket_view) changes with other parameters' gradients.
        self._left = (param.grad, param.grad._version) if param.grad is not None and not param.grad._is_view() else None

    def micro_ended(self, micro: int) -> str | None:
        """What the user should know, once. Behind the last micro-step communication changes gradients, too."""
        if self._handle is None:
            return None
        left, grad = self._left, self._param.grad
        found = left is not None and (grad is not left[0] or left[0]._version != left[1])
        if found or micro == self._accum_steps - 1:
            self.close()
        if not found or micro == self._accum_steps - 1:
            return None
        return (
            "gradients are changed between backward() and optimizer.step(): with "
            f"accum_steps={self._accum_steps} that acts on a part of the step's samples; clip with "
            "LayerElastic(max_grad_norm=...)"
        )

    def close(self) -> None:
        """Look no more."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._left = None
