"""Plans that name changes only (``Plan.keeps``): what they leave free, and where their jobs go. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from icefrog.placement import FreeGpus, Placement, all_free, of_type
from icefrog.types import GpuId, JobView, Plan, Snapshot


def free_gpus(snapshot: Snapshot) -> FreeGpus:
    """The GPUs in service that no running job has; the caller's own to change."""
    known = snapshot.views.free
    if known is not None and known[0] == snapshot.down:
        return known[1].copy()
    free = all_free(snapshot.cluster, snapshot.node_gpus)
    for gpus in {view.gpus for view in snapshot.views.running}:
        free.hold(gpus)
    return free


def free_after_leaving(snapshot: Snapshot, plan: Plan) -> FreeGpus:
    """What is free once the jobs that the plan names have left what they have (those that stay take it again)."""
    free = free_gpus(snapshot)
    named = [snapshot.views.by_id[job_id] for job_id in (*plan.choices, *plan.preempted)]
    for gpus in _given_up(named, snapshot):
        free.release(gpus)
    return free


def _given_up(named: Iterable[JobView], snapshot: Snapshot) -> set[tuple[GpuId, ...]]:
    """GPUs of the named jobs on which nobody stays."""
    leaving = {view.job_id: view for view in named if view.running}
    shared = {view.gpus for view in leaving.values() if view.shared}
    if shared:
        others = (view for view in snapshot.views.running if view.shared and view.job_id not in leaving)
        shared -= {view.gpus for view in others}
    return shared | {view.gpus for view in leaving.values() if not view.shared}


def place_changes(snapshot: Snapshot, plan: Plan) -> Placement:
    """Where the jobs go that a plan with ``keeps`` names; nobody else moves, whatever ``migrate`` says.

    A named job whose count did not change stays where it is; the others are placed as by :func:`icefrog.placement.place`.
    """
    free = free_after_leaving(snapshot, plan)
    views = snapshot.views.by_id
    allocation: dict[str, tuple[GpuId, ...]] = {}
    moving: list[tuple[str, ...]] = []
    for unit in _units(snapshot, plan):
        homes = [views[job_id].gpus for job_id in unit if views[job_id].running]
        count, kind = plan.choices[unit[0]].config.num_gpus, plan.choices[unit[0]].config.gpu_type
        fitting = [gpus for gpus in homes if len(gpus) == count and free.are_free(gpus)]
        home = next((gpus for gpus in fitting if of_type(snapshot.cluster, gpus, kind)), None)
        if home is None:
            moving.append(unit)
        else:
            free.hold(home)
            allocation.update(dict.fromkeys(unit, home))
    unplaced: list[str] = []
    for unit in sorted(moving, key=lambda unit: -plan.choices[unit[0]].config.num_gpus):
        home = next((views[job_id].gpus for job_id in unit if views[job_id].running), ())
        config = plan.choices[unit[0]].config
        gpus = free.find(config.num_gpus, home, config.gpu_type)
        if gpus is None:
            unplaced += unit
        else:
            free.hold(gpus)
            allocation.update(dict.fromkeys(unit, tuple(sorted(gpus))))
    return Placement(allocation, tuple(unplaced))


def _units(snapshot: Snapshot, plan: Plan) -> list[tuple[str, ...]]:
    """Jobs and pairs that are placed together, in order of submission."""
    partner = {a: b for pair in plan.pairs for a, b in (pair, pair[::-1])}
    named = in_order(snapshot, plan.choices)
    units = [(job_id, partner[job_id]) if job_id in partner else (job_id,) for job_id in named]
    return [unit for unit in units if len(unit) == 1 or named.index(unit[0]) < named.index(unit[1])]


def in_order(snapshot: Snapshot, job_ids: Iterable[str]) -> list[str]:
    """The jobs in order of submission."""
    wanted = set(job_ids)
    if len(wanted) < 2:
        return list(wanted)
    return [job_id for job_id in snapshot.views.by_id if job_id in wanted]
