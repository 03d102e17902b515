"""What a simulation's world and its jobs are to the executor. A world holds the truth; no policy ever reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from icefrog.events import Grant, ProgressReported
from icefrog.spec import ClusterSpec, JobSpec
from icefrog.types import GpuId


class SimulatedJob(Protocol):
    """The state of one job between events. The executor calls; time is an argument and never goes back."""

    spec: JobSpec
    attempt: int
    gpus: tuple[GpuId, ...]
    generation: int
    """Events scheduled for another generation are stale."""

    @property
    def job_id(self) -> str:
        """The job's id."""
        ...

    @property
    def holds(self) -> bool:
        """Whether an attempt holds GPUs."""
        ...

    @property
    def total_samples(self) -> float | None:
        """P0, effective samples; None where the world has no such notion."""
        ...

    @property
    def reported_samples(self) -> float | None:
        """Effective samples done, as the job itself counts them."""
        ...

    def start(self, now_s: float, attempt: int, gpus: tuple[GpuId, ...], grant: Grant) -> None:
        """Hold the GPUs and begin, after whatever a start costs in this world."""
        ...

    def regrant(self, now_s: float, grant: Grant) -> None:
        """Take new bounds on the same GPUs."""
        ...

    def leave(self) -> None:
        """Let the GPUs go. The books stay as they are."""
        ...

    def save(self) -> None:
        """Write a checkpoint."""
        ...

    def fall_back(self) -> None:
        """The attempt died: the last checkpoint holds."""
        ...

    def advance(self, now_s: float) -> None:
        """Bring the books to ``now_s`` at the present rate."""
        ...

    def set_rate(self, sharing: float) -> None:
        """Recompute the speed; ``sharing``: true speed beside the present partner, 1.0 = alone. Called after advance."""
        ...

    def next_event(self) -> tuple[float, bool]:
        """When the job next has something to say, and whether that is its end. Never in the past."""
        ...

    def finish(self, now_s: float) -> float:
        """The end has come; returns the time that counts as the end: now, or a moment ago."""
        ...

    def end_interval(self) -> None:
        """The time of :meth:`next_event` has come, and it was not the end."""
        ...

    def report(self, now_s: float) -> ProgressReported | None:
        """What it says then; None: nothing that anybody needs."""
        ...

    def remaining_s(self, now_s: float) -> float | None:
        """True service time left, were the job to run as it was logged, for oracles; None: the world has no such notion."""
        ...

    def true_occupancy(self) -> tuple[float, float]:
        """(peak memory in bytes, utilisation in percent) on each of its GPUs as it runs now."""
        ...


class SimWorld(Protocol):
    """A world: a fresh set of jobs for every run, and generators whose draws no policy can disturb."""

    @property
    def cluster(self) -> ClusterSpec:
        """The nodes."""
        ...

    @property
    def specs(self) -> Sequence[JobSpec]:
        """The jobs, in order of submission."""
        ...

    @property
    def failures_per_gpu_h(self) -> float:
        """Rate of random crashes."""
        ...

    def start_jobs(self) -> Mapping[str, SimulatedJob]:
        """Every job by id, as it is before it is submitted. They may be made when they are asked for."""
        ...

    def rng(self, job_id: str, stream: int) -> np.random.Generator:
        """A generator of the job's own."""
        ...
