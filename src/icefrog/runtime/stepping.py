"""Takes the place of ``optimizer.step`` and ``optimizer.zero_grad``: accumulation, and a hook at each step boundary.

The user's loop stays as it is: with k accumulation micro-steps only each k-th call steps, on the average gradient.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from icefrog.errors import UserError


class StepGate:
    """Patches one optimizer.

    Args:
        optimizer: its ``step`` and ``zero_grad`` are replaced on the object until :meth:`close`.
        accum_steps: k.
        on_micro: called after each micro-step's backward, with its index 0..k-1.
        on_step: called at each step boundary with the real step as a function; returns what ``step`` returns.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        accum_steps: int,
        on_micro: Callable[[int], None],
        on_step: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self.optimizer = optimizer
        self.accum_steps = accum_steps
        self.micro = 0  # micro-steps done since the last real step
        self._on_micro = on_micro
        self._on_step = on_step
        self._step = optimizer.step
        self._zero_grad = optimizer.zero_grad

        def step(_optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            return self._gated_step(args, kwargs)

        def zero_grad(_optimizer: Any, *args: Any, **kwargs: Any) -> None:
            if self.micro == 0:  # in the middle of an accumulation the gradients are still needed
                self._zero_grad(*args, **kwargs)

        if hasattr(self._step, "_wrapped_by_lr_sched"):  # else a scheduler made before us warns without cause
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        # Bound methods, since LR schedulers wrap ``step.__func__``.
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]

    def _gated_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[0] if args else None)
        if closure is not None and self.accum_steps > 1:
            raise UserError(
                "optimizer.step(closure) cannot be combined with gradient accumulation",
                "call loss.backward() and optimizer.step() without a closure",
            )
        if closure is not None:  # it holds the forward and backward: run it now, and hand its result to the optimizer
            with torch.enable_grad():
                ready = [closure()]
            args, kwargs = args[1:], {**kwargs, "closure": lambda: ready.pop() if ready else closure()}
        self._on_micro(self.micro)
        self.micro += 1
        if self.micro < self.accum_steps:
            return None
        self.micro = 0
        return self._on_step(lambda: self._step(*args, **kwargs))

    def close(self) -> None:
        """Give the optimizer its own methods back."""
        for name in ("step", "zero_grad"):
            self.optimizer.__dict__.pop(name, None)
