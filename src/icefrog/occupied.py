"""Which GPUs the granted jobs leave free, kept from one snapshot to the next: only jobs that moved are looked at."""

from __future__ import annotations

from collections.abc import Mapping

from icefrog.placement import FreeGpus, all_free
from icefrog.spec import ClusterSpec
from icefrog.types import GpuId


class OccupiedGpus:
    """Books of one cluster. Two jobs may be on one GPU (sharers); it is free when both have left."""

    def __init__(self) -> None:
        self._free = FreeGpus(())
        self._down: frozenset[int] | None = None
        self._held: dict[str, tuple[GpuId, ...]] = {}
        self._jobs_on: dict[tuple[GpuId, ...], int] = {}

    def update(self, cluster: ClusterSpec, down: frozenset[int], moved: Mapping[str, tuple[GpuId, ...]]) -> FreeGpus:
        """What is free now.

        Args:
            cluster: always the same.
            down: nodes out of service: nothing of them is free.
            moved: what every job that changed since the last call has now (none, if it is gone).

        Returns:
            Books that are nobody else's.

        Raises:
            ValueError: a GPU is held by jobs that do not hold the same ones.
        """
        if down != self._down:
            moved = {**self._held, **moved}
            self._down, self._held, self._jobs_on = down, {}, {}
            self._free = all_free(cluster, [0 if n in down else size for n, size in enumerate(cluster.gpus_per_node)])
        if down:
            moved = {job_id: tuple(gpu for gpu in gpus if gpu.node not in down) for job_id, gpus in moved.items()}
        changed = {job_id: gpus for job_id, gpus in moved.items() if self._held.get(job_id, ()) != gpus}
        for job_id in changed:
            if (before := self._held.pop(job_id, None)) is not None:
                self._leave(before)
        for job_id, gpus in changed.items():
            if gpus:
                self._held[job_id] = gpus
                self._enter(gpus)
        return self._free.copy()

    def _enter(self, gpus: tuple[GpuId, ...]) -> None:
        jobs_on = self._jobs_on.get(gpus, 0)
        if not jobs_on:
            self._free.hold(gpus)
        self._jobs_on[gpus] = jobs_on + 1

    def _leave(self, gpus: tuple[GpuId, ...]) -> None:
        jobs_on = self._jobs_on.pop(gpus) - 1
        if jobs_on:
            self._jobs_on[gpus] = jobs_on
        else:
            self._free.release(gpus)
