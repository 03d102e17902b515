"""The check of a plan against the constraints, before anything is done with it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from icefrog.changes import free_after_leaving
from icefrog.gpu_types import ANY_GPU
from icefrog.placement import FreeGpus
from icefrog.types import Candidates, GpuId, Plan, Snapshot


class PolicyError(Exception):
    """A policy returned a plan that breaks the contract; acting on it could oversubscribe GPUs."""


def verify(plan: Plan, snapshot: Snapshot, options: Candidates) -> None:
    """Check a plan against the constraints before it is acted on (fault S12). Raises :class:`PolicyError`.

    Every choice is one of the job's candidates; pairs are sharers of one GPU, both in exactly one pair; every unfinished job
    has a reason; the GPUs used do not exceed the cluster's. What a plan leaves as it is was checked when it was planned.
    """
    if missing := _unexplained(plan, snapshot):
        raise PolicyError(f"no reason given for {missing[:5]}")
    if plan.keeps and not (plan.choices or plan.pairs or plan.preempted or plan.gpus):
        return
    jobs = snapshot.views.by_id
    paired: Mapping[str, int] = Counter(job_id for pair in plan.pairs for job_id in pair) if plan.pairs else {}
    used, types = len(plan.pairs), {ANY_GPU}
    for job_id, choice in plan.choices.items():
        config = choice.config
        if job_id not in jobs:
            raise PolicyError(f"the plan names job {job_id}, which is not in the snapshot")
        if choice not in options.get(job_id, ()):
            raise PolicyError(f"the plan gives {job_id} a configuration that it did not offer: {config}")
        if config.shared != (paired.get(job_id) == 1):
            raise PolicyError(f"{job_id}: a shared configuration needs exactly one partner, an exclusive one none")
        used += 0 if config.shared else config.num_gpus
        types.add(config.gpu_type)
    if alone := paired.keys() - plan.choices.keys():
        raise PolicyError(f"paired but not chosen: {sorted(alone)}")
    _verify_preempted(plan, snapshot)
    free = free_after_leaving(snapshot, plan) if plan.keeps else None
    total = snapshot.num_gpus if free is None else free.num_free
    if used > total:
        raise PolicyError(f"the plan uses {used} GPUs of {total}")
    if len(types) > 1:
        _verify_types(plan, snapshot)
    if plan.gpus is not None:
        _verify_map(plan, snapshot, plan.gpus, free)


def _verify_preempted(plan: Plan, snapshot: Snapshot) -> None:
    """Only a plan of changes names jobs that must leave; they run, and are not chosen as well."""
    if not plan.preempted:
        return
    if not plan.keeps:
        raise PolicyError("the plan names jobs to preempt, yet leaves out others: say keeps, or only choices")
    jobs = snapshot.views.by_id
    for job_id in plan.preempted:
        if job_id in plan.choices or job_id not in jobs or not jobs[job_id].running:
            raise PolicyError(f"the plan preempts {job_id}, which does not run, or is chosen too")


def _unexplained(plan: Plan, snapshot: Snapshot) -> list[str]:
    """Jobs without a reason: those that are named need one, those that wait at least the common one."""
    named = (plan.choices.keys() | plan.preempted) - plan.reasons.keys()
    if named or plan.waiting_reason:
        return sorted(named)
    silent = snapshot.views.waiting if plan.keeps else snapshot.jobs
    return sorted(view.job_id for view in silent if view.job_id not in plan.reasons)


def _verify_types(plan: Plan, snapshot: Snapshot) -> None:
    """A plan that names GPU types uses no more of each than there are; a pair is on one type."""
    used: Counter[str] = Counter()
    mates = {second: first for first, second in plan.pairs}
    for job_id, choice in plan.choices.items():
        if job_id not in mates:
            used[choice.config.gpu_type] += choice.config.num_gpus
        elif choice.config.gpu_type != plan.choices[mates[job_id]].config.gpu_type:
            raise PolicyError(f"{job_id} and {mates[job_id]} share a GPU, yet name different types")
    there = snapshot.gpus_by_type
    for gpu_type, count in used.items():
        if gpu_type != ANY_GPU and count > there.get(gpu_type, 0):
            raise PolicyError(f"the plan uses {count} GPUs of type {gpu_type}, there are {there.get(gpu_type, 0)}")


def _verify_map(
    plan: Plan, snapshot: Snapshot, gpus_of: Mapping[str, tuple[GpuId, ...]], free: FreeGpus | None
) -> None:
    """A policy that names GPUs names as many as it chose, in service, each for one job or one pair; ``free``: those that it
    may give away, where it keeps whom it does not name."""
    sizes, types = snapshot.node_gpus, snapshot.cluster.node_types
    owners: dict[GpuId, str] = {}
    unit = {b: a for a, b in plan.pairs}
    if gpus_of.keys() != plan.choices.keys():
        raise PolicyError(f"GPUs are named for other jobs than chosen: {sorted(set(gpus_of) ^ set(plan.choices))[:5]}")
    for job_id, gpus in gpus_of.items():
        config, owner = plan.choices[job_id].config, unit.get(job_id, job_id)
        if len(gpus) != config.num_gpus or len(set(gpus)) != len(gpus):
            raise PolicyError(f"{job_id}: {config.num_gpus} GPUs chosen, {gpus} named")
        for gpu in gpus:
            node, device = gpu
            if not (0 <= node < len(sizes) and 0 <= device < sizes[node]):
                raise PolicyError(f"{job_id}: {gpu} is not in service")
            if config.gpu_type != ANY_GPU and config.gpu_type != types[node]:
                raise PolicyError(f"{job_id}: {gpu} is not of the type chosen")
            if owners.setdefault(gpu, owner) != owner:
                raise PolicyError(f"{gpu} is named for {owners[gpu]} and {owner}")
        if free is not None and not free.are_free(gpus):
            held = next(gpu for gpu in gpus if not free.are_free((gpu,)))
            raise PolicyError(f"{job_id}: {held} is held by a job that keeps it")
