"""Automatic mixed precision with a GradScaler, beside accumulation and a boundary that moves.

PyTorch's recipe for accumulation calls ``scaler.step`` and ``scaler.update`` once an optimizer step; a loop that was not
written for accumulation calls them once a micro-batch. So the scaler's methods are replaced, and the unchanged loop does the
right thing: gradients are un-scaled once a step, after the last micro-batch and after they were measured; a step whose
gradient is not finite is skipped on all ranks together; the scale is updated once a step.
"""

from __future__ import annotations

from typing import Any

import torch

from icefrog.errors import UserError
from icefrog.runtime.callers import callers
from icefrog.runtime.stepping import StepGate
from icefrog.runtime.world import World


class ScalerGate:
    """Patches one scaler on the object until :meth:`close`; it is what the checkpoint keeps of the scaler, too.

    Args:
        scaler: the user's; a disabled one is left alone.
        optimizer: the one whose steps it scales.
        world: this process among its peers.
    """

    def __init__(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, world: World) -> None:
        self.scaler = scaler
        self.optimizer = optimizer
        self.world = world
        self._gate: StepGate | None = None
        self._scale: float | None = None  # of the step in progress; None: not asked for yet
        self._unscaled = False
        self._unscale = scaler.unscale_
        self._update = scaler.update

    def attach(self, gate: StepGate) -> None:
        """From now on the scaler's steps go through ``gate``."""
        self._gate = gate
        if self.scaler.is_enabled():
            for name, method in (
                ("step", self._gated_step),
                ("unscale_", self._by_user),
                ("update", self._gated_update),
            ):
                setattr(self.scaler, name, method)

    def close(self) -> None:
        """Give the scaler its own methods back."""
        for name in ("step", "unscale_", "update"):
            self.scaler.__dict__.pop(name, None)

    def get_scale(self) -> float:
        """By which the gradients of the step in progress are too large. Read once a step: on CUDA reading waits."""
        if self._scale is None:
            self._scale = float(self.scaler.get_scale())
        return self._scale

    def _gated_step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        gate = self._gate
        assert gate is not None
        if optimizer is not self.optimizer:
            raise UserError(
                "the GradScaler given to LayerElastic steps another optimizer, too",
                "give that optimizer its own scaler",
            )
        if any(arg is not None for arg in args) or kwargs.get("closure") is not None:
            raise UserError("a GradScaler does not work with step(closure)", "call loss.backward(), then scaler.step()")
        if not gate.at_last_micro:
            return optimizer.step()
        gate.end_micro()
        self.get_scale()
        if not self._unscaled:
            self._unscale(optimizer)
        overflow = self._agree()
        self._update()  # before the step, at whose end a checkpoint may be made
        try:
            return gate.skip() if overflow else optimizer.step()
        finally:
            self._scale, self._unscaled = None, False

    def _agree(self) -> bool:
        """Collective. Whether any rank's gradients hold an infinity or NaN; the scalers of all ranks know it then.

        PyTorch's sharded scaler does the same. Under DDP ranks agree anyway; where each holds other gradients one alone
        would wait for the rest for ever.
        """
        found = list(self.scaler._found_inf_per_device(self.optimizer).values())
        any_rank = float(self.world.sum(torch.tensor([sum(float(flag.item()) for flag in found)]))[0]) > 0
        if any_rank:
            for flag in found:
                flag.fill_(1.0)
        return any_rank

    def _by_user(self, optimizer: torch.optim.Optimizer) -> None:
        """``scaler.unscale_`` in the loop, which is for clipping there."""
        assert self._gate is not None
        if self._gate.accum_steps > 1:
            raise UserError(
                "scaler.unscale_() in the loop cannot be combined with accumulation: the gradient is not complete there",
                "leave it out, and clip with LayerElastic(max_grad_norm=...)",
            )
        if optimizer is self.optimizer:
            self._gate.end_micro()
            self.get_scale()
            self._unscaled = True
        self._unscale(optimizer)

    def _gated_update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """The step has done it already; a scale of the user's own is taken over."""
        if new_scale is not None:
            self._update(new_scale)
            self._scale = None

    def state_dict(self) -> dict[str, Any]:
        """The scaler's."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Into the scaler; nothing where it was disabled when the state was saved, or is now."""
        if state and self.scaler.is_enabled():
            self.scaler.load_state_dict(state)
        self._scale, self._unscaled = None, False


def refuse_unknown_scaler() -> None:
    """Called in an optimizer step.

    Raises:
        UserError: a GradScaler makes this step that LayerElastic was not told of: gradients would be un-scaled once a
            micro-batch, measured at a scale that changes, and skipped steps would count.
    """
    for frame in callers():
        if frame.f_code is torch.amp.GradScaler.step.__code__ and frame.f_locals["self"].is_enabled():
            raise UserError(
                "a GradScaler is in use that LayerElastic does not know",
                "make it LayerElastic(..., grad_scaler=scaler)",
            )
