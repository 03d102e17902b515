"""Placing changed jobs among those that stay: together where they fit, else over nodes, else with fewer GPUs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from icefrog.types import GpuId


class Packer:
    """Nodes and who is on them. At most one job that spans nodes is on any node (Pollux, section 4.2).

    Args:
        node_gpus: GPUs in service of every node (``Snapshot.node_gpus``).
    """

    def __init__(self, node_gpus: Sequence[int]) -> None:
        self._free = [list(range(size)) for size in node_gpus]
        self._spanned = [False] * len(node_gpus)
        self._largest = max(node_gpus, default=0)
        self.gpus: dict[str, tuple[GpuId, ...]] = {}
        """What every job has."""

    def keep(self, job_id: str, gpus: tuple[GpuId, ...]) -> bool:
        """A job stays where it is. False, and nothing done, if its GPUs are out of service or its nodes spanned."""
        nodes = {gpu.node for gpu in gpus}
        if not all(gpu.node < len(self._free) and gpu.device in self._free[gpu.node] for gpu in gpus):
            return False
        if len(nodes) > 1 and any(self._spanned[node] for node in nodes):
            return False
        self._settle(job_id, gpus)
        return True

    def place_all(
        self,
        counts: Mapping[str, int],
        smaller: Callable[[str, int], int | None],
        spans: Callable[[str, int, int], bool] = lambda job_id, count, together: True,
    ) -> None:
        """Find places, the largest jobs first (of equals in the order given).

        A job goes to the fullest node that fits it; if there is none, to the emptiest nodes that no other job spans; if they
        do not suffice, it shrinks.

        Args:
            counts: GPUs of each job.
            smaller: the job's next count below another, None if there is none.
            spans: whether ``count`` GPUs over several nodes are worth more to a job than ``together`` on one (asked of jobs
                that could fit in one).
        """
        for job_id in sorted(counts, key=lambda job_id: -counts[job_id]):
            count: int | None = counts[job_id]
            while count is not None and not self._place(job_id, count, spans):
                count = smaller(job_id, count)

    def _place(self, job_id: str, count: int, spans: Callable[[str, int, int], bool]) -> bool:
        fits = [node for node, free in enumerate(self._free) if len(free) >= count]
        if fits:
            node = min(fits, key=lambda node: (len(self._free[node]), node))
            self._settle(job_id, tuple(GpuId(node, device) for device in self._free[node][:count]))
            return True
        usable = [node for node, free in enumerate(self._free) if free and not self._spanned[node]]
        if sum(len(self._free[node]) for node in usable) < count:
            return False
        together = max(map(len, self._free))
        if count <= self._largest and together and not spans(job_id, count, together):
            return False
        gpus: list[GpuId] = []
        for node in sorted(usable, key=lambda node: (-len(self._free[node]), node)):
            gpus += [GpuId(node, device) for device in self._free[node][: count - len(gpus)]]
        self._settle(job_id, tuple(gpus))
        return True

    def _settle(self, job_id: str, gpus: tuple[GpuId, ...]) -> None:
        self.gpus[job_id] = gpus
        nodes = {gpu.node for gpu in gpus}
        for gpu in gpus:
            self._free[gpu.node].remove(gpu.device)
        if len(nodes) > 1:
            for node in nodes:
                self._spanned[node] = True
