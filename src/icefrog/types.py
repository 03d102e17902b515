"""The values that flow through a decision: Config + Estimate = Candidate; Snapshot -> Plan -> Allocation. All frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from icefrog.profile import Profile
from icefrog.spec import ClusterSpec, JobSpec

Json: TypeAlias = Any
"""A JSON value: what a policy may remember between rounds."""


class GpuId(NamedTuple):
    """One GPU: node index in the cluster, device index in the node."""

    node: int
    device: int


@dataclass(frozen=True, slots=True)
class Config:
    """(a, s, m, l): what a job runs with."""

    num_gpus: int
    batch_per_gpu: int
    accum_steps: int = 1
    frozen_layers: int = 0
    shared: bool = False

    @property
    def global_batch(self) -> int:
        """M = a * m * k, samples."""
        return self.num_gpus * self.batch_per_gpu * self.accum_steps


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a configuration is predicted to do."""

    step_s: float
    throughput: float  # T, samples/s
    psi: float  # frozen penalty, (0, 1]
    effective_progress: float  # E, full-layer samples/s
    mem_bytes: float  # peak, per GPU
    util_pct: float
    tta_s: float  # T_acc: age + remaining / E


@dataclass(frozen=True, slots=True)
class Candidate:
    """One option of one job."""

    config: Config
    estimate: Estimate


@dataclass(frozen=True, slots=True)
class GradientStats:
    """Per-layer statistics as last reported by the job; both of length L, per-sample units (S and |G|^2).

    For a frozen layer ``variance`` is the value last observed before it froze, so that one vector prices every depth.
    """

    variance: tuple[float, ...]
    sqr_norm: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class JobView:
    """What a policy may know of one unfinished job."""

    spec: JobSpec
    profile: Profile | None
    submit_s: float
    gpus: tuple[GpuId, ...]  # held now; empty while waiting
    shared: bool
    running: bool
    config: Config | None  # as last granted
    effective_samples: float
    remaining_samples: float | None  # P; None while the job has not said how large an epoch is
    frozen_layers: int
    stats: GradientStats | None
    attained_service_s: float  # GPU-seconds held so far; a sharer counts half
    waiting_since_s: float | None  # since when it holds no GPU
    restart_s: float  # what changing its allocation costs
    num_restarts: int

    @property
    def job_id(self) -> str:
        """The job's id."""
        return self.spec.job_id

    @property
    def num_gpus(self) -> int:
        """GPUs held now."""
        return len(self.gpus)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that one decision may depend on. ``jobs`` are the unfinished ones in order of submission."""

    now_s: float
    cluster: ClusterSpec
    jobs: tuple[JobView, ...]
    seed: int = 0
    memory: Json = None
    oracle_remaining_s: Mapping[str, float] | None = (
        None  # true service time left; only policies that say 'oracle' get it
    )


Candidates: TypeAlias = Mapping[str, tuple[Candidate, ...]]
"""job id -> its options: one exclusive candidate a GPU count, and a Pareto set of shared ones."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A policy's decision. A job that is in no entry of ``choices`` waits."""

    choices: Mapping[str, Candidate]
    pairs: tuple[tuple[str, str], ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)  # one for every unfinished job, waiting ones included
    migrate: bool = True  # whether running jobs may be moved (restarted elsewhere) so that others find a place
    memory: Json = None


Allocation: TypeAlias = Mapping[str, tuple[GpuId, ...]]
"""job id -> the GPUs it gets, sorted."""
