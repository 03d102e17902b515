"""Takes the place of ``optimizer.step`` and ``optimizer.zero_grad``: accumulation, and a hook at each step boundary.

The user's loop stays as it is: with k accumulation micro-steps only each k-th call steps, on the average gradient.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from icefrog.errors import UserError
from icefrog.runtime.counting import Counting

_MARK = "_of_layer_elastic"


def refuse_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError for an optimizer that is in use by another LayerElastic, or that trains nothing of the model."""
    if hasattr(vars(optimizer).get("step"), _MARK):
        raise UserError(
            "the optimizer belongs to another LayerElastic already",
            "call close() on that one first, or make model and optimizer anew (re-running a notebook's cell, too)",
        )
    lacking = [
        name for name in ("param_groups", "state", "defaults", "step", "zero_grad") if not hasattr(optimizer, name)
    ]
    if lacking:
        raise UserError(
            f"LayerElastic takes a torch.optim.Optimizer; {type(optimizer).__name__} has no {', '.join(lacking)}",
            "give it the optimizer that the wrapper holds: of several, the one that trains most of the model",
        )
    own = {id(param) for param in model.parameters()}
    if not any(id(param) in own for group in optimizer.param_groups for param in group["params"]):
        raise UserError(
            "the optimizer holds no parameter of the model",
            "make it from model.parameters() of this very model, after model.to(...) and before LayerElastic",
        )


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's wrapper, whose ``step`` does nothing while accelerate accumulates gradients."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrapped(inner) if _is_accelerates(optimizer) and isinstance(inner, torch.optim.Optimizer) else optimizer


def scaler_of(optimizer: torch.optim.Optimizer) -> Any:
    """The GradScaler that accelerate's wrapper steps with under fp16; None: it has none, or there is no wrapper."""
    return getattr(optimizer, "scaler", None) if _is_accelerates(optimizer) else None


def tell_wrapper(optimizer: torch.optim.Optimizer) -> None:
    """With a GradScaler accelerate's wrapper keeps the ``step`` of the optimizer inside: it is another one now."""
    if _is_accelerates(optimizer):
        optimizer.__setstate__({})


def _is_accelerates(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.partition(".")[0] == "accelerate"


class StepGate:
    """Patches one optimizer.

    Args:
        optimizer: its ``step`` and ``zero_grad`` are replaced on the object until :meth:`close`.
        counting: knows which micro-step it is; told of its end by ``on_micro``.
        on_micro: called after each micro-step's backward.
        on_step: called at each step boundary with the real step as a function; returns what ``step`` returns. None instead
            of a function: the gradient is not finite (mixed precision), and there is no step.
        on_zero: called at each ``zero_grad`` that is not in the middle of an accumulation.
        has_gradients: whether a backward pass has followed the last forward pass, and no step or ``zero_grad`` that.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        counting: Counting,
        on_micro: Callable[[], None],
        on_step: Callable[[Callable[[], Any] | None], Any],
        on_zero: Callable[[], None] = lambda: None,
        has_gradients: Callable[[], bool] = lambda: False,
    ) -> None:
        self.optimizer = optimizer
        self._counting = counting
        self._ended = False  # the backward of the micro-step in progress is over, and that was said
        self._on_micro = on_micro
        self._on_step = on_step
        self._has_gradients = has_gradients
        self._step = optimizer.step
        self._zero_grad = optimizer.zero_grad
        self._before: dict[str, Any] = {
            name: vars(optimizer)[name] for name in ("step", "zero_grad") if name in vars(optimizer)
        }

        def step(_optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            return self._gated_step(args, kwargs)

        def zero_grad(_optimizer: Any, *args: Any, **kwargs: Any) -> None:
            if self._micro == 0:  # in the middle of an accumulation the gradients are still needed
                self._zero_grad(*args, **kwargs)
                on_zero()

        setattr(step, _MARK, True)  # LR schedulers wrap it and keep the mark
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
        # It holds the forward and backward: run it now, and hand its result to the optimizer. Not where the gradients of the
        # step are there already, and the optimizer may be one that moves the weights before it calls it (SAM).
        if closure is not None and not (self._has_gradients() and self._may_move_first(closure)):
            with torch.enable_grad():
                ready = [closure()]
            args, kwargs = args[1:], {**kwargs, "closure": lambda: ready.pop() if ready else closure()}
        return self._next(lambda: self._step(*args, **kwargs))

    def _may_move_first(self, closure: Any) -> bool:
        """Torch's own optimizers call the closure before anything else; Lightning's is the last pass of an accumulation."""
        inside = getattr(closure, "func", closure)
        home = getattr(inside, "__module__", None) or type(inside).__module__
        if home.partition(".")[0] in ("lightning", "pytorch_lightning"):
            return False
        return not type(self.optimizer).step.__module__.startswith("torch.")

    @property
    def accum_steps(self) -> int:
        """k."""
        return self._counting.accum_steps

    @property
    def _micro(self) -> int:
        """Of the optimizer step in progress, the micro-step that the next call ends."""
        return (self._counting.micro - self._ended) % self.accum_steps

    @property
    def at_last_micro(self) -> bool:
        """Whether the next call steps."""
        return self._micro == self.accum_steps - 1

    def end_micro(self) -> None:
        """The micro-step's backward is over: its gradients are final, whatever is done to them before the step."""
        if not self._ended:
            self._ended = True
            self._on_micro()

    def skip(self) -> None:
        """In place of the last micro-step's ``optimizer.step()``: the gradient is not finite."""
        self._next(None)

    def _next(self, real_step: Callable[[], Any] | None) -> Any:
        self.end_micro()
        self._ended = False
        return self._on_step(real_step) if self._counting.micro == 0 else None

    def restart(self) -> None:
        """Training goes on from another state: what was accumulated is gone."""
        self._ended = False

    def close(self) -> None:
        """Give the optimizer its own methods back; what an LR scheduler had put in their place, too."""
        for name in ("step", "zero_grad"):
            vars(self.optimizer).pop(name, None)
        vars(self.optimizer).update(self._before)
