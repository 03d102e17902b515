"""The paper's rule: the Layer Tuner's argmax of effective progress (Eq. 15), behind guards."""

from __future__ import annotations

from typing import Any

from icefrog.estimate.boundary import Guards, Standing, dwells, imposed_depth
from icefrog.estimate.tuner import tune
from icefrog.runtime.rules.base import FreezingRule, Proposal, Situation


class Tuner(FreezingRule):
    """l* = argmax of E = psi(l) T(l) over the legal depths, as far as the guards believe it.

    Args:
        guards: see :class:`~icefrog.estimate.boundary.Guards`; ``Guards(0, 0, 0, 0)`` is the paper's plain argmax.
    """

    name = "tuner"

    def __init__(self, guards: Guards | None = None) -> None:
        self.guards = guards if guards is not None else Guards()
        self.held_open = False  # by the stall guard

    def propose(self, now: Situation) -> Proposal:
        """The best depth; the present one while statistics are not ready."""
        bounds = now.bounds
        self._watch(now)
        if now.profile is None or now.gradients is None:
            return now.stay("not ready: too few steps measured")
        standing = Standing(
            now.frozen_layers, bounds.min_frozen, now.share_done, now.steps_since_move, held_open=self.held_open
        )
        if (imposed := imposed_depth(self.guards, standing)) is not None:
            return now.at(*imposed)
        choice = tune(
            now.profile,
            now.gradients.variance,
            num_gpus=now.config.num_gpus,
            num_nodes=now.num_nodes,
            shared=now.config.shared,
            global_batches=[now.config.global_batch],
            max_frozen_layers=bounds.max_frozen,
            min_frozen_layers=bounds.min_frozen,
            current=now.config,
            # What saves nothing is not held on to.
            hysteresis=0.0 if now.saving is not None and now.saving.absent else self.guards.hysteresis,
            measured_s=now.steps_s,
        )
        depth = max(choice.config.frozen_layers, bounds.min_frozen)
        if dwells(self.guards, standing, depth):
            return now.stay("dwells: the last move is too recent")
        if depth != choice.config.frozen_layers:
            return now.at(depth, choice.reason)
        return now.at(depth, choice.reason, choice.effective_progress)

    def _watch(self, now: Situation) -> None:
        """The stall guard: all layers open while the metric has no new best, from ``stall_patience`` failures on."""
        if now.target is None or self.guards.stall_patience == 0 or now.stalled == 0:
            self.held_open = False
        elif now.frozen_layers > 0 and now.stalled >= self.guards.stall_patience:
            self.held_open = True

    def state_dict(self) -> dict[str, Any]:
        """Whether layers are held open."""
        return {"held_open": self.held_open}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        self.held_open = state["held_open"]
