"""Freezes where the measured signal says that progress a second rises, and opens again in halves when the metric stalls."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from icefrog.errors import UserError
from icefrog.estimate.progress import LEAST_SIGNAL, MAX_SHARE, seconds_by_depth, signal_share, signal_worth
from icefrog.profile import FloatArray
from icefrog.runtime.rules.base import FreezingRule, Hands, Proposal, Situation
from icefrog.runtime.rules.signal import SignalMeter
from icefrog.runtime.rules.spectrum import LEARNT

_TRIAL_PASSES = 2
"""Passes over the data without one hit after which the cache is not counted on any more."""


class Progress(FreezingRule):
    """l* = argmax of psi(l) / seconds(l), psi from the signal (:mod:`icefrog.estimate.progress`), the cache counted in.

    1. *When to start.* At once if the layers in question had learnt before the job began, as pre-trained ones have: the
       largest singular values of their weights tell (:mod:`icefrog.runtime.rules.spectrum`), up to the last that had.
       Otherwise after ``warmup_share`` of P0: what is built on a random prefix stays poor.
    2. *How deep.* The argmax over at most ``max_share`` of the layers, behind which ``least_signal`` of the signal is left,
       if it promises ``margin`` more than full training and than the present depth. Where the prefix had learnt,
       ``learnt_least_signal`` is enough up to there, and with ``least_signal`` it goes on up to ``learnt_max_share``.
       Frozen layers keep the share of the signal that they had when they froze.
    3. *When to open.* After ``patience`` validations at a depth without a new best metric, half of the frozen layers are
       opened, and the rule never freezes deeper than that again. Also when freezing does not pay any more, because the
       cache turned out not to hit. Layers that open forget the momentum of when they froze.

    Args:
        margin: least relative gain in effective progress of a move.
        max_share: most layers frozen, share of all.
        learnt_max_share: the same, where the prefix had learnt and carries little of the signal.
        least_signal: share of the signal that must be left in the layers that train, in [0, 1].
        learnt_least_signal: the same, where the prefix had learnt.
        warmup_share: of P0, effective samples.
        patience: validations.

    Raises:
        UserError: a setting out of its range.
    """

    name = "progress"
    first_looks = (6, 12, 24, 48)
    reads_statistics = False

    def __init__(
        self,
        *,
        margin: float = 0.25,
        max_share: float = MAX_SHARE,
        learnt_max_share: float = 0.65,
        least_signal: float = LEAST_SIGNAL,
        learnt_least_signal: float = 0.45,
        warmup_share: float = 0.1,
        patience: int = 3,
    ) -> None:
        shares = (max_share, learnt_max_share, least_signal, learnt_least_signal, warmup_share)
        if margin < 0 or not all(0 <= share <= 1 for share in shares) or patience < 1:
            raise UserError(
                f"Progress(margin={margin}, max_share={max_share}, learnt_max_share={learnt_max_share}, "
                f"least_signal={least_signal}, learnt_least_signal={learnt_least_signal}, warmup_share={warmup_share}, "
                f"patience={patience}) is not a rule",
                "margin is >= 0, shares are between 0 and 1, patience is at least 1",
            )
        self.margin = margin
        self.max_share = max_share
        self.learnt_max_share = learnt_max_share
        self.least_signal = least_signal
        self.learnt_least_signal = learnt_least_signal
        self.warmup_share = warmup_share
        self.patience = patience
        self._meter = SignalMeter()
        self._cap: int | None = None  # depth above which the rule never goes again
        self._kept: list[float] = []  # shares of the signal of the frozen layers
        self._cache_fails = False
        self._metrics_at_move = 0
        self._depth = 0  # as of the last decision
        self._forward_share = 0.0  # of a full step's time

    def observe(self, hands: Hands) -> None:
        """Measure."""
        self._meter.observe(hands)

    def signal(self) -> list[float] | None:
        """As measured; None while nothing is, or where it is nothing but noise."""
        measured = self._meter.progress()
        return None if measured is None or not any(measured) else self._shares(measured)

    def _shares(self, signal: list[float]) -> list[float]:
        """Of the whole by layer; of frozen layers as they froze."""
        share = np.nan_to_num(signal_share(signal, self._kept))
        return [max(value, 0.0) for value in (share[:-1] - share[1:]).tolist()]

    def _learnt_layers(self) -> int:
        """So many layers had learnt before the job began, up to the last that had; 0: the first half had not.

        The first half counts on average, over those of its layers that have matrices.
        """
        structure = self._meter.structure
        told = [value for value in structure[: len(structure) // 2] if math.isfinite(value)]
        if not told or sum(told) / len(told) <= LEARNT:
            return 0
        return max(place + 1 for place, value in enumerate(structure) if value > LEARNT)

    # --- decisions

    def propose(self, now: Situation) -> Proposal:
        """See the class."""
        depth = now.frozen_layers
        signal = self._meter.progress()
        if depth != self._depth:  # moved by someone else
            self._note_move(now, depth, [] if signal is None else self._shares(signal)[:depth])
        if now.profile is None or signal is None or len(signal) != now.num_layers:
            return now.stay("not ready: too few steps measured")
        learnt = self._learnt_layers()
        cap = int(self.max_share * now.num_layers + 1e-9)
        least_signal = np.full(now.num_layers, self.least_signal)  # by depth
        if learnt:
            least_signal[: cap + 1] = self.learnt_least_signal
            cap = max(cap, min(learnt, int(self.learnt_max_share * now.num_layers + 1e-9)))
        cap = min(cap, now.bounds.max_frozen)
        warm = now.share_done >= self.warmup_share
        if learnt and not warm:  # a trained embedding, say, in front of fresh layers
            cap = min(cap, learnt)
        if self._cap is not None:
            cap = min(cap, self._cap)
        if depth > now.bounds.min_frozen and self._stalls(now):
            self._cap = depth // 2
            reason = f"opened from {depth}: no new best metric in {self.patience} validations"
            return self._move(now, now.bounds.clamp(self._cap), reason, signal)
        if not warm and not learnt:  # deeper than it must be is what a scheduler wanted for a time, or somebody by hand
            reason, least = "warm-up: the layers are fresh", now.bounds.min_frozen
            return self._move(now, least, reason, signal) if depth > least else now.stay(reason)
        return self._best(now, max(cap, now.bounds.min_frozen), signal, least_signal)

    def _best(self, now: Situation, cap: int, signal: list[float], least_signal: FloatArray) -> Proposal:
        assert now.profile is not None
        worth = signal_worth(signal, self._kept)[:-1]
        depth, least = now.frozen_layers, now.bounds.min_frozen
        cached = self._cache_counts(now)
        if depth == 0 and now.step_s > 0:
            self._forward_share = now.forward_s / now.step_s
        seconds = seconds_by_depth(
            now.profile, now.config, now.num_nodes, forward_share=self._forward_share, cached=cached
        )
        progress = np.nan_to_num(worth) * now.config.global_batch / seconds
        enough = np.nan_to_num(signal_share(signal, self._kept)[:-1]) >= least_signal
        while cap > max(least, depth) and not enough[cap]:
            cap -= 1
        best = least + int(progress[least : cap + 1].argmax())
        if least == 0 and progress[best] <= progress[0] * (1.0 + self.margin):
            best = 0
        gain = progress[best] / progress[depth] - 1.0 if progress[depth] > 0 else np.inf
        pays = progress[depth] >= progress[0]
        if best == depth or (gain <= self.margin and pays and least <= depth <= cap):
            why = "full training makes the most progress" if depth == 0 else f"worth {worth[depth]:.2f}"
            return Proposal(
                depth, f"{why}; best: {best} frozen, {gain:+.0%}", float(progress[depth]), self._worth(worth, depth)
            )
        reason = f"worth {worth[best]:.2f} at {seconds[best] / seconds[0]:.2f} of a full step's time"
        return self._move(
            now, best, f"{reason}{', prefix cached' if cached and best else ''}", signal, float(progress[best])
        )

    def _move(
        self, now: Situation, depth: int, reason: str, signal: list[float], progress: float | None = None
    ) -> Proposal:
        worth = signal_worth(signal, self._kept)
        self._note_move(now, depth, self._shares(signal)[:depth])
        return Proposal(depth, reason, progress, self._worth(worth, depth), forget_momentum=True)

    def _note_move(self, now: Situation, depth: int, kept: list[float]) -> None:
        self._depth, self._kept = depth, kept
        self._metrics_at_move = len(now.metrics)

    @staticmethod
    def _worth(worth: FloatArray, depth: int) -> float | None:
        return float(worth[depth]) if np.isfinite(worth[depth]) and worth[depth] > 0 else None

    def _stalls(self, now: Situation) -> bool:
        return min(now.stalled, len(now.metrics) - self._metrics_at_move) >= self.patience

    def _cache_counts(self, now: Situation) -> bool:
        cache = now.cache
        if cache is None or self._cache_fails:
            return False
        if now.frozen_layers > 0:
            assert now.profile is not None
            seen = now.steps_since_move * now.config.global_batch
            barren = cache.hits == 0 and seen > _TRIAL_PASSES * now.profile.samples_per_epoch
            self._cache_fails = bool(cache.off_reason) or barren
        return not self._cache_fails

    # --- memory

    def state_dict(self) -> dict[str, Any]:
        """All memory between decisions."""
        return {
            "meter": self._meter.state_dict(),
            "cap": self._cap,
            "kept": list(self._kept),
            "cache_fails": self._cache_fails,
            "metrics_at_move": self._metrics_at_move,
            "depth": self._depth,
            "forward_share": self._forward_share,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        self._meter.load_state_dict(state["meter"])
        self._cap = state["cap"]
        self._kept = list(state["kept"])
        self._cache_fails = state["cache_fails"]
        self._metrics_at_move = state["metrics_at_move"]
        self._depth = state["depth"]
        self._forward_share = state["forward_share"]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The meter's samples."""
        return self._meter.tensors()

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Inverse of :meth:`tensors`."""
        self._meter.load_tensors(tensors)
