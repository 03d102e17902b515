"""Placement by spreading, as the Pollux artifact's Tiresias and Optimus place their jobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from icefrog.types import GpuId


class Spread:
    """The free GPUs of each node, handed out from the node that has most of them.

    Args:
        node_gpus: GPUs in service of every node (``Snapshot.node_gpus``); all are free at first.
        held: what running jobs hold and keep.
    """

    def __init__(self, node_gpus: Sequence[int], held: Iterable[Sequence[GpuId]] = ()) -> None:
        taken: set[GpuId] = {gpu for gpus in held for gpu in gpus}
        self._free = [
            [device for device in range(size) if (node, device) not in taken] for node, size in enumerate(node_gpus)
        ]
        self.num_free = sum(map(len, self._free))

    def take(self, num_gpus: int) -> tuple[GpuId, ...] | None:
        """GPUs in the order of ranks, or None, and nothing taken, if fewer are free.

        The node with the most free GPUs (the first of equals) gives as many as it can, then the next, until they suffice.
        """
        if num_gpus > self.num_free:
            return None
        self.num_free -= num_gpus
        gpus: list[GpuId] = []
        counts = [len(free) for free in self._free]
        while len(gpus) < num_gpus:
            node = counts.index(max(counts))
            part = min(counts[node], num_gpus - len(gpus))
            gpus += [GpuId(node, device) for device in self._free[node][:part]]
            del self._free[node][:part]
            counts[node] -= part
        return tuple(gpus)
