"""GPU counts to named GPUs (section 9 of the specification). Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from icefrog.gpu_types import ANY_GPU
from icefrog.spec import ClusterSpec
from icefrog.types import GpuId, Plan, Snapshot


class FreeGpus:
    """The GPUs that nobody holds, node by node, kept up to date while jobs take and leave them.

    Finding a place costs O(GPUs of a node) for a job that fits in one node and O(nodes) for a larger one, however many jobs
    there are.

    Args:
        node_gpus: GPUs in service of every node (``Snapshot.node_gpus``); all are free at first.
    """

    def __init__(self, node_gpus: Sequence[int]) -> None:
        self.sizes = tuple(node_gpus)
        self.largest = max(self.sizes, default=0)
        """GPUs of the largest node: a job that needs more spans nodes, any other never does."""
        self.num_free = sum(self.sizes)
        self._free = [(1 << size) - 1 for size in self.sizes]  # bit d: device d is free
        # Bytes, where they will do, are copied and searched in a tenth of the time.
        self._count: list[int] | bytearray = (bytearray if self.largest < 256 else list)(self.sizes)
        self._nodes_with = [0] * (self.largest + 1)  # how many nodes have so many free GPUs
        for size in self.sizes:
            self._nodes_with[size] += 1
        self._spanned: set[int] = set()  # nodes that hold a part of a job that spans nodes

    def copy(self) -> FreeGpus:
        """Books of one's own, for what would happen if."""
        twin = object.__new__(type(self))
        twin.__dict__.update(
            self.__dict__,
            _free=self._free.copy(),
            _count=self._count.copy(),
            _nodes_with=self._nodes_with.copy(),
            _spanned=self._spanned.copy(),
        )
        return twin

    def free_in(self, node: int) -> int:
        """Free GPUs of one node."""
        return self._count[node]

    def are_free(self, gpus: Sequence[GpuId]) -> bool:
        """Whether all of them are in service and free."""
        masks = self._free
        for node, device in gpus:  # noqa: SIM110 (twice as fast as all())
            if not (0 <= node < len(masks) and masks[node] >> device & 1):
                return False
        return True

    def hold(self, gpus: Sequence[GpuId]) -> None:
        """Somebody takes them. Raises ``ValueError`` if one is not free."""
        if not self.are_free(gpus):
            raise ValueError(f"not all free: {gpus}")
        if num_nodes(gpus) > 1:
            self._spanned.update(gpu.node for gpu in gpus)
        for node, devices in _by_node(gpus):
            self._free[node] ^= devices
            self._recount(node, -devices.bit_count())

    def release(self, gpus: Sequence[GpuId]) -> None:
        """A holder leaves all its GPUs (a part of them would leave the books of nodes in use by large jobs wrong)."""
        if num_nodes(gpus) > 1:
            self._spanned.difference_update(gpu.node for gpu in gpus)
        for node, devices in _by_node(gpus):
            if twice := self._free[node] & devices:
                raise ValueError(f"was free already: {GpuId(node, twice.bit_length() - 1)}")
            self._free[node] |= devices
            self._recount(node, devices.bit_count())

    def _recount(self, node: int, change: int) -> None:
        count, nodes_with = self._count[node], self._nodes_with
        nodes_with[count] -= 1
        nodes_with[count + change] += 1
        self._count[node] = count + change
        self.num_free += change

    def has_type(self, node: int, gpu_type: str) -> bool:
        """Whether a job that names this type may lie on the node. Here all GPUs are alike."""
        return True

    def largest_of(self, gpu_type: str) -> int:
        """GPUs of the largest node on which a job that names this type may lie."""
        return self.largest

    def parts(self, gpu_type: str) -> tuple[Sequence[int], ...]:
        """Nodes of one type each, of every type on which a job that names this one may lie. Here all are of one."""
        return (range(len(self.sizes)),)

    def find(self, num_gpus: int, home: Sequence[GpuId] = (), gpu_type: str = ANY_GPU) -> tuple[GpuId, ...] | None:
        """A place for a job, or None; nothing is held yet.

        In one node: that of ``home`` if it fits there, else the fullest node that fits, the first of equals. A job larger
        than any node: whole empty nodes, the largest first, and the rest on the fullest node that fits it; never a node
        that another such job uses. GPUs of ``home`` come before others of the same node. ``gpu_type`` matters in
        :class:`TypedGpus` only.
        """
        if num_gpus > self.num_free:
            return None
        return self._many_nodes(num_gpus, home) if num_gpus > self.largest else self._one_node(num_gpus, home)

    def _one_node(self, num_gpus: int, home: Sequence[GpuId]) -> tuple[GpuId, ...] | None:
        if home and home[0].node < len(self.sizes) and self._count[home[0].node] >= num_gpus:
            return self.pick(home[0].node, num_gpus, home)
        for count in range(num_gpus, self.largest + 1):
            if self._nodes_with[count]:
                return self.pick(self._count.index(count), num_gpus, home)
        return None

    def _many_nodes(
        self, num_gpus: int, home: Sequence[GpuId], among: Sequence[int] | None = None
    ) -> tuple[GpuId, ...] | None:
        gpus: list[GpuId] = []
        left = num_gpus
        homes = {gpu.node for gpu in home}
        nodes = range(len(self._count)) if among is None else among
        usable = [node for node in nodes if self._count[node] and node not in self._spanned]
        empty = [node for node in usable if self._count[node] == self.sizes[node]]
        taken = set()
        for node in sorted(empty, key=lambda node: (node not in homes, -self.sizes[node], node)):
            if self.sizes[node] <= left:
                gpus += self.pick(node, self.sizes[node], home)
                left -= self.sizes[node]
                taken.add(node)
        if left:
            rest = [node for node in usable if self._count[node] >= left and node not in taken]
            if not rest:
                return None
            node = min(rest, key=lambda node: (node not in homes, self._count[node], node))
            gpus += self.pick(node, left, home)
        return tuple(gpus)

    def pick(self, node: int, num_gpus: int, home: Sequence[GpuId] = ()) -> tuple[GpuId, ...]:
        """``num_gpus`` free GPUs of a node, those of ``home`` first."""
        mask = self._free[node]
        devices = [device for device in range(self.sizes[node]) if mask >> device & 1]
        if home:
            own = {gpu.device for gpu in home if gpu.node == node}
            devices.sort(key=lambda device: device not in own)
        return tuple([_gpu(node, device) for device in devices[:num_gpus]])


class TypedGpus(FreeGpus):
    """The free GPUs of a cluster of several types: a job lies on GPUs of one type.

    A job that may have any goes to that of its home, else to the type with the most GPUs that has a place for it.

    Args:
        cluster: says of which type each node is.
        node_gpus: as in :class:`FreeGpus`.
    """

    def __init__(self, cluster: ClusterSpec, node_gpus: Sequence[int]) -> None:
        super().__init__(node_gpus)
        self._types = cluster.node_types
        self._nodes = {t: tuple(n for n, of in enumerate(self._types) if of == t) for t in cluster.parts}
        self._largest = {t: max(self.sizes[n] for n in nodes) for t, nodes in self._nodes.items()}

    def has_type(self, node: int, gpu_type: str) -> bool:
        """Whether a job that names this type, or any, may lie on the node."""
        return gpu_type in (ANY_GPU, self._types[node])

    def largest_of(self, gpu_type: str) -> int:
        """GPUs of the largest node of a type, or of all."""
        return self.largest if gpu_type == ANY_GPU else self._largest.get(gpu_type, 0)

    def parts(self, gpu_type: str) -> tuple[Sequence[int], ...]:
        """Nodes of one type each, of every type on which a job that names this one, or any, may lie."""
        return tuple(nodes for kind, nodes in self._nodes.items() if gpu_type in (ANY_GPU, kind))

    def find(self, num_gpus: int, home: Sequence[GpuId] = (), gpu_type: str = ANY_GPU) -> tuple[GpuId, ...] | None:
        """A place for a job on GPUs of one type (of this one), or None; nothing is held yet."""
        if num_gpus > self.num_free:
            return None
        if gpu_type != ANY_GPU:
            return self._find_in(gpu_type, num_gpus, home) if gpu_type in self._nodes else None
        at_home = self._types[home[0].node] if home and home[0].node < len(self._types) else None
        for kind in sorted(self._nodes, key=lambda kind: kind != at_home):
            if num_gpus <= self._largest[kind] or num_gpus > self.largest:  # else it would fit in one node elsewhere
                found = self._find_in(kind, num_gpus, home)
                if found is not None:
                    return found
        return None

    def _find_in(self, gpu_type: str, num_gpus: int, home: Sequence[GpuId]) -> tuple[GpuId, ...] | None:
        nodes = self._nodes[gpu_type]
        if num_gpus > self._largest[gpu_type]:
            return self._many_nodes(num_gpus, home, nodes)
        homes = {gpu.node for gpu in home[:1]}
        fits = [node for node in nodes if self._count[node] >= num_gpus]
        if not fits:
            return None
        return self.pick(min(fits, key=lambda node: (node not in homes, self._count[node], node)), num_gpus, home)


def all_free(cluster: ClusterSpec, node_gpus: Sequence[int]) -> FreeGpus:
    """The books of a cluster before anybody holds anything; ``node_gpus``: in service, of every node."""
    return FreeGpus(node_gpus) if len(cluster.parts) == 1 else TypedGpus(cluster, node_gpus)


def _by_node(gpus: Sequence[GpuId]) -> Sequence[tuple[int, int]]:
    """(node, its devices as bits), in stretches of one node."""
    parts: list[tuple[int, int]] = []
    last, devices = -1, 0
    for node, device in gpus:
        if node != last and devices:
            parts.append((last, devices))
            devices = 0
        last = node
        devices |= 1 << device
    if devices:
        parts.append((last, devices))
    return parts


_gpu = lru_cache(maxsize=65536)(GpuId)
"""One object a GPU: they are named over and over."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where every planned job goes, and which jobs found no place although the counts add up."""

    allocation: dict[str, tuple[GpuId, ...]]
    unplaced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Unit:
    """One or two jobs that are placed together."""

    job_ids: tuple[str, ...]
    num_gpus: int
    homes: tuple[tuple[GpuId, ...], ...]  # of each of its jobs that runs: where it does; those of the right count first
    gpu_type: str

    @property
    def near(self) -> tuple[GpuId, ...]:
        """Where it is placed if there is room and it cannot stay."""
        return self.homes[0] if self.homes else ()


def place(snapshot: Snapshot, plan: Plan) -> Placement:
    """Map a plan's counts to GPUs.

    A job that fits in one node never spans two; multi-node jobs take whole nodes first and never share a node with each
    other; no job spans GPU types, and one whose configuration names a type gets it; a running job whose count did not
    change stays. Where that leaves a job without a place and the plan allows it, as few running jobs as will do are moved
    out of its way (a job that moves restarts); if there is no such way, everything is packed anew, near where it was or,
    where that leaves one out, anywhere. What still finds no place is returned in ``unplaced``.
    """
    units = _units(snapshot, plan)
    packed = _packed(snapshot, units, keep=True, migrate=plan.migrate)
    if packed.unplaced and plan.migrate:
        packed = min(packed, _packed(snapshot, units, keep=False, migrate=False), key=_num_unplaced)
    if packed.unplaced and plan.migrate:
        # Who goes home may take the one place that another fits in.
        homeless = [replace(unit, homes=()) for unit in units]
        packed = min(packed, _packed(snapshot, homeless, keep=False, migrate=False), key=_num_unplaced)
    return packed


def _num_unplaced(placement: Placement) -> int:
    return len(placement.unplaced)


def _units(snapshot: Snapshot, plan: Plan) -> list[_Unit]:
    views = {job.job_id: job for job in snapshot.jobs}
    partner = {a: b for pair in plan.pairs for a, b in (pair, pair[::-1])}
    units = []
    for job_id in (job.job_id for job in snapshot.jobs if job.job_id in plan.choices):
        mate = partner.get(job_id)
        members = (job_id,) if mate is None else tuple(sorted((job_id, mate)))
        if mate is not None and job_id != members[0]:
            continue
        config = plan.choices[job_id].config
        count = config.num_gpus
        homes = [views[member].gpus for member in members if views[member].gpus]
        homes.sort(key=lambda gpus: len(gpus) != count)
        units.append(_Unit(members, count, tuple(homes), config.gpu_type))
    return units


@dataclass(slots=True)
class _Packing:
    """Units on GPUs, while one after the other finds its place."""

    free: FreeGpus
    gpus_of: dict[_Unit, tuple[GpuId, ...]]
    on_node: list[tuple[_Unit, ...]]

    def copy(self) -> _Packing:
        return _Packing(self.free.copy(), self.gpus_of.copy(), self.on_node.copy())

    def settle(self, unit: _Unit, gpus: tuple[GpuId, ...]) -> None:
        self.free.hold(gpus)
        self.gpus_of[unit] = gpus
        for node in {gpu.node for gpu in gpus}:
            self.on_node[node] += (unit,)

    def lift(self, unit: _Unit) -> None:
        gpus = self.gpus_of.pop(unit)
        self.free.release(gpus)
        for node in {gpu.node for gpu in gpus}:
            self.on_node[node] = tuple(one for one in self.on_node[node] if one is not unit)

    def put(self, unit: _Unit) -> bool:
        """Wherever there is room; False if there is none."""
        gpus = self.free.find(unit.num_gpus, unit.near, unit.gpu_type)
        if gpus is not None:
            self.settle(unit, gpus)
        return gpus is not None

    def restarts(self, unit: _Unit) -> int:
        """Jobs that stay so far, and would restart if the unit were moved."""
        return unit.homes.count(self.gpus_of[unit])

    def cleared(self, node: int, num_gpus: int, movers: Sequence[_Unit]) -> tuple[_Packing, tuple[GpuId, ...]] | None:
        """The packing with GPUs of a node set aside, and which, once the movers have gone elsewhere; None if they cannot."""
        trial = self.copy()
        for unit in movers:
            trial.lift(unit)
        aside = trial.free.pick(node, num_gpus)
        trial.free.hold(aside)
        placed = all(trial.put(unit) for unit in sorted(movers, key=_num_gpus, reverse=True))
        return (trial, aside) if placed else None


def _packed(snapshot: Snapshot, units: Sequence[_Unit], *, keep: bool, migrate: bool) -> Placement:
    """All units placed, the largest first. ``keep``: those whose count did not change stay, unless they are in the way and
    ``migrate`` lets them move."""
    packing = _Packing(all_free(snapshot.cluster, snapshot.node_gpus), {}, [()] * len(snapshot.node_gpus))
    unplaced: list[str] = []
    spanned: set[int] = set()  # by jobs that stay

    def may_stay(unit: _Unit, home: tuple[GpuId, ...]) -> bool:
        free = packing.free
        if len(home) != unit.num_gpus or not free.are_free(home):
            return False
        if not of_type(snapshot.cluster, home, unit.gpu_type):
            return False
        used = {gpu.node for gpu in home}
        if len(used) > 1:
            if unit.num_gpus <= free.largest_of(unit.gpu_type) or used & spanned:
                return False
            spanned.update(used)
        return True

    if keep:
        # Where partners change, several may call one GPU their home. One of a pair stays on its own, and the other one joins
        # it there: who has but one home chooses first, pairs of two homes then go where they are in nobody's way.
        wanted = Counter(home for unit in units for home in set(unit.homes) if len(home) == unit.num_gpus)
        for unit in sorted(units, key=lambda unit: len(set(unit.homes))):
            home = next((one for one in sorted(unit.homes, key=lambda home: wanted[home]) if may_stay(unit, one)), None)
            if home is not None:
                packing.settle(unit, home)
    moving = [unit for unit in units if unit not in packing.gpus_of]
    # Those that are bound to a type first; the sort is stable: equal counts in order of submission.
    for unit in sorted(moving, key=lambda unit: (unit.gpu_type == ANY_GPU, -unit.num_gpus)):
        if packing.put(unit):
            continue
        roomier = _with_room(packing, unit) if migrate else None
        if roomier is None:
            unplaced += unit.job_ids
        else:
            packing = roomier
    allocation = {job_id: tuple(sorted(gpus)) for unit, gpus in packing.gpus_of.items() for job_id in unit.job_ids}
    return Placement(allocation, tuple(unplaced))


def _with_room(packing: _Packing, unit: _Unit) -> _Packing | None:
    """The packing with a place for one more unit, for which others leave the node where that costs fewest restarts.

    None if they cannot go anywhere.
    """
    if packing.free.num_free < unit.num_gpus:
        return None
    if unit.num_gpus > packing.free.largest_of(unit.gpu_type):
        found = (_with_room_on_many(packing, unit, nodes) for nodes in packing.free.parts(unit.gpu_type))
        return next((one for one in found if one is not None), None)
    nodes = [node for part in packing.free.parts(unit.gpu_type) for node in part]
    for node, movers in _by_cost(packing, nodes, lambda node: unit.num_gpus, unit):
        cleared = packing.cleared(node, unit.num_gpus, movers)
        if cleared is not None:
            roomier, aside = cleared
            roomier.free.release(aside)
            roomier.settle(unit, aside)
            return roomier
    return None


def _with_room_on_many(packing: _Packing, unit: _Unit, nodes: Sequence[int]) -> _Packing | None:
    """The same for a unit larger than a node: whole nodes are cleared until it finds its place. Nobody moves to a node that
    is empty already, since there are too few of them."""
    trial, sizes = packing.copy(), packing.free.sizes
    aside = [trial.free.pick(node, sizes[node]) for node in nodes if trial.free.free_in(node) == sizes[node] > 0]
    for gpus in aside:
        trial.free.hold(gpus)
    while True:
        for node, movers in _by_cost(trial, nodes, lambda node: sizes[node], unit):
            cleared = trial.cleared(node, sizes[node], movers) if movers else None
            if cleared is not None:
                break
        else:
            return None
        trial, gpus = cleared
        aside.append(gpus)
        enough = trial.copy()
        for gpus in aside:
            enough.free.release(gpus)
        if enough.put(unit):
            return enough


def _by_cost(
    packing: _Packing, nodes: Sequence[int], wanted: Callable[[int], int], unit: _Unit
) -> list[tuple[int, list[_Unit]]]:
    """Nodes of which so many GPUs can be had for a unit, and which others would move; those with the fewest restarts first.

    Only who lies on one node moves, and could find a place where the unit finds none: as it is smaller, or may go to another
    type of GPU. As few as will do: those that free most GPUs for a restart first, if they are not larger than what is
    missing.
    """
    found = []
    for node in nodes:
        missing = wanted(node) - packing.free.free_in(node)
        left = [
            one
            for one in packing.on_node[node]
            if (one.num_gpus < unit.num_gpus or one.gpu_type == ANY_GPU != unit.gpu_type)
            and num_nodes(packing.gpus_of[one]) == 1
        ]
        if wanted(node) > packing.free.sizes[node] or missing > sum(map(_num_gpus, left)):
            continue
        left.sort(key=lambda one: packing.restarts(one) / one.num_gpus)
        movers: list[_Unit] = []
        while missing > 0:
            one = next((one for one in left if one.num_gpus <= missing), None) or min(left, key=_num_gpus)
            left.remove(one)
            movers.append(one)
            missing -= one.num_gpus
        found.append((sum(map(packing.restarts, movers)), sum(map(_num_gpus, movers)), node, movers))
    return [(node, movers) for *_, node, movers in sorted(found, key=lambda entry: entry[:3])]


def _num_gpus(unit: _Unit) -> int:
    return unit.num_gpus


def num_nodes(gpus: Sequence[GpuId]) -> int:
    """Nodes that an allocation touches."""
    return len(gpus) if len(gpus) < 2 else len({gpu.node for gpu in gpus})


def of_type(cluster: ClusterSpec, gpus: Sequence[GpuId], gpu_type: str = ANY_GPU) -> bool:
    """Whether a job that names a type (or any) may lie on these GPUs: all are of one type, and of that."""
    if len(cluster.parts) == 1:
        return gpu_type == ANY_GPU or gpu_type in cluster.parts
    types = {cluster.node_types[gpu.node] for gpu in gpus}
    return len(types) == 1 and gpu_type in (ANY_GPU, *types)


def keeps_to_types(snapshot: Snapshot, plan: Plan) -> bool:
    """Whether the GPUs that the plan names are of one type for each job, and of the type chosen where one was."""
    cluster, gpus_of = snapshot.cluster, plan.gpus or {}
    if len(cluster.parts) == 1:
        return True
    named = ((gpus, plan.choices[job_id].config.gpu_type) for job_id, gpus in gpus_of.items() if job_id in plan.choices)
    return all(of_type(cluster, gpus, gpu_type) for gpus, gpu_type in named)
