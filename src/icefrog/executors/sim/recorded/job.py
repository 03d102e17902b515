"""A simulated job that costs what one recorded live cost, and ends at the end of an epoch, as live ones do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from icefrog.estimate.throughput import throughput
from icefrog.events import Grant, ProgressReported
from icefrog.executors.sim.job import SimJob
from icefrog.executors.sim.recorded.recording import Interval, JobRecording
from icefrog.executors.sim.truth import TrueJob, WorldConfig
from icefrog.profile import Profile
from icefrog.spec import ClusterSpec
from icefrog.types import GpuId

_SAME = 1.0 - 1e-6  # of the needed samples: the last epoch is not missed by a rounding error


@dataclass(frozen=True, slots=True)
class Cost:
    """Of being started and stopped, s."""

    up_s: float  # until the first sign of life
    warmup_s: float  # lost after it, in the first interval
    stop_s: float  # of the stop before it


class Pace:
    """True speed over that of the profile (1.0: as fast), from the intervals that were recorded."""

    def __init__(self, job: JobRecording) -> None:
        intervals = job.intervals or tuple(start.first for start in job.starts if start.first is not None)
        alone = [one for one in intervals if not one.grant.shared]
        found = [(one.grant.num_gpus, one.frozen_layers, _ratio(job.profile, one)) for one in alone or intervals]
        self._all = float(np.median([ratio for *_, ratio in found]))
        self._by_gpus = _medians([((gpus,), ratio) for gpus, _, ratio in found])
        self._by_depth = _medians([((gpus, depth), ratio) for gpus, depth, ratio in found])

    def ratio(self, num_gpus: int, frozen_layers: int) -> float:
        """At that depth where it was tried, else at that GPU count, else over all."""
        known = self._by_gpus.get((num_gpus,), self._all)
        return self._by_depth.get((num_gpus, frozen_layers), known)


def _ratio(profile: Profile, one: Interval) -> float:
    grant = one.grant
    promised = throughput(
        profile, grant.num_gpus, grant.num_nodes, grant.batch_per_gpu, one.frozen_layers, grant.accum_steps
    )
    return one.samples / one.seconds / float(promised)


def _medians(found: list[tuple[tuple[int, ...], float]]) -> dict[tuple[int, ...], float]:
    return {key: float(np.median([ratio for other, ratio in found if other == key])) for key in dict(found)}


class RecordedJob(SimJob):
    """As :class:`SimJob` (the same tuner, guards and books), but with measured costs.

    * Every start costs what starts cost live, the first too; the scheduler learns P0 when the job is up.
    * Speeds are those of the profile times what the recording was faster or slower. An interval is an epoch, validation and
      saving included.
    * It goes by the signal if it did live, by Eq. 3 otherwise.
    * It ends with the first epoch after which it has the effective samples that the live one had at its end. P0, which it
      and the scheduler reckon with, is larger where a target ended it.
    * Nobody knows what it costs before its first report, and no oracle what is left of it, as live.

    Args:
        recording: of the live job.
        truth: profile, curves, and the needed samples as ``total_samples``.
        cost: seconds of a start on so many GPUs.
        config, rng, cluster: as in :class:`SimJob`.
    """

    def __init__(
        self,
        recording: JobRecording,
        truth: TrueJob,
        cost: Callable[[int], Cost],
        config: WorldConfig,
        rng: Callable[[], np.random.Generator],
        cluster: ClusterSpec,
    ) -> None:
        super().__init__(truth, config, rng, cluster)
        self._cost = cost
        self._pace = Pace(recording)
        self._end_s = recording.end_s
        self._told_signal = any(one.signal for one in recording.seen)
        self._promised = float(truth.spec.max_epochs * truth.profile.samples_per_epoch)
        self._interval_samples = self._interval_end = float(truth.profile.samples_per_epoch)
        self._up = False
        self._was_up = False
        self._reported = False
        self._up_s = 0.0

    @property
    def total_samples(self) -> float | None:
        """P0, once it has told it; at its end, what it had then."""
        if self.effective >= self.truth.total_samples:
            return self.counted
        return self._promised if self._was_up else None

    def start(self, now_s: float, attempt: int, gpus: tuple[GpuId, ...], grant: Grant) -> None:
        """Hold the GPUs; be up, and compute, after what that took live."""
        first = self._starts == 0
        super().start(now_s, attempt, gpus, grant)
        cost = self._cost(grant.num_gpus)
        self._up = False
        self._up_s = now_s + cost.up_s + (0.0 if first else cost.stop_s)
        self._since_s = self._up_s + cost.warmup_s

    def regrant(self, now_s: float, grant: Grant) -> None:
        """Take new bounds, at recorded speeds."""
        super().regrant(now_s, grant)
        self._plain_per_s *= self._pace.ratio(grant.num_gpus, 0)
        depths = range(self._speed.shape[1])
        self._speed = self._speed * np.array([self._pace.ratio(grant.num_gpus, depth) for depth in depths])

    def _by_signal(self, grant: Grant) -> bool:
        """As it did live."""
        return self._told_signal

    def _true_worth(self) -> float:
        """The samples that it needed are by its own count; what its rule went by is all that is known of their worth."""
        return self.psi if self._told_signal else super()._true_worth()

    def remaining_s(self, now_s: float) -> float | None:
        """Nobody knows."""
        return None

    @property
    def _silent(self) -> bool:
        return False

    def next_event(self) -> tuple[float, bool]:
        """When it is up, when its epoch is over, or when it has left after the last one."""
        if not self._up:
            return self._up_s, False
        left_s = max((self._interval_end - self.samples) / self.rate.samples_per_s, 0.0)
        done = self.effective + left_s * self.rate.effective_per_s >= self.truth.total_samples * _SAME
        return self._since_s + left_s + (self._end_s if done else 0.0), done

    def end_interval(self) -> None:
        """It is up, or an epoch is over."""
        if self._up:
            super().end_interval()
            self._reported = True
        self._up = self._was_up = True

    def report(self, now_s: float) -> ProgressReported:
        """As every job's, with what a live one adds: P0, and from the first epoch on its profile."""
        told = {"total_samples": self._promised, "profile": self.truth.estimate if self._reported else None}
        return super().report(now_s).model_copy(update=told)
