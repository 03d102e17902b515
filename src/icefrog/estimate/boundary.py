"""When the boundary between frozen and trained layers may move: one rule for real jobs and simulated ones. Pure.

The Layer Tuner's argmax (Eq. 15) says which depth looks best; the guards say whether to believe it
(``docs/elastic-training.md`` says why each is needed):

* warm-up: nothing is frozen during this share of P0: a prefix that has hardly been trained looks cheap to freeze;
* hysteresis: a move must promise at least this much more effective progress;
* dwell: no two moves within so many steps, so that statistics of re-opened layers are fresh;
* stall: with a target set, layers frozen, and the validation metric without a new best for so many decisions, all layers
  are opened, and stay open until there is a new best. The penalty cannot say "unreachable"; the metric can.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Guards:
    """Settings of the guards. Zeros are the paper's rule: the plain argmax."""

    warmup_share: float = 0.1
    hysteresis: float = 0.05
    dwell_steps: int = 20
    stall_patience: int = 3


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a job stands when its tuner runs."""

    frozen_layers: int
    least: int  # depth that the grant demands (a sharer must fit beside its partner); above 0 it overrides the guards
    share_done: float  # effective samples / P0; 0 while P0 is unknown
    steps_since_move: float  # optimizer steps since the boundary last moved
    held_open: bool = False  # by the stall guard; always False where no metric is measured


def imposed_depth(guards: Guards, now: Standing) -> tuple[int, str] | None:
    """(depth, reason) that the guards impose whatever looks best, or None."""
    if now.least > 0:
        return None
    if now.share_done < guards.warmup_share and now.frozen_layers == 0:
        return 0, "warm-up: nothing is frozen yet"
    if now.held_open:
        return 0, "opened: the validation metric stalls below the target"
    return None


def is_worth_moving(guards: Guards, best_progress: float, present_progress: float) -> bool:
    """Whether the best E exceeds the present one by more than the hysteresis."""
    return best_progress > present_progress * (1.0 + guards.hysteresis)


def dwells(guards: Guards, now: Standing, depth: int) -> bool:
    """Whether a move to ``depth`` would come too soon after the last one."""
    moves = depth != now.frozen_layers and depth > now.least
    return moves and now.steps_since_move < guards.dwell_steps
