"""Decides the boundary, on all ranks together: rank 0 asks the freezing rule inside the bounds, all ranks obey."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch

from icefrog.errors import UserError
from icefrog.estimate.progress import signal_worth
from icefrog.estimate.tuner import max_frozen_layers
from icefrog.profile import LayerCost, Profile
from icefrog.runtime.agent import Agent
from icefrog.runtime.batching import Batching
from icefrog.runtime.decision import Decision
from icefrog.runtime.engine import Engine
from icefrog.runtime.goal import Goal
from icefrog.runtime.layer_rates import scaled_step
from icefrog.runtime.momentum import forget_momentum
from icefrog.runtime.protocol import Grant
from icefrog.runtime.reporting import Counters, Interval, Reporter
from icefrog.runtime.rules import FreezeOut, NoFreezing
from icefrog.runtime.rules.base import Bounds, CacheState, FreezingRule, Gradients, Hands, Proposal, Situation
from icefrog.runtime.trained import Foreign, last_trained
from icefrog.runtime.validations import Validations
from icefrog.types import Config

__all__ = ["Decider", "bounds_of"]

_NEVER = -(10**9)


def bounds_of(num_layers: int, max_fraction: float, grant: Grant | None) -> Bounds:
    """The user's fraction, narrowed by the grant."""
    most = max_frozen_layers(num_layers, max_fraction)
    if grant is None:
        return Bounds(0, most)
    most = min(most, max_frozen_layers(num_layers, grant.max_fraction))
    if grant.max_frozen_layers is not None:
        most = min(most, grant.max_frozen_layers)
    least = min(grant.min_frozen_layers, num_layers - 1)
    return Bounds(least, max(most, least))


@dataclass(frozen=True, slots=True)
class Pace:
    """Progress between two decisions, the same bits on every rank."""

    share_done: float
    samples: int
    share_per_sample: float

    def at(self, samples: int) -> float:
        """Share of P0 done after so many samples."""
        return self.share_done + (samples - self.samples) * self.share_per_sample


class Decider:
    """Owns the rule and what it is told.

    Args:
        rule: the user's.
        engine: what is measured and moved.
        agent: the scheduler's grant.
        reporter: told of each decision.
        goal: the validation metric that ends training, and P0.
        batching: decides the global batch, after the boundary.
        validations: the metrics so far.
        max_fraction: largest share of layers frozen.
    """

    def __init__(
        self,
        rule: FreezingRule,
        engine: Engine,
        agent: Agent,
        reporter: Reporter,
        goal: Goal,
        batching: Batching,
        validations: Validations,
        *,
        max_fraction: float,
    ) -> None:
        self.rule = rule
        self.active = rule
        """The rule in force: the grant may put another in the place of the user's."""
        self.engine = engine
        self.agent = agent
        self.world = engine.world
        self.reporter = reporter
        self.goal = goal
        self.batching = batching
        self.max_fraction = max_fraction
        self.validations = validations
        self.last_move_step = _NEVER
        self._granted = (NoFreezing(), FreezeOut())
        self._pace: Pace | None = None
        self._loss: float | torch.Tensor = 0.0
        self._losses = 0
        self._foreign = Foreign(engine.optimizer)
        self._told = False
        if rule.observes and engine.parallel.sharded:
            raise UserError(
                f"rule {rule.name!r} looks at whole gradients, and under {engine.parallel.name} a rank holds a part of them",
                "use data parallelism, or another rule",
            )

    # --- what it is told

    def see_metric(self, metric: float | None) -> float | None:
        """Collective. Take in a validation metric: the mean of those ranks that give one; None or NaN: nothing new.

        Returns:
            The mean, if it is finite.
        """
        mine = torch.tensor([math.nan if metric is None else float(metric)], dtype=torch.float64)
        given = [value for value in self.world.gather(mine).flatten().tolist() if not math.isnan(value)]
        if not given:
            return None
        # Equal ones: exactly that. One infinite among them makes no mean.
        infinite = any(math.isinf(value) for value in given)
        mean = given[0] if min(given) == max(given) else math.inf if infinite else math.fsum(given) / len(given)
        return mean if self.validations.see(mean) else None

    def note_loss(self, loss: float | torch.Tensor) -> None:
        """Take in the training loss of a step; it is not looked at (no synchronisation) before the next decision."""
        self._loss = self._loss + (loss.detach() if isinstance(loss, torch.Tensor) else loss)
        self._losses += 1

    def _mean_loss(self) -> float | None:
        """Collective. Mean over ranks and over the steps since the last call."""
        sums = self.world.sum(torch.tensor([float(self._loss), float(self._losses)], dtype=torch.float64))
        self._loss, self._losses = 0.0, 0
        return float(sums[0] / sums[1]) if sums[1] > 0 else None

    # --- steps

    def run_step(self, real_step: Callable[[], Any], at: Counters) -> Any:
        """The optimizer's step, as the rule in force wants it: observed, or with a learning rate for each layer."""
        rule, layers = self.active, self.engine.layers
        if self._watches:
            rule.observe(self._hands(at.step))
        if not rule.anneals or self._pace is None:
            result = real_step()
        else:
            result = scaled_step(real_step, layers, rule.lr_factors(self._pace.at(at.samples), len(layers)))
        if self._watches:
            rule.expect(self._hands(at.step + 1))
        return result

    @property
    def _watches(self) -> bool:
        return self.active.observes and self.world.rank == 0

    def _hands(self, step: int) -> Hands:
        engine = self.engine
        return Hands(step, engine.inner, engine.layers, engine.freezer.frozen_layers, engine.optimizer)

    # --- decisions

    def enter_bounds(self, at: Counters) -> None:
        """Collective. Obey the grant at once: a sharer must be frozen deep enough before its partner comes."""
        grant, engine = self.agent.grant, self.engine
        depth, shared, rule = engine.boundary, False, self._ruling()
        if grant is not None:
            depth, shared = self._bounds().clamp(depth), grant.shared
        worth = _by_signal(rule, depth) if depth != engine.boundary else None
        found = depth, shared, self._place_of(rule), worth
        depth, engine.shared, place, worth = self.world.from_rank0(found)
        self.active = self._rules()[place]
        self.move(depth, at, worth)

    def start(self, at: Counters) -> None:
        """Collective. Before the first step of this process: the bounds, and on a fresh run the rule's first word."""
        self.enter_bounds(at)
        if at.step == 0:
            self.move(self._ask(self._situation(at, None, None)).frozen_layers, at)
        if self._watches:
            self.active.expect(self._hands(at.step))

    def is_due(self, step: int, every_steps: int | None) -> bool:
        """Whether to decide after this step, in the middle of an epoch; the same on all ranks."""
        return step in self.active.first_looks or bool(every_steps and step % every_steps == 0)

    def decide(self, at: Counters, profile: Callable[[], Profile | None], *, between_epochs: bool = False) -> Decision:
        """Collective. Ask the rule, move the boundary, and report.

        Args:
            at: the job's place in its training; ``effective_samples`` become rank 0's.
            profile: as measured so far; rank 0's counts.
            between_epochs: the global batch may move, too.
        """
        engine, rank0 = self.engine, self.world.rank == 0
        if rank0:
            self.agent.refresh_grant()
        self.enter_bounds(at)
        now = self._situation(at, profile() if rank0 else None, self._mean_loss())
        proposal = self._ask(now)
        at.effective_samples = self.world.from_rank0(at.effective_samples)
        interval = Interval(
            now.step_s,
            now.measured_throughput,
            self.sample_worth,
            *engine.profiler.recent_occupancy(engine.point(), alone=not engine.shared),
        )
        if proposal.forget_momentum:
            forget_momentum(engine.optimizer, engine.layers[proposal.frozen_layers : engine.boundary])
        self.move(proposal.frozen_layers, at)
        engine.judge(proposal.worth)
        self.batching.weigh(at)
        if between_epochs and (why := self.batching.decide(now, proposal.frozen_layers, at)):
            proposal = replace(proposal, reason=f"{proposal.reason}; {why}")
        self._set_pace(at)
        at.outcome = self.goal.outcome(at)
        if self.reporter.listened_to:
            self.reporter.progress(
                at,
                interval,
                total=self.goal.total(at),
                frozen_layers=engine.freezer.frozen_layers,
                batch_per_gpu=engine.counting.samples_per_gpu,
                accum_steps=engine.counting.accum_steps,
                psi=engine.psi,
                stats=engine.tracker.stats(),
                signal=self.active.signal(),
                reason=proposal.reason,
                profile=profile(),
            )
        return Decision(
            frozen_layers=proposal.frozen_layers,
            psi=engine.psi,
            effective_progress=(proposal.effective_progress or 0.0) * self.batching.worth,
            reason=proposal.reason,
            effective_samples=at.effective_samples,
            metric=at.metric,
            done=at.outcome is not None,
        )

    def _ask(self, now: Situation) -> Proposal:
        """Collective. What the rule says on rank 0; a rule that anneals goes on in the same state on every rank."""
        rule, rank0 = self.active, self.world.rank == 0
        proposal: Proposal
        proposal, state = self.world.from_rank0(
            (_within(rule.propose(now), now), rule.state_dict() if rule.anneals else None) if rank0 else None
        )
        if state is not None and not rank0:
            rule.load_state_dict(state)
        return proposal

    def move(self, frozen_layers: int, at: Counters, worth: float | None = None) -> None:
        """Collective. Put a boundary in force, and remember when; ``worth``: psi there, None: by Eq. 3."""
        if self.engine.move(frozen_layers):
            if worth is not None:
                self.engine.judge(worth)
            self.last_move_step = at.step
            self._set_pace(at)

    @property
    def sample_worth(self) -> float:
        """What a sample adds to the job's progress: psi at the boundary in force, and EFF of the batch."""
        return self.engine.psi * self.batching.worth

    def _set_pace(self, at: Counters) -> None:
        """Collective."""
        total = self.goal.total(at)
        mine = Pace(at.effective_samples / total, at.samples, self.sample_worth / total) if total else None
        self._pace = self.world.from_rank0(mine)

    def _rules(self) -> Sequence[FreezingRule]:
        return (self.rule, *self._granted)

    def _place_of(self, rule: FreezingRule) -> int:
        return next(place for place, other in enumerate(self._rules()) if other is rule)

    def _ruling(self) -> FreezingRule:
        """The rule that the grant allows (rank 0's grant is the one that is renewed)."""
        grant = self.agent.grant
        nothing, freezeout = self._granted
        if grant is None or self.rule.name == "none":
            return self.rule
        if grant.rule == "none":
            return nothing
        return freezeout if grant.freezing == "freezeout" and self.rule.name != "freezeout" else self.rule

    def _bounds(self) -> Bounds:
        if self.engine.freezer.reentrant:
            return Bounds(0, 0)
        if isinstance(self.engine.optimizer, torch.optim.LBFGS):
            if self.rule.name != "none":
                self._tell("nothing will be frozen: LBFGS moves all parameters along one common direction")
            return Bounds(0, 0)
        layers = self.engine.layers
        found = bounds_of(len(layers), self.max_fraction, self.agent.grant)
        most = last_trained(layers, self.engine.optimizer)
        if (foreign := self._foreign.first(layers)) is not None:
            most = min(most, foreign)
            self._tell(f"{layers[foreign].name} is trained by another optimizer: no rule freezes it, or what follows")
        return Bounds(min(found.min_frozen, most), min(found.max_frozen, most))

    def _tell(self, message: str) -> None:
        """Why the bounds are narrower than the user's; once."""
        if not self._told and self.world.rank == 0:
            self._told = True
            warnings.warn(message, stacklevel=2)
            self.reporter.warned(message)

    def _gradients(self) -> Gradients | None:
        tracker = self.engine.tracker
        stats = tracker.stats()
        if stats is None:
            return None
        return Gradients(stats.variance, stats.sqr_norm, tracker.fresh, tuple(tracker.standard_error[0].tolist()))

    def _situation(self, at: Counters, profile: Profile | None, loss: float | None) -> Situation:
        engine, grant = self.engine, self.agent.grant
        step_s = engine.profiler.measured_step_s(engine.point()) or 0.0
        cache = engine.cache
        return Situation(
            step=at.step,
            samples=at.samples,
            epoch=at.epoch,
            effective_samples=at.effective_samples,
            share_done=self.goal.share_done(at),
            steps_since_move=at.step - self.last_move_step,
            config=Config(
                num_gpus=self.world.size,
                batch_per_gpu=engine.counting.samples_per_gpu,
                accum_steps=engine.counting.accum_steps,
                frozen_layers=engine.boundary,
                shared=grant.shared if grant else False,
            ),
            num_nodes=engine.nodes,
            bounds=self._bounds(),
            layers=tuple(
                LayerCost(name=layer.name, flops=flops, param_bytes=layer.param_bytes)
                for layer, flops in zip(engine.layers, engine.profiler.flops, strict=True)
            ),
            psi=engine.psi,
            step_s=step_s,
            forward_s=engine.profiler.forward_s(engine.point()) or 0.0,
            measured_throughput=engine.counting.nominal_batch / step_s if step_s > 0 else 0.0,
            gradients=self._gradients(),
            profile=profile,
            target=self.goal.target,
            metrics=tuple(self.validations.metrics),
            best_metric=self.validations.best,
            stalled=self.validations.stalled,
            mode=self.validations.mode,
            train_loss=loss,
            learning_rates=tuple(float(group["lr"]) for group in engine.optimizer.param_groups),
            cache=CacheState(cache.hits, cache.misses, cache.off_reason) if cache is not None else None,
            steps_s=engine.profiler.steps_by_depth(engine.point()),
            saving=engine.profiler.saving(engine.point()),
        )

    def close(self) -> None:
        """Training is over."""
        for rule in self._rules():
            rule.close()

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """JSON values, and what the rules keep."""
        return {
            **self.validations.state_dict(),
            "last_move_step": self.last_move_step,
            "worth": self.engine.worth,
            "pace": None if self._pace is None else list(astuple(self._pace)),
            "loss": [float(self._loss), self._losses],
            "rules": [[rule.name, rule.state_dict()] for rule in self._rules()],
        }

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """What rules keep besides, by name."""
        return {rule.name: kept for rule in self._rules() if (kept := rule.tensors())}

    def load_tensors(self, tensors: dict[str, dict[str, torch.Tensor]]) -> None:
        """Inverse of :meth:`tensors`."""
        for rule in self._rules():
            if rule.name in tensors:
                rule.load_tensors(tensors[rule.name])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`. A rule that the checkpoint does not know starts afresh."""
        self._foreign.restart()
        self.validations.load_state_dict(state)
        self.last_move_step = state["last_move_step"]
        self._loss, self._losses = state["loss"]
        self.engine.worth = state["worth"]
        self._pace = None if state["pace"] is None else Pace(*state["pace"])
        for rule, (name, kept) in zip(self._rules(), state["rules"], strict=True):
            if rule.name == name:
                rule.load_state_dict(kept)


def _by_signal(rule: FreezingRule, depth: int) -> float | None:
    """psi as the rule sees it, where it goes by the signal and knows."""
    signal = rule.signal()
    worth = math.nan if signal is None else float(signal_worth(signal)[depth])
    return worth if worth > 0.0 else None


def _within(proposal: Proposal, now: Situation) -> Proposal:
    """Staying is always possible (a boundary set by hand may lie outside the fraction); a move must be within the bounds."""
    depth = proposal.frozen_layers
    if now.saving is not None and now.saving.absent:
        proposal = replace(proposal, reason=f"{proposal.reason}; {now.frozen_layers} frozen: {now.saving}")
    if depth != now.frozen_layers and now.bounds.clamp(depth) != depth:
        proposal = replace(now.at(depth, proposal.reason), forget_momentum=proposal.forget_momentum)
    if proposal.effective_progress is not None:
        return proposal
    depth = proposal.frozen_layers
    worth, speed = now.worth(depth), now.throughput(depth)
    if depth == now.frozen_layers:
        worth = now.psi
    return replace(proposal, effective_progress=worth * speed if worth is not None and speed is not None else 0.0)
