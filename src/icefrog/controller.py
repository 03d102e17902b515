"""The controller: events in, commands out. No I/O, no clock, no engine: the same in a simulation and on a live cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from icefrog import events as ev
from icefrog.gpu_types import ANY_GPU
from icefrog.placement import num_nodes, place
from icefrog.policies.base import Policy
from icefrog.spec import ClusterSpec, JobSpec
from icefrog.state import GRANTED, ClusterState, JobState, Phase
from icefrog.types import Candidate, Candidates, GpuId, JobView, Plan, Pricing, Snapshot


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


@dataclass(frozen=True, slots=True)
class Step:
    """What one call of :meth:`Controller.handle` concluded. Both parts go to the log, facts first."""

    facts: list[ev.PlanDecided | ev.JobFailed] = field(default_factory=list)
    commands: list[ev.AnyCommand] = field(default_factory=list)


class PolicyError(Exception):
    """A policy returned a plan that breaks the contract; acting on it could oversubscribe GPUs."""


class CandidateSource(Protocol):
    """Where a job's options come from: ``icefrog.candidates.candidates``, or a test's own."""

    def __call__(self, view: JobView, cluster: ClusterSpec, now_s: float, pricing: Pricing) -> tuple[Candidate, ...]:
        """The job's options, priced as the policy wants them."""
        ...


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

    def handle(self, events: Sequence[ev.Event]) -> Step:
        """Apply ``events`` (in order of time), then decide if one of them calls for it."""
        step = Step()
        due = False
        for event in events:
            self.state.apply(event)
            due = due or self._calls_for_decision(event)
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

    def _calls_for_decision(self, event: ev.Event) -> bool:
        if isinstance(event, ev.Tick | ev.NodeDown | ev.NodeUp):
            return True
        changes = ev.JobSubmitted | ev.JobFinished | ev.JobStopped | ev.JobCrashed | ev.CancelRequested
        return self.config.event_driven and isinstance(event, changes)

    def _consequence(self, event: ev.Event, step: Step) -> None:
        if isinstance(event, ev.Tick | ev.PlanDecided | ev.NodeDown | ev.NodeUp):
            return
        self._settle(self.state.jobs[event.job_id], step)

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
        total = self.state.cluster.num_gpus
        smallest = min(spec.gpus)
        if smallest > total:
            return f"needs at least {smallest} GPUs, the cluster has {total}"
        return None

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
        options = {
            job.job_id: self._candidates(job, snapshot.cluster, snapshot.now_s, self.policy.pricing)
            for job in snapshot.jobs
        }
        # 2. The policy's plan, and where it goes.
        plan, allocation = self._placeable_plan(snapshot, options)
        # 3. Its reasons, as a fact; its difference to what runs, as commands.
        step.facts.append(self._decided(plan, allocation))
        self.state.apply(step.facts[-1])
        for command in self._diff(plan, allocation):
            self._command(command, step)

    def _placeable_plan(
        self, snapshot: Snapshot, options: dict[str, tuple[Candidate, ...]]
    ) -> tuple[Plan, dict[str, tuple[GpuId, ...]]]:
        """Placement is part of feasibility: an option that finds no place is forbidden and the policy asked again."""
        if not snapshot.num_gpus:
            reasons = {job.job_id: "every node is out of service" for job in snapshot.jobs}
            return Plan({}, reasons=reasons, memory=snapshot.memory), {}
        plan, placement = Plan(choices={}), None
        for _ in range(self.config.max_replans):
            plan = self.policy.decide(snapshot, options)
            verify(plan, snapshot, options)
            if plan.gpus is not None:
                return plan, dict(plan.gpus)
            placement = place(snapshot, plan)
            if not placement.unplaced:
                return plan, placement.allocation
            # The placement packs large units first, so the last one unplaced is the smallest: the least is lost.
            job_id = placement.unplaced[-1]
            lost = plan.choices[job_id].config
            forbidden = (lost.num_gpus, lost.shared, lost.gpu_type)
            options[job_id] = tuple(
                c for c in options[job_id] if (c.config.num_gpus, c.config.shared, c.config.gpu_type) != forbidden
            )
        assert placement is not None
        unplaced = set(placement.unplaced)
        kept = {job_id: choice for job_id, choice in plan.choices.items() if job_id not in unplaced}
        reasons = {**plan.reasons, **dict.fromkeys(unplaced, "the GPUs left over do not lie together")}
        pairs = tuple(pair for pair in plan.pairs if not unplaced.intersection(pair))
        return replace(plan, choices=kept, pairs=pairs, reasons=reasons), placement.allocation

    def _decided(self, plan: Plan, allocation: Mapping[str, tuple[GpuId, ...]]) -> ev.PlanDecided:
        active = self.state.active
        return ev.PlanDecided(
            time_s=self.state.now_s,
            policy=self.policy.name,
            gpus_granted=len({gpu for gpus in allocation.values() for gpu in gpus}),
            waiting=len(active) - len(plan.choices),
            reasons={j: r for j, r in plan.reasons.items() if j in active and active[j].reason != r},
            memory=plan.memory if plan.memory != self.state.memory.get(self.policy.name) else None,
        )

    def _diff(self, plan: Plan, allocation: Mapping[str, tuple[GpuId, ...]]) -> list[ev.AnyCommand]:
        """Commands from what is granted to what is planned: preemptions first, so that GPUs come free before they go."""
        now_s = self.state.now_s
        frees: list[ev.AnyCommand] = []
        takes: list[ev.AnyCommand] = []
        for job_id, job in self.state.active.items():
            choice = plan.choices.get(job_id)
            reason = plan.reasons.get(job_id, "")
            if choice is None:
                if job.phase in GRANTED and not job.cancel_requested:
                    frees.append(ev.Preempt(time_s=now_s, job_id=job_id, attempt=job.attempt, reason=reason))
                continue
            gpus = allocation[job_id]
            grant = self._grant(job, choice, gpus)
            start = {"time_s": now_s, "job_id": job_id, "reason": reason}
            if job.phase is Phase.PENDING:
                takes.append(ev.Start(**start, attempt=job.attempt + 1, gpus=gpus, grant=grant))
            elif job.phase not in GRANTED:
                continue  # still leaving its GPUs: it gets its new ones when it has
            elif gpus != job.gpus or _needs_restart(grant, job.grant):
                takes.append(ev.Resize(**start, attempt=job.attempt + 1, gpus=gpus, grant=grant))
            elif job.grant is not None and _bounds(grant) != _bounds(job.grant):
                takes.append(ev.Regrant(**start, attempt=job.attempt, grant=grant))
        # Grants are checked for double use after every record, so whoever gives GPUs up must come first.
        return frees + _free_before_take(takes, self.state.active)

    def _grant(self, job: JobState, choice: Candidate, gpus: Sequence[GpuId]) -> ev.Grant:
        config = choice.config
        freezing = self.policy.pricing.freezing
        return ev.Grant(
            num_gpus=config.num_gpus,
            num_nodes=num_nodes(gpus),
            batch_per_gpu=config.batch_per_gpu,
            accum_steps=config.accum_steps,
            min_frozen_layers=config.frozen_layers if config.shared and freezing != "none" else 0,
            max_frozen_layers=None if freezing != "none" else 0,
            freezing=freezing,
            elastic_batch=self.policy.pricing.batch == "elastic",
            shared=config.shared,
            gpu_type=config.gpu_type,
        )


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
    return sorted(commands, key=lambda c: len(c.gpus) - len(active[c.job_id].gpus) if isinstance(c, ev.Resize) else 0)


def verify(plan: Plan, snapshot: Snapshot, options: Candidates) -> None:
    """Check a plan against the constraints before it is acted on (fault S12). Raises :class:`PolicyError`.

    Every choice is one of the job's candidates; pairs are sharers of one GPU, both in exactly one pair; every unfinished job
    has a reason; the GPUs used do not exceed the cluster's.
    """
    jobs = {job.job_id for job in snapshot.jobs}
    paired = [job_id for pair in plan.pairs for job_id in pair]
    for job_id, choice in plan.choices.items():
        if job_id not in jobs:
            raise PolicyError(f"the plan names job {job_id}, which is not in the snapshot")
        if choice not in options.get(job_id, ()):
            raise PolicyError(f"the plan gives {job_id} a configuration that it did not offer: {choice.config}")
        if choice.config.shared != (paired.count(job_id) == 1):
            raise PolicyError(f"{job_id}: a shared configuration needs exactly one partner, an exclusive one none")
    if set(paired) - set(plan.choices):
        raise PolicyError(f"paired but not chosen: {sorted(set(paired) - set(plan.choices))}")
    if missing := jobs - set(plan.reasons):
        raise PolicyError(f"no reason given for {sorted(missing)[:5]}")
    used = sum(c.config.num_gpus for c in plan.choices.values() if not c.config.shared) + len(plan.pairs)
    if used > snapshot.num_gpus:
        raise PolicyError(f"the plan uses {used} GPUs of {snapshot.num_gpus}")
    _verify_types(plan, snapshot)
    if plan.gpus is not None:
        _verify_map(plan, snapshot, plan.gpus)


def _verify_types(plan: Plan, snapshot: Snapshot) -> None:
    """A plan that names GPU types uses no more of each than there are; a pair is on one type."""
    used: Counter[str] = Counter()
    mates = {second: first for first, second in plan.pairs}
    for job_id, choice in plan.choices.items():
        if job_id not in mates:
            used[choice.config.gpu_type] += choice.config.num_gpus
        elif choice.config.gpu_type != plan.choices[mates[job_id]].config.gpu_type:
            raise PolicyError(f"{job_id} and {mates[job_id]} share a GPU, yet name different types")
    if set(used) - {ANY_GPU}:
        there = snapshot.gpus_by_type
        for gpu_type, count in used.items():
            if gpu_type != ANY_GPU and count > there.get(gpu_type, 0):
                raise PolicyError(f"the plan uses {count} GPUs of type {gpu_type}, there are {there.get(gpu_type, 0)}")


def _verify_map(plan: Plan, snapshot: Snapshot, gpus_of: Mapping[str, tuple[GpuId, ...]]) -> None:
    """A policy that names GPUs names as many as it chose, in service, each for one job or one pair."""
    sizes = snapshot.node_gpus
    owners: dict[GpuId, str] = {}
    unit = {b: a for a, b in plan.pairs}
    if set(gpus_of) != set(plan.choices):
        raise PolicyError(f"GPUs are named for other jobs than chosen: {sorted(set(gpus_of) ^ set(plan.choices))[:5]}")
    for job_id, gpus in gpus_of.items():
        if len(gpus) != plan.choices[job_id].config.num_gpus or len(set(gpus)) != len(gpus):
            raise PolicyError(f"{job_id}: {plan.choices[job_id].config.num_gpus} GPUs chosen, {gpus} named")
        for gpu in gpus:
            if not (0 <= gpu.node < len(sizes) and 0 <= gpu.device < sizes[gpu.node]):
                raise PolicyError(f"{job_id}: {gpu} is not in service")
            if plan.choices[job_id].config.gpu_type not in (ANY_GPU, snapshot.cluster.node_types[gpu.node]):
                raise PolicyError(f"{job_id}: {gpu} is not of the type chosen")
            if owners.setdefault(gpu, unit.get(job_id, job_id)) != unit.get(job_id, job_id):
                raise PolicyError(f"{gpu} is named for {owners[gpu]} and {job_id}")
