"""The contract that every policy must pass. Needs pytest and hypothesis.

A new policy is one line in a test file::

    @pytest.mark.parametrize("make", [lambda: make_policy("las")], ids=["las"])
    class TestContract(PolicyContract):
        pass

``make`` returns a fresh instance at every call.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from icefrog.candidates import candidates
from icefrog.changes import place_changes
from icefrog.controller import verify
from icefrog.placement import place
from icefrog.policies.base import Policy
from icefrog.profile import ComputeCurve, GpuCost, Profile
from icefrog.spec import ClusterSpec, JobSpec, NodeSpec
from icefrog.testing import builders
from icefrog.testing.builders import cluster as cluster_of
from icefrog.testing.builders import job_spec, profile
from icefrog.types import Candidate, Config, GpuId, GradientStats, JobView, Plan, Pricing, Snapshot

Make = Callable[[], Policy]

CONTRACT = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),  # a snapshot of many jobs takes minutes to shrink
)


@dataclass(frozen=True)
class Case:
    """One situation: a snapshot, and the jobs that have no candidate in it."""

    snapshot: Snapshot
    barred: frozenset[str]
    ran_s: float = 0.0  # for how long the jobs that run have run since true remaining times were last told

    def of(self, policy: Policy) -> tuple[Snapshot, Mapping[str, tuple[Candidate, ...]]]:
        """What the controller would hand to ``policy``: oracles are told remaining times, others are not."""
        return self.told(policy.oracle), self.options(policy.pricing)

    def options(self, pricing: Pricing) -> Mapping[str, tuple[Candidate, ...]]:
        """Every job's candidates, priced that way."""
        snapshot = self.snapshot
        return {
            job.job_id: () if job.job_id in self.barred else candidates(job, snapshot.cluster, snapshot.now_s, pricing)
            for job in snapshot.jobs
        }

    def told(self, oracle: bool) -> Snapshot:
        """The snapshot with or without true remaining times."""
        if not oracle:
            return self.snapshot
        remaining = {job.job_id: 100.0 + 37.0 * (len(job.job_id) + job.submit_s % 11) for job in self.snapshot.jobs}
        for job in self.snapshot.views.running:
            remaining[job.job_id] = max(remaining[job.job_id] - self.ran_s, 0.0)
        return replace(self.snapshot, oracle_remaining_s=MappingProxyType(remaining))

    def later(self, now_s: float) -> Case:
        """The same situation at another time: nothing has happened, except that the jobs that run have run."""
        return Case(replace(self.snapshot, now_s=now_s), self.barred, now_s - self.snapshot.now_s)


# --- situations --------------------------------------------------------------------------------------------------------

_COUNTS = [(1,), (1, 2), (1, 2, 4), (2, 4), (4,), (4, 8), (1, 2, 3, 4, 5, 6), (64,), (2, 64)]
_LAYERS = 5
_KNOWN = profile(_LAYERS, gpu_type="a100")
_SLOW = GpuCost(
    throughput=_KNOWN.throughput.model_copy(update={"straggler": 3.0, "bwd": ComputeCurve(alpha_s=0.02, beta_s=0.01)}),
    util_pct=_KNOWN.occupancy.util_pct,
)
_KNOWN = _KNOWN.model_copy(update={"by_gpu_type": {"t4": _SLOW}})
_MIXED = ClusterSpec(nodes=(NodeSpec(gpus=4, gpu_type="a100"), NodeSpec(gpus=2, count=2, gpu_type="t4")))


@st.composite
def specs(draw: st.DrawFn, index: int) -> JobSpec:
    """A job's specification; some ask for more than any cluster here has."""
    counts = draw(st.sampled_from(_COUNTS))
    return job_spec(
        f"j{index}",
        command=None,
        workload="made-up",
        gpus=counts,
        num_gpus=draw(st.sampled_from(counts)),
        batch=draw(st.sampled_from([{"global": 192}, {"min": 64, "max": 512}])),
        share=1 in counts and draw(st.booleans()),
        weight=draw(st.sampled_from([1.0, 1.0, 0.5, 3.0])),
        submit_s=float(index * draw(st.integers(0, 500))),
        duration_s=draw(st.sampled_from([None, 1000.0])),
    )


@st.composite
def views(draw: st.DrawFn, spec: JobSpec, now_s: float) -> JobView:
    """A waiting job: new, or one that ran before."""
    known: Profile | None = draw(st.sampled_from([None, _KNOWN, _KNOWN]))
    started = draw(st.booleans())
    done = draw(st.sampled_from([0.0, 10.0, 9_000.0, 10_000.0])) if started else 0.0
    variance = draw(st.lists(st.sampled_from([0.0, 0.1, 1.0, 5.0]), min_size=_LAYERS, max_size=_LAYERS))
    stats = GradientStats(tuple(variance), (0.5,) * _LAYERS) if started and known is not None else None
    return JobView(
        spec=spec,
        profile=known,
        submit_s=spec.submit_s,
        gpus=(),
        shared=False,
        running=False,
        config=None,
        effective_samples=done,
        remaining_samples=None if known is None else max(10_000.0 - done, 1.0),
        frozen_layers=draw(st.integers(0, 2)) if stats is not None else 0,
        stats=stats,
        attained_gpu_s=draw(st.sampled_from([0.0, 120.0, 1e5])) if started else 0.0,
        holding_since_s=None,
        waiting_since_s=min(spec.submit_s + draw(st.sampled_from([0.0, 600.0])), now_s),
        restart_s=60.0,
        num_restarts=1 if started else 0,
    )


@st.composite
def cases(draw: st.DrawFn, max_jobs: int = 9, min_jobs: int = 0) -> Case:
    """Waiting, running and sharing jobs on small clusters, some of two GPU types, some of whose nodes may be out of service;
    now and then a job without any candidate."""
    spec = draw(
        st.sampled_from([*(cluster_of(nodes, gpus) for nodes in (1, 2, 3) for gpus in (1, 2, 4)), _MIXED, _MIXED])
    )
    nodes = range(len(spec.gpus_per_node))
    down = frozenset(draw(st.lists(st.sampled_from(nodes), max_size=len(nodes) - 1)))
    num_jobs = draw(st.integers(min_jobs, max_jobs))
    now_s = 500.0 * num_jobs + draw(st.sampled_from([0.0, 300.0, 1e6]))
    waiting = [draw(views(draw(specs(index)), now_s)) for index in range(num_jobs)]
    serving = [(node, size) for node, size in enumerate(spec.gpus_per_node) if node not in down]
    free = [GpuId(node, device) for node, size in serving for device in range(size)]
    jobs = _let_run(draw, waiting, free, spec, now_s)
    snapshot = Snapshot(now_s=now_s, cluster=spec, jobs=tuple(jobs), seed=draw(st.integers(0, 3)), down=down)
    barred = frozenset(job.job_id for job in jobs if draw(st.integers(0, 9)) == 0)
    return Case(snapshot, barred)


def _let_run(
    draw: st.DrawFn, waiting: list[JobView], free: list[GpuId], spec: ClusterSpec, now_s: float
) -> list[JobView]:
    jobs: list[JobView] = []
    half: tuple[int, GpuId] | None = None  # a sharer that still needs its partner
    for view in waiting:
        offered = candidates(view, spec, now_s)
        how = draw(st.sampled_from(["wait", "run", "share"]))
        shared = [c for c in offered if c.config.shared]
        pool = max(
            ([gpu for gpu in free if spec.node_types[gpu.node] == kind] for kind in spec.parts), key=len
        )  # no job spans GPU types
        alone = [c for c in offered if not c.config.shared and c.config.num_gpus <= len(pool)]
        if how == "share" and shared and half is not None:
            jobs[half[0]] = _running(jobs[half[0]], _shared_config(jobs[half[0]], spec, now_s), (half[1],), now_s)
            jobs.append(_running(view, shared[0].config, (half[1],), now_s))
            half = None
        elif how == "share" and shared and half is None and free:
            jobs.append(view)
            half = (len(jobs) - 1, free.pop(0))
        elif how == "run" and alone:
            config = draw(st.sampled_from(alone)).config
            since_s = max(now_s - draw(st.sampled_from([0.0, 250.0, 4000.0])), view.submit_s)
            jobs.append(_running(view, config, tuple(pool[: config.num_gpus]), since_s))
            free = [gpu for gpu in free if gpu not in pool[: config.num_gpus]]
        else:
            jobs.append(view)
    return jobs


def _shared_config(view: JobView, spec: ClusterSpec, now_s: float) -> Config:
    return next(c.config for c in candidates(view, spec, now_s) if c.config.shared)


def _running(view: JobView, config: Config, gpus: tuple[GpuId, ...], since_s: float) -> JobView:
    has: dict[str, Any] = {"gpus": gpus, "shared": config.shared, "running": True, "config": config}
    return replace(view, **has, holding_since_s=since_s, waiting_since_s=None)


def after(case: Case, policy: Policy, plan: Plan) -> Case:
    """The situation right after ``plan`` was carried out, no time having passed."""
    snapshot = case.snapshot
    jobs = []
    for job, gpus in zip(snapshot.jobs, _allocation(snapshot, plan), strict=True):
        choice = plan.choices.get(job.job_id)
        if choice is not None:
            stays = job.running and (gpus, choice.config.num_gpus) == (job.gpus, len(job.gpus))
            attained_gpu_s = job.attained_service_s(snapshot.now_s)
            jobs.append(replace(_running(job, choice.config, gpus, snapshot.now_s), attained_gpu_s=attained_gpu_s))
            if stays and choice.config.shared == job.shared:
                jobs[-1] = _running(job, choice.config, gpus, job.holding_since_s or snapshot.now_s)
        elif gpus:
            jobs.append(job)
        else:
            since_s = job.waiting_since_s if job.waiting_since_s is not None else snapshot.now_s
            idle: dict[str, Any] = {"gpus": (), "shared": False, "running": False, "config": None}
            idle |= {"attained_gpu_s": job.attained_service_s(snapshot.now_s), "holding_since_s": None}
            jobs.append(replace(job, waiting_since_s=since_s, **idle))
    return Case(replace(snapshot, jobs=tuple(jobs), memory=plan.memory), case.barred)


def _allocation(snapshot: Snapshot, plan: Plan) -> list[tuple[GpuId, ...]]:
    """What each job of the snapshot holds under the plan, in its order."""
    named = plan.gpus
    if named is None:
        named = (place_changes if plan.keeps else place)(snapshot, plan).allocation
    kept = {job.job_id: job.gpus for job in snapshot.views.running if plan.keeps and job.job_id not in plan.preempted}
    return [named.get(job.job_id, kept.get(job.job_id, ())) for job in snapshot.jobs]


def running(snapshot: Snapshot, plan: Plan) -> set[str]:
    """The jobs that have GPUs under the plan."""
    return {job.job_id for job, gpus in zip(snapshot.jobs, _allocation(snapshot, plan), strict=True) if gpus}


def reason(snapshot: Snapshot, plan: Plan, job_id: str) -> str:
    """What the job is told; of one that keeps what it has, whatever it was told before."""
    if plan.keeps and job_id in running(snapshot, plan) - plan.choices.keys():
        return plan.reasons.get(job_id, "told before")
    return plan.reasons.get(job_id, plan.waiting_reason)


# --- the contract ------------------------------------------------------------------------------------------------------


class PolicyContract:
    """Subclass it and parametrise ``make``; see the module's docstring."""

    def test_it_says_what_it_is(self, make: Make) -> None:
        """Name, source, and options that have defaults and descriptions."""
        policy = make()
        assert policy.name
        assert len(policy.source) > 10
        for name, field in policy.Options.model_fields.items():
            assert not field.is_required(), f"option {name} needs a default"
            assert field.description, f"option {name} needs a description"

    @given(case=cases())
    @CONTRACT
    def test_its_plans_are_feasible(self, make: Make, case: Case) -> None:
        """``controller.verify`` passes: offered configurations only, sound pairs, no more GPUs than there are."""
        policy = make()
        snapshot, options = case.of(policy)
        verify(policy.decide(snapshot, options), snapshot, options)

    @given(case=cases())
    @CONTRACT
    def test_it_is_pure(self, make: Make, case: Case) -> None:
        """The same plan again, from the same instance (after another decision, too) and from a fresh one."""
        policy = make()
        snapshot, options = case.of(policy)
        before = [replace(job) for job in snapshot.jobs]
        first = policy.decide(snapshot, options)
        assert list(snapshot.jobs) == before  # nothing but the type checker keeps a policy from changing what it sees
        policy.decide(replace(snapshot, jobs=snapshot.jobs[:1], now_s=snapshot.now_s + 1e6), options)
        assert policy.decide(snapshot, options) == first
        assert make().decide(snapshot, options) == first

    @given(case=cases())
    @CONTRACT
    def test_it_explains_every_job(self, make: Make, case: Case) -> None:
        """A reason in words for every unfinished job, and for no other."""
        policy = make()
        snapshot, options = case.of(policy)
        plan = policy.decide(snapshot, options)
        assert set(plan.reasons) <= {job.job_id for job in snapshot.jobs}
        assert all(len(reason(snapshot, plan, job.job_id).split()) > 1 for job in snapshot.jobs)

    @given(case=cases())
    @CONTRACT
    def test_its_memory_is_json(self, make: Make, case: Case) -> None:
        """What it remembers survives the log, and it can decide with it after the plan was carried out."""
        policy = make()
        snapshot, options = case.of(policy)
        plan = policy.decide(snapshot, options)
        memory = json.loads(json.dumps(plan.memory, allow_nan=False))
        assert memory == plan.memory
        later = replace(after(case, policy, plan).told(policy.oracle), memory=memory)
        verify(policy.decide(later, options), later, options)

    @given(case=cases(), passed_s=st.sampled_from([0.0, 1.0, 299.0, 3600.0, 1e5]))
    @CONTRACT
    def test_its_plans_stand_as_long_as_they_say(self, make: Make, case: Case, passed_s: float) -> None:
        """Before ``Plan.stands_until_s``, with the plan carried out and nothing happening, it changes nothing."""
        policy = make()
        plan = policy.decide(*case.of(policy))
        now_s = min(case.snapshot.now_s + passed_s, math.nextafter(plan.stands_until_s, -math.inf))
        if now_s < case.snapshot.now_s:
            return
        carried_out = after(case, policy, plan)
        then = carried_out.later(now_s)
        again = after(then, policy, policy.decide(*then.of(policy)))
        before, now = ({j.job_id: (j.gpus, j.config) for j in c.snapshot.jobs} for c in (carried_out, again))
        assert now == before

    @given(case=cases())
    @CONTRACT
    def test_content_plans_outlive_the_end_of_a_job(self, make: Make, case: Case) -> None:
        """``Plan.content``: once it is carried out, the others stay as they are when one ends."""
        policy = make()
        plan = policy.decide(*case.of(policy))
        if not plan.content or policy.pricing.shares:
            return
        carried_out = after(case, policy, plan)
        jobs = carried_out.snapshot.jobs
        assert all(job.running for job in jobs)
        for gone in jobs[:3]:
            left = Case(replace(carried_out.snapshot, jobs=tuple(j for j in jobs if j is not gone)), case.barred)
            then = after(left, policy, policy.decide(*left.of(policy)))
            assert [(j.gpus, j.config) for j in then.snapshot.jobs] == [(j.gpus, j.config) for j in left.snapshot.jobs]

    @given(case=cases())
    @CONTRACT
    def test_only_oracles_read_the_truth(self, make: Make, case: Case) -> None:
        """True remaining times and logged durations change nothing for a policy that is no oracle."""
        policy = make()
        if policy.oracle:
            return
        _, options = case.of(policy)
        plan = policy.decide(case.told(False), options)
        assert policy.decide(case.told(True), options) == plan
        bare = tuple(replace(job, spec=job.spec.model_copy(update={"duration_s": None})) for job in case.snapshot.jobs)
        assert policy.decide(replace(case.snapshot, jobs=bare), options) == plan

    def test_no_jobs(self, make: Make) -> None:
        """An empty cluster is no error."""
        plan = make().decide(Snapshot(now_s=0.0, cluster=cluster_of(), jobs=(), oracle_remaining_s={}), {})
        assert not plan.choices
        assert not plan.pairs

    @given(case=cases(max_jobs=1, min_jobs=1))
    @CONTRACT
    def test_a_job_alone_runs(self, make: Make, case: Case) -> None:
        """One job that can run at the count it asked for, on an otherwise empty cluster, does run."""
        policy = make()
        snapshot, options = case.of(policy)
        job = snapshot.jobs[0]
        offered = {c.config.num_gpus for c in options[job.job_id] if not c.config.shared}
        offered = {num_gpus for num_gpus in offered if num_gpus <= max(snapshot.gpus_by_type.values())}
        plan = policy.decide(snapshot, options)
        assert running(snapshot, plan) or job.spec.requested_gpus not in offered

    @given(case=cases(max_jobs=16, min_jobs=16))
    @CONTRACT
    def test_more_jobs_than_gpus(self, make: Make, case: Case) -> None:
        """In overload some run, all have a reason, and nothing is oversubscribed."""
        policy = make()
        snapshot, options = case.of(policy)
        plan = policy.decide(snapshot, options)
        verify(plan, snapshot, options)
        wanted = {job.job_id: job.spec.requested_gpus for job in snapshot.jobs}
        fitting = any(c.config.num_gpus == wanted[j] for j in wanted for c in options[j])
        assert (
            running(snapshot, plan) or not fitting or snapshot.down
        )  # a strict queue may wait for a node to come back

    def test_a_job_larger_than_the_cluster(self, make: Make) -> None:
        """It waits with a reason and blocks nobody who comes later."""
        policy = make()
        huge = job_spec("huge", gpus=(64,))
        small = job_spec("small", gpus=(1, 2), num_gpus=2, submit_s=5.0)
        spec = cluster_of(1, 4)
        jobs = tuple(_new(one, submit_s) for one, submit_s in ((huge, 0.0), (small, 5.0)))
        options = {job.job_id: candidates(job, spec, 10.0, policy.pricing) for job in jobs}
        snapshot = Snapshot(10.0, spec, jobs, oracle_remaining_s={"huge": 1.0, "small": 2.0} if policy.oracle else None)
        plan = policy.decide(snapshot, options)
        assert set(plan.choices) == {"small"}
        assert reason(snapshot, plan, "huge")


def _new(spec: JobSpec, submit_s: float) -> JobView:
    fresh = builders.view(spec.name)
    return replace(
        fresh, spec=spec, profile=_KNOWN, submit_s=submit_s, remaining_samples=10_000.0, waiting_since_s=submit_s
    )
