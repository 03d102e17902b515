"""The contract that every freezing rule must pass, and a builder of situations. Needs pytest and hypothesis.

A new rule is a few lines in a test file::

    @pytest.mark.parametrize("make", [lambda: MyRule(), lambda: MyRule(eagerness=2)], ids=["mine", "eager"])
    class TestContract(RuleContract):
        pass

``make`` returns a fresh instance at every call. A rule that observes steps overrides :meth:`RuleContract.observe`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from icefrog.profile import ComputeCurve, LayerCost, OccupancyParams, Profile, ThroughputParams
from icefrog.runtime.rules.base import Bounds, CacheState, FreezingRule, Gradients, Proposal, Situation
from icefrog.spec import Target
from icefrog.types import Config

Make = Callable[[], FreezingRule]

CONTRACT = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)


def measured_profile(num_layers: int = 4, *, fwd_s: float = 1e-3, bwd_s: float = 2e-3) -> Profile:
    """Equal layers, a backward pass of ``bwd_s`` seconds a sample that shrinks with the layers frozen."""
    return Profile(
        name="p",
        layers=tuple(LayerCost(name=str(i), flops=1.0, param_bytes=1.0) for i in range(num_layers)),
        throughput=ThroughputParams(
            fwd=ComputeCurve(alpha_s=0, beta_s=fwd_s), bwd=ComputeCurve(alpha_s=0, beta_s=bwd_s)
        ),
        occupancy=OccupancyParams(mem_bytes=(1.0, 0, 0, 0), util_pct=(1.0, 0, 0, 0)),
        samples_per_epoch=64,
        max_local_batch=16,
        provenance="test",
    )


def situation(
    variance: Sequence[float] | None = (5.0, 5.0, 45.0, 45.0),
    frozen_layers: int = 0,
    *,
    bounds: Bounds | None = None,
    step: int = 10_000,
    share_done: float = 0.5,
    **changes: Any,
) -> Situation:
    """A job of as many equal layers as there are variances (4 for None: nothing measured yet), in the middle of training."""
    num_layers = len(variance) if variance is not None else 4
    profile = measured_profile(num_layers)
    now = Situation(
        step=step,
        samples=16 * step,
        epoch=step // 4,
        effective_samples=share_done * 1000.0,
        share_done=share_done,
        steps_since_move=10**6,
        config=Config(1, 16, frozen_layers=frozen_layers),
        num_nodes=1,
        bounds=bounds if bounds is not None else Bounds(0, num_layers - 1),
        layers=profile.layers,
        psi=1.0,
        step_s=0.048,
        forward_s=0.016,
        measured_throughput=16 / 0.048,
        gradients=None
        if variance is None
        else Gradients(
            tuple(variance), (1.0,) * num_layers, tuple(index >= frozen_layers for index in range(num_layers))
        ),
        profile=None if variance is None else profile,
        learning_rates=(0.1,),
    )
    return replace(now, **changes)


# --- a job's life, drawn at random -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Life:
    """What a job goes through, one entry a decision; the boundary is what the rule makes of it."""

    now: tuple[Situation, ...]
    stop_after: int
    """The decision after which the job is stopped and resumed."""


@st.composite
def lives(draw: st.DrawFn) -> Life:
    """Jobs of 1 to 6 layers over up to 8 decisions: statistics that come and go, metrics, targets, bounds that move."""
    num_layers = draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    target = draw(st.sampled_from([None, Target(value=0.9), Target(value=0.1, mode="min")]))
    known_total = draw(st.booleans())
    profile = measured_profile(num_layers)
    metrics: list[float] = []
    found = []
    for place in range(draw(st.integers(2, 8))):
        ready = place > 0 and rng.random() < 0.9
        low = int(rng.integers(0, num_layers)) if rng.random() < 0.2 else 0
        high = int(rng.integers(low, num_layers))
        if rng.random() < 0.7:
            metrics.append(float(rng.random()))
        best = (min if target is not None and target.mode == "min" else max)(metrics, default=None)
        scale = 10.0 ** float(rng.integers(-12, 12))
        variance = rng.random(num_layers) * scale * (rng.random(num_layers) > 0.1)
        found.append(
            Situation(
                step=20 * place,
                samples=320 * place,
                epoch=place,
                effective_samples=320.0 * place,
                share_done=place / 7 if known_total else 0.0,
                steps_since_move=20 * place,
                config=Config(1, 16),
                num_nodes=1,
                bounds=Bounds(low, high),
                layers=profile.layers,
                psi=1.0,
                step_s=0.05 if ready else 0.0,
                forward_s=0.02 if ready else 0.0,
                measured_throughput=320.0 if ready else 0.0,
                gradients=Gradients(
                    tuple(variance.tolist()), tuple(rng.random(num_layers).tolist()), (True,) * num_layers
                )
                if ready
                else None,
                profile=profile if ready else None,
                target=target,
                metrics=tuple(metrics),
                best_metric=best,
                stalled=0 if best is None else len(metrics) - 1 - metrics.index(best),
                train_loss=float(rng.random()) if rng.random() < 0.5 else None,
                learning_rates=(0.1 * 0.1 ** (place // 4),),
                cache=CacheState(place, place, None) if rng.random() < 0.3 else None,
            )
        )
    return Life(tuple(found), draw(st.integers(0, len(found) - 1)))


class RuleContract:
    """Subclass it, parametrised over ``make``."""

    def observe(self, rule: FreezingRule, now: Situation) -> None:
        """Show an observing rule the steps before the decision ``now``; the same ones for the same situation."""

    def live(self, make: Make, life: Life, *, resumes: bool = False) -> list[Proposal]:
        """Every proposal of a rule in that life; ``resumes``: with a stop and a fresh instance on the way."""
        rule, depth, proposals = make(), 0, []
        for place, drawn in enumerate(life.now):
            depth = drawn.bounds.clamp(depth)  # what the runtime does before it asks
            now = replace(drawn, config=replace(drawn.config, frozen_layers=depth))
            self.observe(rule, now)
            proposals.append(rule.propose(now))
            depth = proposals[-1].frozen_layers
            if resumes and place == life.stop_after:
                state = copy.deepcopy(rule.state_dict())
                rule = make()
                rule.load_state_dict(state)
        return proposals

    @CONTRACT
    @given(life=lives())
    def test_proposals_are_within_the_bounds_and_one_layer_trains(self, make: Make, life: Life) -> None:
        """``min <= l <= max <= L - 1``."""
        for now, proposal in zip(life.now, self.live(make, life), strict=True):
            assert isinstance(proposal.frozen_layers, int)
            assert now.bounds.clamp(proposal.frozen_layers) == proposal.frozen_layers
            assert proposal.frozen_layers < now.num_layers

    @CONTRACT
    @given(life=lives())
    def test_every_proposal_has_a_reason(self, make: Make, life: Life) -> None:
        """One line, and an E that is a number where it is given."""
        for proposal in self.live(make, life):
            assert proposal.reason.strip()
            assert "\n" not in proposal.reason
            progress = proposal.effective_progress
            assert progress is None or (math.isfinite(progress) and progress >= 0)

    @CONTRACT
    @given(life=lives())
    def test_the_same_life_gives_the_same_proposals(self, make: Make, life: Life) -> None:
        """Determinism; no state outside of the instance."""
        assert self.live(make, life) == self.live(make, life)

    @CONTRACT
    @given(life=lives())
    def test_stopping_and_resuming_changes_nothing(self, make: Make, life: Life) -> None:
        """What matters of a rule's memory is in its state."""
        assert self.live(make, life, resumes=True) == self.live(make, life)

    @CONTRACT
    @given(life=lives())
    def test_a_situation_is_not_kept_or_changed(self, make: Make, life: Life) -> None:
        """A rule that is asked twice about one moment, as after a resize, does not fall over."""
        rule = make()
        for now in life.now:
            self.observe(rule, now)
            first, second = rule.propose(now), rule.propose(now)
            assert now.bounds.clamp(second.frozen_layers) == second.frozen_layers
            assert first.reason
            assert second.reason

    @CONTRACT
    @given(life=lives(), share=st.floats(0.0, 1.5))
    def test_learning_rate_factors_are_one_a_layer_and_not_negative(self, make: Make, life: Life, share: float) -> None:
        """And the same from a restored state: other ranks compute them from rank 0's."""
        rule, other = make(), make()
        for now in life.now:
            self.observe(rule, now)
            rule.propose(now)
        other.load_state_dict(copy.deepcopy(rule.state_dict()))
        num_layers = life.now[-1].num_layers
        factors = list(rule.lr_factors(share, num_layers))
        assert len(factors) == num_layers
        assert all(math.isfinite(factor) and factor >= 0 for factor in factors)
        assert factors == list(other.lr_factors(share, num_layers))

    def test_it_has_a_name(self, make: Make) -> None:
        """For reports and checkpoints."""
        assert make().name
