"""GPU counts to named GPUs (section 9 of the specification). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from icefrog.types import GpuId, Plan, Snapshot


@dataclass(frozen=True, slots=True)
class Placement:
    """Where every planned job goes, and which jobs found no place although the counts add up."""

    allocation: dict[str, tuple[GpuId, ...]]
    unplaced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Unit:
    """One or two jobs that are placed together."""

    job_ids: tuple[str, ...]
    num_gpus: int
    current: tuple[GpuId, ...]  # where it (or one of a pair) runs now


def place(snapshot: Snapshot, plan: Plan) -> Placement:
    """Map a plan's counts to GPUs.

    A job that fits in one node never spans two; multi-node jobs take whole nodes first and never share a node with each
    other; a running job whose count did not change stays. If that leaves a job without a place and the plan allows it,
    everything is packed anew (a job that moves restarts); what still finds no place is returned in ``unplaced``.
    """
    units = _units(snapshot, plan)
    kept = _pack(snapshot.node_gpus, units, keep=True)
    if not kept.unplaced or not plan.migrate:
        return kept
    repacked = _pack(snapshot.node_gpus, units, keep=False)
    return repacked if len(repacked.unplaced) < len(kept.unplaced) else kept


def _units(snapshot: Snapshot, plan: Plan) -> list[_Unit]:
    views = {job.job_id: job for job in snapshot.jobs}
    partner = {a: b for pair in plan.pairs for a, b in (pair, pair[::-1])}
    units = []
    for job_id in (job.job_id for job in snapshot.jobs if job.job_id in plan.choices):
        mate = partner.get(job_id)
        members = (job_id,) if mate is None else tuple(sorted((job_id, mate)))
        if mate is not None and job_id != members[0]:
            continue
        count = plan.choices[job_id].config.num_gpus
        # A pair stays on a GPU that one of its members already has; the other one joins it there.
        homes = [views[member].gpus for member in members if views[member].gpus]
        homes.sort(key=lambda gpus: len(gpus) != count)
        units.append(_Unit(members, count, homes[0] if homes else ()))
    return units


class _Nodes:
    """Free GPUs while packing."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.free = [list(range(size)) for size in sizes]
        self.spans = [False] * len(sizes)  # holds a part of a multi-node job

    def take(self, node: int, count: int, wanted: Sequence[GpuId] = ()) -> list[GpuId]:
        """``count`` GPUs of a node, those of ``wanted`` first."""
        mine = {gpu.device for gpu in wanted if gpu.node == node}
        order = sorted(self.free[node], key=lambda device: (device not in mine, device))[:count]
        for device in order:
            self.free[node].remove(device)
        return [GpuId(node, device) for device in order]

    def is_free(self, gpus: Sequence[GpuId]) -> bool:
        return all(gpu.node < len(self.free) and gpu.device in self.free[gpu.node] for gpu in gpus)

    def one_node(self, unit: _Unit) -> list[GpuId] | None:
        """The fullest node that still fits the unit, its own first; None where there is none."""
        home = unit.current[0].node if unit.current else -1
        fits = [node for node, free in enumerate(self.free) if len(free) >= unit.num_gpus]
        if not fits:
            return None
        best = min(fits, key=lambda node: (node != home, len(self.free[node]), node))
        return self.take(best, unit.num_gpus, unit.current)

    def many_nodes(self, unit: _Unit) -> list[GpuId] | None:
        """Whole empty nodes first, the rest on the fullest node that fits it; none shared with a multi-node job."""
        gpus: list[GpuId] = []
        left = unit.num_gpus
        home = {gpu.node for gpu in unit.current}
        usable = [node for node in range(len(self.sizes)) if not self.spans[node]]
        empty = [node for node in usable if len(self.free[node]) == self.sizes[node]]
        for node in sorted(empty, key=lambda node: (node not in home, -self.sizes[node], node)):
            if self.sizes[node] <= left:
                gpus += self.take(node, self.sizes[node], unit.current)
                left -= self.sizes[node]
        rest = [node for node in usable if len(self.free[node]) >= left > 0]
        if left and rest:
            node = min(rest, key=lambda node: (node not in home, len(self.free[node]), node))
            gpus += self.take(node, left, unit.current)
            left = 0
        if left:
            for gpu in gpus:
                self.free[gpu.node].append(gpu.device)
            return None
        for gpu in gpus:
            self.spans[gpu.node] = True
        return gpus


def _pack(sizes: Sequence[int], units: Sequence[_Unit], *, keep: bool) -> Placement:
    nodes = _Nodes(sizes)
    largest = max(sizes)
    allocation: dict[str, tuple[GpuId, ...]] = {}
    unplaced: list[str] = []

    def settle(unit: _Unit, gpus: Sequence[GpuId]) -> None:
        for job_id in unit.job_ids:
            allocation[job_id] = tuple(sorted(gpus))

    def stays(unit: _Unit) -> bool:
        # Two pairs may name the same home when partners change: the first keeps it.
        if len(unit.current) != unit.num_gpus or not nodes.is_free(unit.current):
            return False
        used = {gpu.node for gpu in unit.current}
        if len(used) > 1:
            if unit.num_gpus <= largest or any(nodes.spans[node] for node in used):
                return False
            for node in used:
                nodes.spans[node] = True
        for node in used:
            nodes.take(node, sum(gpu.node == node for gpu in unit.current), unit.current)
        settle(unit, unit.current)
        return True

    moving = [unit for unit in units if not (keep and stays(unit))]
    for unit in sorted(moving, key=lambda unit: -unit.num_gpus):  # stable: equal counts in order of submission
        gpus = nodes.many_nodes(unit) if unit.num_gpus > largest else nodes.one_node(unit)
        if gpus is None:
            unplaced += unit.job_ids
        else:
            settle(unit, gpus)
    return Placement(allocation, tuple(unplaced))


def num_nodes(gpus: Sequence[GpuId]) -> int:
    """Nodes that an allocation touches."""
    return len({gpu.node for gpu in gpus})
