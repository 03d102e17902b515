"""Plans that name changes only (``Plan.keeps``): what they leave free, and where their jobs go. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from icefrog.gpu_types import ANY_GPU
from icefrog.placement import FreeGpus, Placement, all_free, of_type
from icefrog.types import Allocation, GpuId, JobView, Plan, Snapshot


def free_gpus(snapshot: Snapshot) -> FreeGpus:
    """The GPUs in service that no running job has; the caller's own to change."""
    return _free_now(snapshot).copy()


def _free_now(snapshot: Snapshot) -> FreeGpus:
    """The same, to look at only."""
    known = snapshot.views.free
    if known is not None and known[0] == snapshot.down:
        return known[1]
    free = all_free(snapshot.cluster, snapshot.node_gpus)
    for gpus in {view.gpus for view in snapshot.views.running}:
        free.hold(gpus)
    return free


def free_after_leaving(snapshot: Snapshot, plan: Plan) -> FreeGpus:
    """What is free once the jobs that the plan names have left what they have (those that stay take it again). To look at
    only."""
    views = snapshot.views.by_id
    leaving = [views[job_id] for job_id in (*plan.choices, *plan.preempted) if views[job_id].running]
    if not leaving:
        return _free_now(snapshot)
    free = free_gpus(snapshot)
    for gpus in _given_up(leaving, snapshot):
        free.release(gpus)
    return free


def num_granted(snapshot: Snapshot, plan: Plan, allocation: Allocation) -> tuple[int, int]:
    """(GPUs that jobs have, jobs that have one) once a plan with ``keeps`` is carried out."""
    views = snapshot.views
    named = [job_id for job_id in (*plan.choices, *plan.preempted) if views.by_id[job_id].running]
    taken = len({gpu for gpus in allocation.values() for gpu in gpus})
    free = free_after_leaving(snapshot, plan).num_free
    return snapshot.num_gpus - free + taken, len(views) - len(views.waiting) - len(named) + len(plan.choices)


def _given_up(named: Iterable[JobView], snapshot: Snapshot) -> set[tuple[GpuId, ...]]:
    """GPUs of the named jobs, which run, on which nobody stays."""
    leaving = {view.job_id: view for view in named}
    shared = {view.gpus for view in leaving.values() if view.shared}
    if shared:
        others = (view for view in snapshot.views.running if view.shared and view.job_id not in leaving)
        shared -= {view.gpus for view in others}
    return shared | {view.gpus for view in leaving.values() if not view.shared}


def place_changes(snapshot: Snapshot, plan: Plan) -> Placement:
    """Where the jobs go that a plan with ``keeps`` names; nobody else moves, whatever ``migrate`` says.

    A named job whose count did not change stays where it is; the others are placed as by :func:`icefrog.placement.place`.
    """
    free = free_after_leaving(snapshot, plan).copy()
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
    configs = {unit: plan.choices[unit[0]].config for unit in moving}
    # As in ``placement``: those that are bound to a type first, else others could take the places of their type.
    for unit in sorted(moving, key=lambda unit: (configs[unit].gpu_type == ANY_GPU, -configs[unit].num_gpus)):
        home = next((views[job_id].gpus for job_id in unit if views[job_id].running), ())
        config = configs[unit]
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
    place = {job_id: at for at, job_id in enumerate(in_order(snapshot, plan.choices))}
    units = [(job_id, partner[job_id]) if job_id in partner else (job_id,) for job_id in place]
    return [unit for unit in units if len(unit) == 1 or place[unit[0]] < place[unit[1]]]


def in_order(snapshot: Snapshot, job_ids: Iterable[str]) -> list[str]:
    """The jobs in order of submission."""
    wanted = set(job_ids)
    if len(wanted) < 2:
        return list(wanted)
    return [job_id for job_id in snapshot.views.by_id if job_id in wanted]
