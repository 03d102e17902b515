"""What the world knows of its jobs, and its settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from icefrog.errors import UserError
from icefrog.estimate.boundary import Guards
from icefrog.executors.sim.convergence import VARIANCE_RATIO, Convergence, MeasuredWorth
from icefrog.profile import FloatArray, Profile
from icefrog.spec import JobSpec


class Curves(Protocol):
    """Gradient statistics of a model by training progress (effective samples / P0, 0..1), per-sample units."""

    def variance(self, progress: float, frozen_start: float | None = None, frozen_depth: float = 0.0) -> FloatArray:
        """V = S by layer, shape (L,), where the first ``frozen_depth`` (0..1) of the layers froze at ``frozen_start``."""
        ...

    def sqr_norm(self, progress: float) -> FloatArray:
        """|G|^2 by layer, shape (L,)."""
        ...


@runtime_checkable
class SignalCurves(Curves, Protocol):
    """Of a model of which the signal was measured, too."""

    def signal(self, progress: float) -> FloatArray:
        """Shares of G . P G by layer, shape (L,), P the optimizer's preconditioner."""
        ...


@runtime_checkable
class StudiedCurves(SignalCurves, Protocol):
    """Of a model of which the worth of frozen steps was measured as well."""

    def worth(self, depth: float, start: float) -> float:
        """Measured, of a step with that share of the layers frozen since that progress, 0..1."""
        ...


@dataclass(frozen=True, slots=True)
class WorldConfig:
    """Settings of the world. Errors are standard deviations of the natural logarithm of estimate / truth."""

    seed: int = 0
    restart_s: float = 60.0
    """What every start but a job's first costs it: no progress, GPUs held."""
    noise: float = 0.05
    """Error of each throughput parameter of the estimates."""
    occupancy_noise: float = 0.05
    """Error of the estimated memory and of the estimated utilisation (one factor each)."""
    stats_noise: float = 0.05
    """Sampling error of every layer's variance, and of its squared gradient norm, at every tuning point."""
    split_noise: float = 0.0
    """How far a job's true per-layer variances stray from the catalogue's (one factor for each layer and job)."""
    measured_convergence: float = 0.0
    """How far the truth of progress lies from Eq. 3 (0) towards the measured worth of frozen steps (1), in the logarithm."""
    extra_steps: float = 0.0
    """Share of steps that frozen training needs beyond the measured worth; of no effect where Eq. 3 is the truth."""
    failures_per_gpu_h: float = 0.0
    """Rate of random crashes."""
    guards: Guards = field(default_factory=Guards)
    """When a simulated job moves its boundary: the runtime's own rule (no metric is simulated, so nothing stalls)."""
    min_tuning_points: int = 20
    max_tuning_points: int = 100
    """Tuning points of a job: its epochs, within these bounds (short jobs tune every K steps, long ones every K epochs)."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class TrueJob:
    """What the world knows of one job."""

    spec: JobSpec
    profile: Profile  # the true costs
    estimate: Profile  # what scheduler and job believe
    curves: Curves
    split: FloatArray  # factor on the catalogue's curves, shape (L,)
    total_samples: float  # P0
    request_nodes: int = 1  # nodes that the requested GPUs spread over
    convergence: Convergence = VARIANCE_RATIO

    def variance(self, progress: float, frozen_since: float, frozen_layers: int) -> FloatArray:
        """True V by layer, shape (L,), where the boundary has been at ``frozen_layers`` since that progress."""
        if frozen_layers == 0:
            return np.asarray(self.curves.variance(progress)) * self.split
        depth = frozen_layers / len(self.split)
        return np.asarray(self.curves.variance(progress, frozen_since, depth)) * self.split

    def sqr_norm(self, progress: float) -> FloatArray:
        """True |G|^2 by layer, shape (L,)."""
        return np.asarray(self.curves.sqr_norm(progress)) * self.split

    def signal(self, progress: float) -> FloatArray:
        """True shares of G . P G by layer, shape (L,), of the run without freezing."""
        if not isinstance(self.curves, SignalCurves):
            raise _unstudied(self.spec.job_id)
        values = self.curves.signal(progress) * self.split
        return np.asarray(values / values.sum())


def convergence_of(job_id: str, curves: Curves, num_layers: int, config: WorldConfig) -> Convergence:
    """What the settings make the truth of a job's progress.

    Raises:
        UserError: a setting out of its range, or curves of which too little was measured.
    """
    if not 0.0 <= config.measured_convergence <= 1.0:
        raise UserError(
            f"measured_convergence: {config.measured_convergence:g} is not allowed", "from 0 (Eq. 3) to 1 (as measured)"
        )
    if config.measured_convergence == 0.0:
        return VARIANCE_RATIO
    table = studied(job_id, curves).worth
    return MeasuredWorth(table, num_layers, config.measured_convergence, config.extra_steps)


def studied(job_id: str, curves: Curves) -> StudiedCurves:
    """The curves, if they are of that kind.

    Raises:
        UserError: they are not.
    """
    if not isinstance(curves, StudiedCurves):
        raise _unstudied(job_id)
    return curves


def _unstudied(job_id: str) -> UserError:
    return UserError(
        f"job {job_id}: neither its signal nor the worth of its frozen steps was measured",
        "use workloads of the catalogue, the convergence eq3, and penalties other than signal",
    )
