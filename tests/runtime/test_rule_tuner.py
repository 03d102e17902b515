"""The paper's rule: the argmax opens layers again, and its guards."""

from __future__ import annotations

from dataclasses import replace

from icefrog.estimate.penalty import GradientTracker
from icefrog.runtime.rules import Guards, Tuner
from icefrog.runtime.rules.base import Situation
from icefrog.spec import Target
from icefrog.testing.rules import situation

PAPER = Guards(0, 0, 0, 0)


def seen_by(tracker: GradientTracker, depth: int, **changes: object) -> Situation:
    stats = tracker.stats()
    return situation(stats.variance if stats else None, depth, share_done=1.0, **changes)  # type: ignore[arg-type]


def test_layers_unfreeze_when_the_suffix_variance_falls() -> None:
    """Recorded statistics: the stored prefix term stays while the suffix falls, so psi falls and layers are opened."""
    tracker, rule, depth, depths = GradientTracker(4), Tuner(PAPER), 0, []
    recorded = [[5, 5, 45, 45]] * 60 + [[5, 5, 45 * 0.9**i, 45 * 0.9**i] for i in range(120)]
    for variance in recorded:
        tracker.observe(variance, [1.0] * 4)
        proposal = rule.propose(seen_by(tracker, depth))
        if proposal.frozen_layers != depth:
            depth = proposal.frozen_layers
            tracker.set_boundary(depth)
        depths.append(depth)
    assert depths[:19] == [0] * 19  # not ready
    assert depths[30] == 2  # psi = .9, T = 3 / 2
    assert depths[-1] == 0
    assert sorted(set(depths), reverse=True)[0] == 2


def test_effective_progress_is_psi_times_the_speed_of_that_depth() -> None:
    proposal = Tuner(PAPER).propose(situation([5, 5, 45, 45]))
    assert proposal.frozen_layers == 2
    # 16 samples in 16 ms forward and half of 32 ms backward, of which a sample is worth 90 / 100.
    assert proposal.effective_progress is not None
    assert abs(proposal.effective_progress - 0.9 * 16 / 0.032) < 1e-6


def test_guards() -> None:
    now = situation([5, 5, 45, 45], share_done=1.0, target=Target(value=0.9))
    rule = Tuner(Guards(warmup_share=0.1, dwell_steps=20, stall_patience=2))
    assert rule.propose(replace(now, share_done=0.05)).reason.startswith("warm-up")
    assert rule.propose(now).frozen_layers == 2
    assert rule.propose(replace(now, steps_since_move=10)).reason.startswith("dwells")
    assert rule.propose(replace(now, steps_since_move=20)).frozen_layers == 2
    frozen = replace(now, config=replace(now.config, frozen_layers=2))
    stalled = rule.propose(replace(frozen, stalled=2))
    assert stalled.frozen_layers == 0
    assert "stalls" in stalled.reason
    assert rule.propose(replace(now, stalled=3)).frozen_layers == 0  # held open
    assert rule.propose(replace(now, stalled=0)).frozen_layers == 2  # there is a new best


def test_the_stall_guard_needs_a_target() -> None:
    frozen = situation([5, 5, 45, 45], 2, stalled=10)
    assert Tuner(Guards(stall_patience=2)).propose(frozen).frozen_layers == 2
