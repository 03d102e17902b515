"""LR schedules over a fixed number of steps, in a job that may need more of them: frozen steps count less."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import OneCycleLR


class HeldOneCycleLR(OneCycleLR):
    """Stays at its last rate, where PyTorch's ends training in an error (and its linear one goes below zero before)."""

    def step(self, epoch: int | None = None) -> None:
        """One step on, while there is one."""
        if self.last_epoch < self.total_steps - 1:
            super().step(epoch)


def hold_at_end(schedule: Any) -> None:
    """Make a OneCycleLR, or those inside a chain or a sequence, one that is held."""
    if type(schedule) is OneCycleLR:
        schedule.__class__ = HeldOneCycleLR
    for inner in getattr(schedule, "_schedulers", ()):
        hold_at_end(inner)
