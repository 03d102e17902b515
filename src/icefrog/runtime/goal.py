"""When a job is done."""

from __future__ import annotations

from dataclasses import dataclass

from icefrog.runtime.protocol import Outcome
from icefrog.runtime.reporting import Counters
from icefrog.spec import Target


@dataclass
class Goal:
    """A target for the validation metric, P0, or both."""

    target: Target | None
    max_epochs: int | None
    """None: not known yet."""
    endless: bool = False
    """The script is only measured: whoever measures ends it."""

    def total(self, at: Counters) -> float | None:
        """P0 = largest number of epochs x samples per epoch, in effective samples; None while one of them is unknown.

        Less those of steps that a GradScaler has skipped: they are lost to a job that trains whole, too, in as many epochs.
        """
        if at.samples_per_epoch is None or self.max_epochs is None:
            return None
        return float(max(self.max_epochs * at.samples_per_epoch - at.lost_samples, 0))

    def share_done(self, at: Counters) -> float:
        """Effective samples / P0; 0 while P0 is unknown."""
        total = self.total(at)
        return at.effective_samples / total if total else 0.0

    def outcome(self, at: Counters) -> Outcome | None:
        """``completed``, ``target_missed``, or None: not done.

        P0 used up in the middle of an epoch is not the end: an epoch that was begun is trained to its end. (Before the first
        epoch has ended nobody knows whether the loop has epochs: one over a stream has none.)
        """
        if self.endless:
            return None
        total = self.total(at)
        if self._at_target(at):
            return "completed"
        if at.in_epoch and at.epoch > 0:
            return None
        if total is not None and at.effective_samples >= total * (1 - 1e-9):
            return "completed" if self.target is None else "target_missed"
        return None

    def goes_on(self, at: Counters) -> bool:
        """The same of a loop that is known to have epochs: whether it must go through another one, or the rest of one."""
        return self.outcome(at) is None or (at.in_epoch and not self._at_target(at))

    def _at_target(self, at: Counters) -> bool:
        return self.target is not None and at.metric is not None and self.target.reached(at.metric)
