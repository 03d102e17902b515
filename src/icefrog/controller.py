"""The controller: events in, commands out. No I/O, no clock, no engine: the same in a simulation and on a live cluster."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol

from icefrog import events as ev
from icefrog.changes import in_order, num_granted, place_changes
from icefrog.placement import keeps_to_types, num_nodes, place
from icefrog.policies.base import Policy
from icefrog.spec import ClusterSpec, JobSpec
from icefrog.state import GRANTED, ClusterState, JobState, Phase
from icefrog.types import Candidate, Config, GpuId, JobView, Plan, Pricing, Snapshot
from icefrog.values import value
from icefrog.verify import PolicyError, verify

__all__ = ["CandidateSource", "Controller", "ControllerConfig", "PolicyError", "Step", "verify"]

_CHANGES = frozenset({"job_submitted", "job_finished", "job_stopped", "job_crashed", "cancel_requested"})
"""Kinds of events with which a job arrives, or leaves its GPUs. (Kinds: a class that is not a record's is slow to tell.)"""


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """Settings that hold for every policy."""

    seed: int = 0
    restart_s: float = 60.0
    """What a change of allocation is expected to cost a job, until it was measured."""
    event_driven: bool = True
    """Decide when a job arrives, stops or finishes, too, and not only once a round."""
    max_crashes: int = 4
    """A job that died more often than this in a row, with no progress reported in between, is given up."""
    max_replans: int = 8
    """How often a plan that cannot be placed is taken back to the policy with an option forbidden."""


@value
class Step:
    """What one call of :meth:`Controller.handle` concluded. Both parts go to the log, facts first."""

    facts: list[ev.PlanDecided | ev.JobFailed] = field(default_factory=list)
    commands: list[ev.AnyCommand] = field(default_factory=list)


class CandidateSource(Protocol):
    """Where a job's options come from: ``icefrog.candidates.candidates``, or a test's own."""

    def __call__(self, view: JobView, cluster: ClusterSpec, now_s: float, pricing: Pricing) -> Sequence[Candidate]:
        """The job's options, priced as the policy wants them."""
        ...


class Options(Mapping[str, Sequence[Candidate]]):
    """The jobs' candidates, each priced when it is first asked for: who looks at ten of a thousand jobs pays for ten.

    Args:
        source: prices a job.
        snapshot: of the decision.
        pricing: as the policy wants it.
    """

    def __init__(self, source: CandidateSource, snapshot: Snapshot, pricing: Pricing) -> None:
        self._source = source
        self._snapshot = snapshot
        self._pricing = pricing
        self._priced: dict[str, Sequence[Candidate]] = {}

    def __getitem__(self, job_id: str) -> Sequence[Candidate]:
        found = self._priced.get(job_id)
        if found is None:
            view = self._snapshot.views.by_id[job_id]
            found = self._source(view, self._snapshot.cluster, self._snapshot.now_s, self._pricing)
            self._priced[job_id] = found
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._snapshot.views.by_id)

    def __len__(self) -> int:
        return len(self._snapshot.jobs)

    def forbid(self, job_id: str, option: Candidate) -> None:
        """Take back what is like ``option`` (same count, type and sharing): it finds no place."""
        lost = option.config
        same = (lost.num_gpus, lost.shared, lost.gpu_type)
        left = [c for c in self[job_id] if (c.config.num_gpus, c.config.shared, c.config.gpu_type) != same]
        self._priced[job_id] = tuple(left)


class Controller:
    """Folds events into the state and, when a decision is due, turns a policy's plan into commands.

    Everything it knows is in ``state``, which is a fold over the log: a controller built from a replayed log goes on where
    the old one stopped.
    """

    def __init__(
        self, state: ClusterState, policy: Policy, candidates: CandidateSource, config: ControllerConfig | None = None
    ) -> None:
        self.state = state
        self.policy = policy
        self.config = config or ControllerConfig()
        self._candidates = candidates
        self._pricing = policy.pricing
        self._most_gpus = max(part.num_gpus for part in state.cluster.parts.values())  # no job spans GPU types
        self._stands_until_s = -math.inf
        self._content = False
        self._until_report = False

    @property
    def round_needed_s(self) -> float:
        """The first time at which a round could decide anything new; -inf: now, inf: never, unless something happens."""
        return self._stands_until_s

    def round_needed_after(self, events: Sequence[ev.Event]) -> float:
        """The same, once ``events`` are handled."""
        for event in events:
            if self._voids(event) or self._is_news(event):
                return -math.inf
        return self._stands_until_s

    def _voids(self, event: ev.Event) -> bool:
        """Whether the plan has to be looked at anew: a job arrived, or left its GPUs and somebody might want them."""
        return event.kind in _CHANGES and not (self._content and event.kind == "job_finished")

    def _is_news(self, event: ev.Event) -> bool:
        """Whether the next round has to look at the plan anew: a job says anew what it costs, or how far it is and that
        matters."""
        if event.kind == "job_started":
            return event.profile is not None
        return event.kind == "progress_reported" and (self._until_report or event.profile is not None)

    def handle(self, events: Sequence[ev.Event]) -> Step:
        """Apply ``events`` (in order of time), then decide if one of them calls for it."""
        step = Step()
        due = False
        for event in events:
            self.state.apply(event)
            if event.kind in ("tick", "node_down", "node_up"):
                due = True
            elif self._voids(event):
                self._stands_until_s = -math.inf
                due = due or self.config.event_driven
            elif self._is_news(event):
                self._stands_until_s = -math.inf  # in the next round
        for event in events:
            self._consequence(event, step)
        if due:
            self._decide(step)
        return step

    def recover(self) -> Step:
        """What still has to follow from a replayed log, whose last events may have been written but not acted upon."""
        step = Step()
        for job in list(self.state.active.values()):
            self._settle(job, step)
        return step

    # -- consequences that no policy decides ------------------------------------------------------------------------------

    def _consequence(self, event: ev.Event, step: Step) -> None:
        job_id: str | None = getattr(event, "job_id", None)
        if job_id is not None:
            self._settle(self.state.jobs[job_id], step)

    def _settle(self, job: JobState, step: Step) -> None:
        """What the job's state alone calls for; nothing if that was done already."""
        if job.finished:
            return
        now_s = self.state.now_s
        if job.cancel_requested:
            if job.phase is not Phase.STOPPING:
                self._command(ev.Stop(time_s=now_s, job_id=job.job_id, attempt=job.attempt, reason="cancelled"), step)
        elif job.phase is not Phase.PENDING:
            return
        elif problem := self.refusal(job.spec):
            self._record_failure(job, problem, now_s, step)
        elif job.crash_streak > self.config.max_crashes:
            last = job.reason.removeprefix(f"attempt {job.attempt} died: ")
            self._record_failure(job, f"died {job.crash_streak} times in a row; the last: {last}", now_s, step)

    def refusal(self, spec: JobSpec) -> str | None:
        """Why the job can never run on this cluster, or None (fault S6)."""
        smallest = min(spec.gpus)
        if smallest <= self._most_gpus:
            return None
        of_one_type = " of one type" if len(self.state.cluster.parts) > 1 else ""
        return f"needs at least {smallest} GPUs, the cluster has {self._most_gpus}{of_one_type}"

    def _record_failure(self, job: JobState, reason: str, now_s: float, step: Step) -> None:
        fact = ev.JobFailed(time_s=now_s, job_id=job.job_id, reason=reason)
        self.state.apply(fact)
        step.facts.append(fact)

    def _command(self, command: ev.AnyCommand, step: Step) -> None:
        self.state.apply(command)
        step.commands.append(command)

    # -- the decision: snapshot, candidates, plan, placement, diff ----------------------------------------------------------

    def _decide(self, step: Step) -> None:
        # 1. What there is.
        snapshot = self.state.snapshot(
            policy=self.policy.name,
            seed=self.config.seed,
            default_restart_s=self.config.restart_s,
            oracle=self.policy.oracle,
        )
        options = Options(self._candidates, snapshot, self._pricing)
        # 2. The policy's plan, and where it goes.
        plan, allocation = self._placeable_plan(snapshot, options)
        self._stands_until_s = plan.stands_until_s
        self._until_report = plan.until_report
        self._content = plan.content and not self._pricing.shares
        # 3. Its reasons, as a fact; its difference to what runs, as commands.
        step.facts.append(self._decided(plan, allocation, snapshot))
        self.state.apply(step.facts[-1])
        for command in self._diff(plan, allocation, snapshot):
            self._command(command, step)

    def _placeable_plan(self, snapshot: Snapshot, options: Options) -> tuple[Plan, Mapping[str, tuple[GpuId, ...]]]:
        """Placement is part of feasibility: an option that finds no place is forbidden and the policy asked again."""
        if not snapshot.num_gpus:
            reasons = {job.job_id: "every node is out of service" for job in snapshot.jobs}
            return Plan({}, reasons=reasons, memory=snapshot.memory, stands_until_s=math.inf), {}
        plan, placement = Plan(choices={}), None
        for _ in range(self.config.max_replans):
            plan = self.policy.decide(snapshot, options)
            if plan.gpus is not None and not plan.keeps and not keeps_to_types(snapshot, plan):
                plan = replace(plan, gpus=None)
            verify(plan, snapshot, options)
            if plan.gpus is not None:
                return plan, plan.gpus
            placement = place_changes(snapshot, plan) if plan.keeps else place(snapshot, plan)
            if not placement.unplaced:
                return plan, placement.allocation
            # The placement packs large units first, so the last one unplaced is the smallest: the least is lost.
            job_id = placement.unplaced[-1]
            options.forbid(job_id, plan.choices[job_id])
        assert placement is not None
        unplaced = set(placement.unplaced)
        kept = {job_id: choice for job_id, choice in plan.choices.items() if job_id not in unplaced}
        reasons = {**plan.reasons, **dict.fromkeys(unplaced, "the GPUs left over do not lie together")}
        pairs = tuple(pair for pair in plan.pairs if not unplaced.intersection(pair))
        # Where a plan keeps whom it does not name, one that ran must leave: its GPUs may be somebody else's now.
        leaving = frozenset(job_id for job_id in unplaced if plan.keeps and snapshot.views.by_id[job_id].running)
        plan = replace(plan, choices=kept, pairs=pairs, reasons=reasons, preempted=plan.preempted | leaving)
        return plan, placement.allocation

    def _decided(self, plan: Plan, allocation: Mapping[str, tuple[GpuId, ...]], snapshot: Snapshot) -> ev.PlanDecided:
        state, active = self.state, self.state.active
        reasons = {j: r for j, r in plan.reasons.items() if j in active and active[j].reason != r}
        common = plan.waiting_reason or None
        if common is not None:
            unsaid: Iterable[str] = state.unsaid if common == state.waiting_reason else snapshot.views.by_id
            for job_id in unsaid:
                if job_id not in plan.choices and job_id not in plan.reasons and _is_told(active[job_id], common):
                    reasons[job_id] = common
        if len(reasons) > 1:  # a policy may have gathered them in a set, whose order is not the same in every process
            reasons = {job_id: reasons[job_id] for job_id in sorted(reasons, key=lambda job_id: active[job_id].place)}
        if plan.keeps:
            gpus_granted, num_running = num_granted(snapshot, plan, allocation)
        else:
            gpus_granted, num_running = len({g for gpus in allocation.values() for g in gpus}), len(plan.choices)
        return ev.PlanDecided(
            time_s=state.now_s,
            policy=self.policy.name,
            gpus_granted=gpus_granted,
            waiting=len(active) - num_running,
            reasons=reasons,
            waiting_reason=common if common != state.waiting_reason else None,
            memory=plan.memory if plan.memory != state.memory.get(self.policy.name) else None,
        )

    def _diff(self, plan: Plan, allocation: Mapping[str, tuple[GpuId, ...]], snapshot: Snapshot) -> list[ev.AnyCommand]:
        """Commands from what is granted to what is planned: preemptions first, so that GPUs come free before they go."""
        now_s = self.state.now_s
        frees: list[ev.AnyCommand] = []
        takes: list[ev.AnyCommand] = []
        if plan.keeps and not plan.choices and not plan.preempted:
            return []
        named = in_order(snapshot, (*plan.choices, *plan.preempted)) if plan.keeps else self.state.active
        for job_id in named:
            job = self.state.active[job_id]
            choice = plan.choices.get(job_id)
            reason = plan.reasons.get(job_id, plan.waiting_reason)
            if choice is None:
                if job.phase in GRANTED and not job.cancel_requested:
                    frees.append(ev.Preempt(time_s=now_s, job_id=job_id, attempt=job.attempt, reason=reason))
                continue
            command = self._change(job, choice, allocation[job_id], reason)
            if command is not None:
                takes.append(command)
        # Grants are checked for double use after every record, so whoever gives GPUs up must come first.
        return frees + _free_before_take(takes, self.state.active)

    def _change(
        self, job: JobState, choice: Candidate, gpus: tuple[GpuId, ...], reason: str
    ) -> ev.Start | ev.Resize | ev.Regrant | None:
        """What takes a job from what it has to what is planned for it."""
        if job.phase is not Phase.PENDING and job.phase not in GRANTED:
            return None  # still leaving its GPUs: it gets its new ones when it has
        grant = _grant(choice.config, num_nodes(gpus), self._pricing)
        now_s, job_id, attempt = self.state.now_s, job.job_id, job.attempt
        if job.phase is Phase.PENDING:
            return ev.Start(time_s=now_s, job_id=job_id, attempt=attempt + 1, reason=reason, gpus=gpus, grant=grant)
        if gpus != job.gpus or _needs_restart(grant, job.grant):
            return ev.Resize(time_s=now_s, job_id=job_id, attempt=attempt + 1, reason=reason, gpus=gpus, grant=grant)
        if job.grant is not None and _bounds(grant) != _bounds(job.grant):
            return ev.Regrant(time_s=now_s, job_id=job_id, attempt=attempt, reason=reason, grant=grant)
        return None


@lru_cache(maxsize=4096)
def _grant(config: Config, num_nodes: int, pricing: Pricing) -> ev.Grant:
    """What a job is granted with a configuration; one for all jobs that are granted the same."""
    freezing = pricing.freezing
    return ev.Grant(
        num_gpus=config.num_gpus,
        num_nodes=num_nodes,
        batch_per_gpu=config.batch_per_gpu,
        accum_steps=config.accum_steps,
        min_frozen_layers=config.frozen_layers if config.shared and freezing != "none" else 0,
        max_frozen_layers=None if freezing != "none" else 0,
        freezing=freezing,
        elastic_batch=pricing.batch == "elastic",
        shared=config.shared,
        gpu_type=config.gpu_type,
        reports=pricing.reads_progress,
    )


def _is_told(job: JobState, common: str) -> bool:
    """Whether a waiting job's reason has to become the common one."""
    return job.reason != common and not job.cancel_requested and (job.phase not in GRANTED)


def _needs_restart(new: ev.Grant, old: ev.Grant | None) -> bool:
    """A sharer fits beside its partner with the batch that was priced, and a running attempt cannot change its batch."""
    return (
        old is not None and new.shared and (new.batch_per_gpu, new.accum_steps) != (old.batch_per_gpu, old.accum_steps)
    )


def _bounds(grant: ev.Grant) -> tuple[bool, int, int | None]:
    """The part of a grant that a change of is worth telling a running job; inside it, it tunes itself."""
    return grant.shared, grant.min_frozen_layers, grant.max_frozen_layers


def _free_before_take(commands: list[ev.AnyCommand], active: Mapping[str, JobState]) -> list[ev.AnyCommand]:
    """Shrinking grants before growing ones. Records are applied as one batch, so only the order in the log matters."""
    if len(commands) < 2:
        return commands
    return sorted(commands, key=lambda c: len(c.gpus) - len(active[c.job_id].gpus) if isinstance(c, ev.Resize) else 0)
