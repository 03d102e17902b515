"""Chooses the boundary: the Layer Tuner inside the grant's bounds, behind the guards of :mod:`icefrog.estimate.boundary`.
Runs on rank 0 only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from icefrog.estimate.boundary import Guards, Standing, dwells, imposed_depth
from icefrog.estimate.penalty import GradientTracker, frozen_penalty
from icefrog.estimate.tuner import max_frozen_layers, tune
from icefrog.profile import Profile
from icefrog.runtime.protocol import Grant
from icefrog.spec import Target
from icefrog.types import Config

__all__ = ["Bounds", "DepthRule", "Guards", "Proposal"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Within which the boundary may move."""

    rule: str = "tuner"
    min_frozen: int = 0
    max_frozen: int = 0
    shared: bool = False

    @classmethod
    def of(cls, num_layers: int, max_fraction: float, rule: str, grant: Grant | None) -> Bounds:
        """The user's fraction and rule, narrowed by the grant."""
        most = max_frozen_layers(num_layers, max_fraction)
        if grant is None:
            return cls(rule, 0, most)
        most = min(most, max_frozen_layers(num_layers, grant.max_fraction))
        if grant.max_frozen_layers is not None:
            most = min(most, grant.max_frozen_layers)
        least = min(grant.min_frozen_layers, num_layers - 1)
        return cls("none" if "none" in (rule, grant.rule) else rule, least, max(most, least), grant.shared)


@dataclass(frozen=True, slots=True)
class Proposal:
    """What rank 0 decided: plain values, broadcast to all ranks."""

    frozen_layers: int
    psi: float
    throughput: float
    effective_progress: float
    reason: str


class DepthRule:
    """The guards' memory around :func:`icefrog.estimate.tuner.tune`."""

    def __init__(self, guards: Guards, target: Target | None) -> None:
        self.guards = guards
        self.target = target
        self.best_metric: float | None = None
        self.stalled = 0
        self.held_open = False
        self.last_move_step = -(10**9)

    def see_metric(self, metric: float | None) -> None:
        """Take in a validation metric (None or NaN: nothing new)."""
        if metric is None or math.isnan(metric):
            return
        sign = -1.0 if self.target is not None and self.target.mode == "min" else 1.0
        if self.best_metric is None or sign * metric > sign * self.best_metric:
            self.best_metric, self.stalled, self.held_open = metric, 0, False
        else:
            self.stalled += 1

    def propose(
        self,
        *,
        step: int,
        config: Config,
        profile: Profile | None,
        tracker: GradientTracker,
        bounds: Bounds,
        psi: float,
        measured_throughput: float,
        share_done: float,
    ) -> Proposal:
        """The boundary from the next step on.

        Args:
            step: optimizer steps so far.
            config: in force now.
            profile: as measured so far; None: nothing measured yet.
            tracker: gradient statistics.
            bounds: legal depths.
            psi: of the boundary in force.
            measured_throughput: samples/s now; 0 where unknown.
            share_done: effective samples / P0; 0 while P0 is unknown.
        """
        now = config.frozen_layers
        if bounds.rule == "none":
            return self._stay(max(now, bounds.min_frozen), psi, measured_throughput, "freezing is left to the user")
        stats = tracker.stats()
        if profile is None or stats is None:
            depth = min(max(now, bounds.min_frozen), bounds.max_frozen)
            return self._stay(depth, psi, measured_throughput, "not ready: too few steps measured")
        standing = Standing(now, bounds.min_frozen, share_done, step - self.last_move_step, self._stall_opens(now))
        if (imposed := imposed_depth(self.guards, standing)) is not None:
            return self._stay(imposed[0], 1.0, measured_throughput, imposed[1])
        choice = tune(
            profile,
            stats.variance,
            num_gpus=config.num_gpus,
            shared=bounds.shared,
            global_batches=[config.global_batch],
            max_frozen_layers=bounds.max_frozen,
            min_frozen_layers=bounds.min_frozen,
            current=config,
            hysteresis=self.guards.hysteresis,
        )
        depth = max(choice.config.frozen_layers, bounds.min_frozen)
        reason = choice.reason
        if dwells(self.guards, standing, depth):
            depth, reason = min(max(now, bounds.min_frozen), bounds.max_frozen), "dwells: the last move is too recent"
        if depth != choice.config.frozen_layers:
            worth = float(np.nan_to_num(frozen_penalty(stats.variance)[depth], nan=psi))
            return self._stay(depth, worth, measured_throughput, reason)
        return Proposal(depth, choice.psi, choice.throughput, choice.effective_progress, reason)

    def moved(self, step: int) -> None:
        """The boundary moved at this step."""
        self.last_move_step = step

    def _stall_opens(self, frozen_layers: int) -> bool:
        if self.target is None or self.guards.stall_patience == 0:
            return False
        if frozen_layers > 0 and self.stalled >= self.guards.stall_patience:
            self.held_open = True
        return self.held_open

    @staticmethod
    def _stay(depth: int, psi: float, throughput: float, reason: str) -> Proposal:
        return Proposal(depth, psi, throughput, psi * throughput, reason)

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "best_metric": self.best_metric,
            "stalled": self.stalled,
            "held_open": self.held_open,
            "last_move_step": self.last_move_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        self.best_metric = state["best_metric"]
        self.stalled = state["stalled"]
        self.held_open = state["held_open"]
        self.last_move_step = state["last_move_step"]
