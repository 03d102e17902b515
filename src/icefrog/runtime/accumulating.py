"""Notices what a loop does to gradients that are still accumulating: clipping acts on a part of them, zeroing loses it."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from icefrog.errors import UserError
from icefrog.runtime.ready import on_gradient


class AccumulationWatch:
    """Looks at one parameter during the first optimizer step: loops do the same in each.

    Args:
        param: always trained.
        accum_steps: k.
    """

    def __init__(self, param: nn.Parameter, accum_steps: int) -> None:
        self._param = param
        self._left: tuple[torch.Tensor, int] | None = None  # by the last backward pass: the gradient, and its version
        self._waiting: tuple[torch.Tensor, int] | None = None  # the same between two micro-steps
        self._handle: RemovableHandle | None = None
        self.restart(accum_steps)

    def restart(self, accum_steps: int) -> None:
        """Look again: so many micro-steps from now on."""
        self.close()
        self._accum_steps = accum_steps
        self._handle = on_gradient(self._param, self._made) if accum_steps > 1 else None

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

    def micro_settled(self) -> None:
        """Nothing of ours changes the accumulated gradient before the next forward pass begins."""
        grad = self._left[0] if self._left is not None else None
        self._waiting = (grad, grad._version) if grad is not None else None

    def pass_begins(self) -> None:
        """The next forward pass.

        Raises:
            UserError: what was accumulated is gone.
        """
        waiting, self._waiting = self._waiting, None
        if waiting is not None and (self._param.grad is not waiting[0] or waiting[0]._version != waiting[1]):
            raise UserError(
                f"gradients were zeroed or changed before all {self._accum_steps} micro-steps of a step were done",
                "use optimizer.zero_grad(), which waits for the step, not model.zero_grad()",
            )

    def abandoned(self) -> None:
        """What was accumulated is dropped on purpose."""
        self._left = self._waiting = None

    def close(self) -> None:
        """Look no more."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._left = self._waiting = None
