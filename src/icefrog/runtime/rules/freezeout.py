"""FreezeOut (Brock, Lim, Ritchie and Weston, 2017, arXiv:1706.04983), with its schedule tuned for the job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from icefrog.errors import UserError
from icefrog.estimate.freezeout import Schedule, Shape, choose
from icefrog.runtime.rules.base import FreezingRule, Proposal, Situation


class FreezeOut(FreezingRule):
    """Anneals the learning rate of each layer to zero at a time of its own, and freezes the layer then.

    lr_i(t) = 0.5 lr_i(0) (1 + cos(pi t / t_i)) for t < t_i, then 0; t: share of P0 done; t_i rises from t_0 for the first
    layer to 1 for the last (:class:`~icefrog.estimate.freezeout.Schedule`). lr_i(0) is what the loop's own scheduler says.

    Without ``t_0`` the schedule is *tuned* like that of the paper's baselines: as soon as gradient statistics and step times
    are known, once, the one of least training time by psi T is chosen; nothing is annealed before. Deviations: the variances
    are taken as they are then for the whole of training, since a real job does not know its future; a layer whose rate has
    reached zero is frozen at the next decision (``tune_every_steps``); layers beyond the bounds stay open, at rate zero. A
    layer never opens again, though psi counts, so that effective samples (and t) are those of every other rule.

    Args:
        t_0: in (0, 1]; when the first layer freezes. None: tuned, with the shape.
        shape: ``linear`` or ``cubed``.

    Raises:
        UserError: t_0 outside (0, 1].
    """

    name = "freezeout"

    def __init__(self, t_0: float | None = None, shape: Shape = "linear") -> None:
        if t_0 is not None and not 0.0 < t_0 <= 1.0:
            raise UserError(f"FreezeOut's t_0 must be in (0, 1], got {t_0}", "leave it out to have it tuned")
        self.schedule = None if t_0 is None else Schedule(t_0, shape)

    def propose(self, now: Situation) -> Proposal:
        """The layers whose learning rate has reached zero; never fewer than now."""
        if self.schedule is None:
            self.schedule = _tuned(now)
        if self.schedule is None:
            return now.stay("not ready: the schedule cannot be tuned yet")
        depth = self.schedule.depth(now.share_done, now.num_layers)
        way = f"t_0 {self.schedule.t_0:g}, {self.schedule.shape}"
        return now.at(max(depth, now.frozen_layers), f"freezeout ({way}) at {now.share_done:.0%} of training")

    def lr_factors(self, share_done: float, num_layers: int) -> Sequence[float]:
        """lr_i(t) / lr_i(0)."""
        if self.schedule is None:
            return [1.0] * num_layers
        factors: list[float] = self.schedule.lr_factors(share_done, num_layers).tolist()
        return factors

    def state_dict(self) -> dict[str, Any]:
        """The schedule in force."""
        return {"schedule": None if self.schedule is None else [self.schedule.t_0, self.schedule.shape]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        self.schedule = None if state["schedule"] is None else Schedule(*state["schedule"])


def _tuned(now: Situation) -> Schedule | None:
    """The schedule of least training time; None while too little is known."""
    if now.gradients is None or now.profile is None:
        return None
    speed = np.array([now.throughput(depth) for depth in range(now.bounds.max_frozen + 1)], dtype=np.float64)
    variance = np.array(now.gradients.variance)
    return choose(speed, lambda _progress: variance)
