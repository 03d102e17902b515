"""One simulated job: what the training process would do, computed instead of trained.

It keeps two books. The *true* one (samples that count, the variances as they were when layers froze) decides when the job
ends. The *reported* one holds what the job can know: its own noisy statistics and a counter that advances by the frozen
penalty that follows from them. The Layer Tuner reads only the second.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from icefrog.estimate import occupancy
from icefrog.estimate.throughput import step_s
from icefrog.estimate.tuner import TunerRule, TunerTable, max_frozen_layers, penalties
from icefrog.events import Grant, ProgressReported
from icefrog.executors.sim.truth import TrueJob, WorldConfig
from icefrog.profile import FloatArray
from icefrog.types import GpuId

_REPORTED_DIGITS = 4
_SAME_TIME_S = 1e-6
_LEAST_PSI = 1e-6  # a frozen depth with nothing left to learn still ends some day


@dataclass(slots=True)
class Rate:
    """Speeds while nothing changes."""

    samples_per_s: float = 0.0  # processed
    effective_per_s: float = 0.0  # that count, in truth
    counted_per_s: float = 0.0  # that count, as the job believes


class SimJob:
    """The state of one job between events. The executor calls; time is an argument.

    Args:
        truth: from the world.
        config: of the world.
        rng: for the sampling error of the job's statistics.
        gpu_mem_bytes: of the GPUs.
    """

    def __init__(self, truth: TrueJob, config: WorldConfig, rng: np.random.Generator, gpu_mem_bytes: float) -> None:
        self.truth = truth
        self.spec = truth.spec
        self._config = config
        self._rng = rng
        self._gpu_mem_bytes = gpu_mem_bytes
        self._num_layers = truth.profile.num_layers
        self._moves_batch = len(truth.spec.batch.options()) > 1
        self._interval_samples = _interval_samples(truth, config)
        self.effective = 0.0
        self.counted = 0.0
        self.samples = 0.0
        self._interval_end = self._interval_samples
        self._checkpoint = (0.0, 0.0, 0.0)
        self._stored_v: FloatArray = np.zeros(self._num_layers)  # true V of the frozen prefix, as it froze
        self._frozen_since = 0.0  # true progress when the boundary was put in force
        self._true_v = truth.variance(0.0, 0.0, 0)  # at the last look
        self._seen_v: FloatArray | None = None
        self._seen_g: FloatArray | None = None
        self.frozen = 0
        self.psi = 1.0
        self.reason = ""
        # The attempt.
        self.attempt = 0
        self.gpus: tuple[GpuId, ...] = ()
        self.grant: Grant | None = None
        self.generation = 0  # events scheduled for another generation are stale
        self.rate = Rate()
        self._starts = 0
        self._since_s = 0.0  # the books are right at this time
        self._speed: FloatArray = np.zeros(0)  # true samples/s by depth, alone
        self._believed: FloatArray = np.zeros(0)  # the same by the estimates

    @property
    def job_id(self) -> str:
        """The job's id."""
        return self.spec.job_id

    @property
    def total_samples(self) -> float:
        """P0, effective samples."""
        return self.truth.total_samples

    @property
    def reported_samples(self) -> float:
        """Effective samples done, as the job counts them."""
        return self.counted

    @property
    def holds(self) -> bool:
        """Whether an attempt holds GPUs."""
        return bool(self.gpus)

    # -- the attempt -------------------------------------------------------------------------------------------------------

    def start(self, now_s: float, attempt: int, gpus: tuple[GpuId, ...], grant: Grant) -> None:
        """Hold the GPUs; compute after the restart cost (none for the first start: the logged time contains it)."""
        self.attempt, self.gpus = attempt, gpus
        self._since_s = now_s + (self._config.restart_s if self._starts else 0.0)
        self._starts += 1
        self.regrant(now_s, grant)

    def regrant(self, now_s: float, grant: Grant) -> None:
        """Take new bounds: the tuner runs, as at every re-allocation."""
        self.grant = grant
        depths = np.arange(self._num_layers)
        time_s = step_s(
            self.truth.profile, grant.num_gpus, grant.num_nodes, grant.batch_per_gpu, depths, grant.accum_steps
        )
        self._speed = grant.global_batch / time_s
        self._believed = self._believed_speed(grant)
        self.tune()

    def leave(self) -> None:
        """Let the GPUs go. The books stay as they are."""
        self.gpus, self.grant = (), None
        self.generation += 1

    def save(self) -> None:
        """Write a checkpoint (at a step boundary, wherever that is)."""
        self._checkpoint = (self.effective, self.counted, self.samples)

    def fall_back(self) -> None:
        """The attempt died: the last checkpoint holds."""
        self.effective, self.counted, self.samples = self._checkpoint
        self._interval_end = self._next_boundary()

    # -- time --------------------------------------------------------------------------------------------------------------

    def advance(self, now_s: float) -> None:
        """Bring the books to ``now_s`` at the present rate."""
        passed_s = now_s - self._since_s
        if passed_s <= 0.0 or not self.holds:
            return
        self.samples += self.rate.samples_per_s * passed_s
        self.effective = min(self.effective + self.rate.effective_per_s * passed_s, self.truth.total_samples)
        self.counted = min(self.counted + self.rate.counted_per_s * passed_s, self.truth.total_samples)
        self._since_s = now_s

    def set_rate(self, sharing: float) -> None:
        """Recompute the speeds; ``sharing``: true speed beside the present partner, 1.0 = alone. Call after advance."""
        assert self.grant is not None
        samples = float(self._speed[self.frozen]) * sharing
        worth, believed = 1.0, 1.0
        if self.grant.global_batch != self.spec.batch.initial:
            worth = self._efficiency(self._true_v, self.truth.sqr_norm(self.progress))
            believed = self._efficiency(self._seen_v, self._seen_g)
        self.rate = Rate(samples, samples * self._true_psi() * worth, samples * self.psi * believed)

    def next_event(self) -> tuple[float, bool]:
        """When the interval or the job ends, and whether it is the job. Events never lie in the past."""
        interval_s = (self._interval_end - self.samples) / self.rate.samples_per_s
        finish_s = (self.truth.total_samples - self.effective) / self.rate.effective_per_s
        return self._since_s + max(min(interval_s, finish_s), 0.0), finish_s <= interval_s + _SAME_TIME_S

    def finish(self) -> None:
        """The true samples are all there."""
        self.effective = self.truth.total_samples

    def end_interval(self) -> None:
        """A tuning point: look at the gradients, checkpoint, tune."""
        self.samples = self._interval_end
        self._interval_end = self._next_boundary()
        self._observe()
        self.tune()
        self.save()

    # -- the Layer Tuner ---------------------------------------------------------------------------------------------------

    def tune(self) -> None:
        """argmax of E over the depths within the grant's bounds, at the granted batch, on what the job itself has seen."""
        assert self.grant is not None
        low, high = self._bounds(self.grant)
        psi = penalties(self.truth.estimate, self._seen_v)
        depth, self.reason = low, "the grant leaves one depth"
        if low < high:
            depth, self.reason = self._best_depth(psi, low, high)
        if depth != self.frozen:
            self._move_boundary(depth)
        self.psi = float(psi[depth]) if np.isfinite(psi[depth]) else 1.0

    def _bounds(self, grant: Grant) -> tuple[int, int]:
        own = self.spec.freeze
        high = max_frozen_layers(self._num_layers, own.max_fraction) if own.rule == "tuner" else 0
        if grant.max_frozen_layers is not None:
            high = min(high, grant.max_frozen_layers)
        return min(grant.min_frozen_layers, high), high

    def _best_depth(self, psi: FloatArray, low: int, high: int) -> tuple[int, str]:
        if self._seen_v is None:
            return low, "no gradient statistics yet"
        progress = np.zeros(high + 1)
        progress[low:] = self._believed[low : high + 1] * np.nan_to_num(psi[low : high + 1], nan=0.0)
        best = int(progress.argmax())
        if progress[best] <= 0.0:
            return low, "no depth makes progress by the estimates"
        held = min(self.frozen, high)
        if 0.0 < progress[best] <= progress[held] * (1.0 + self._config.hysteresis):
            best = held
        return best, f"{best} frozen: psi {psi[best]:.3f}, E {progress[best]:.4g} against {progress[low]:.4g} at {low}"

    def _believed_speed(self, grant: Grant) -> FloatArray:
        """Samples/s by depth as the Layer Tuner tabulates them for the granted (a, m, k); 0 where memory forbids."""
        deepest = self._num_layers - 1
        rule = TunerRule(
            ((grant.num_gpus, grant.num_nodes),),
            (grant.global_batch,),
            self.spec.batch.initial,
            deepest,
            self._gpu_mem_bytes,
        )
        table = TunerTable.of(self.truth.estimate, rule)
        rows = np.flatnonzero(
            (table.batch_per_gpu[0] == grant.batch_per_gpu) & (table.accum_steps[0] == grant.accum_steps)
        )
        return table.throughput[0, rows[0]] if rows.size else np.zeros(deepest + 1)

    @property
    def progress(self) -> float:
        """True training progress, 0..1."""
        return self.effective / self.truth.total_samples

    def _look(self) -> FloatArray:
        """The true variances now; those of frozen layers as they froze."""
        values = self.truth.variance(self.progress, self._frozen_since, self.frozen)
        values[: self.frozen] = self._stored_v[: self.frozen]
        return values

    def _move_boundary(self, depth: int) -> None:
        # Layers that freeze keep the variance of this moment. Layers that open are live again: the truth at once, the
        # job's own view of them at the next tuning point, when fresh steps have replaced what was stored.
        if depth > self.frozen:
            self._stored_v[self.frozen : depth] = self._look()[self.frozen : depth]
        self.frozen, self._frozen_since = depth, self.progress
        self._true_v = self._look()

    def _observe(self) -> None:
        self._true_v = self._look()
        noise = np.exp(self._config.stats_noise * self._rng.standard_normal(self._num_layers))
        fresh = self._true_v * noise
        if self._seen_v is not None:
            fresh[: self.frozen] = self._seen_v[: self.frozen]
        self._seen_v = fresh
        if self._moves_batch:
            norm = self.truth.sqr_norm(self.progress)
            if self._seen_g is not None:
                norm[: self.frozen] = self._seen_g[: self.frozen]
            self._seen_g = norm

    def _true_psi(self) -> float:
        """psi of the truth (Eq. 3), taken as constant until the next look at the gradients."""
        if self.frozen == 0:
            return 1.0
        kept = float(self._true_v[self.frozen :].sum())
        return max(kept / (float(self._true_v[: self.frozen].sum()) + kept), _LEAST_PSI) if kept > 0.0 else _LEAST_PSI

    def _efficiency(self, variance: FloatArray | None, sqr_norm: FloatArray | None) -> float:
        """EFF(M) = (phi + M0) / (phi + M); 1 where phi is not known."""
        assert self.grant is not None
        first, now = self.spec.batch.initial, self.grant.global_batch
        if variance is None or sqr_norm is None:
            return 1.0
        signal = float(sqr_norm.sum())
        phi = float(variance.sum()) / signal if signal > 0 else np.inf
        return 1.0 if np.isinf(phi) else (phi + first) / (phi + now)

    def _next_boundary(self) -> float:
        return float((np.floor(self.samples / self._interval_samples + 1e-9) + 1.0) * self._interval_samples)

    # -- what it says ------------------------------------------------------------------------------------------------------

    def report(self, now_s: float) -> ProgressReported:
        """The report of a tuning point. Statistics are sent where someone can use them: to freeze, or to move the batch."""
        assert self.grant is not None
        useful = self.grant.max_frozen_layers != 0 or self._moves_batch
        mem_bytes, util_pct = self.true_occupancy()
        return ProgressReported(
            time_s=now_s,
            job_id=self.job_id,
            attempt=self.attempt,
            epoch=int(self.samples / self.truth.profile.samples_per_epoch + 1e-9),
            effective_samples=self.counted,
            frozen_layers=self.frozen,
            psi=round(self.psi, 6),
            throughput=round(self.rate.samples_per_s, 3),
            mem_bytes=round(mem_bytes, -6),
            util_pct=round(util_pct, 1),
            variance=_short(self._seen_v) if useful else None,
            sqr_norm=_short(self._seen_g) if self._moves_batch else None,
            reason=self.reason,
        )

    def true_occupancy(self) -> tuple[float, float]:
        """(peak memory in bytes, utilisation in percent) on each of its GPUs as it runs now."""
        assert self.grant is not None
        profile, m = self.truth.profile, self.grant.batch_per_gpu
        return float(occupancy.mem_bytes(profile, m, self.frozen)), float(occupancy.util_pct(profile, m, self.frozen))


def _short(values: FloatArray | None) -> tuple[float, ...] | None:
    """A few significant digits: statistics are noisy, and logs are long."""
    return None if values is None else tuple(float(f"{value:.{_REPORTED_DIGITS}g}") for value in values.tolist())


def _interval_samples(truth: TrueJob, config: WorldConfig) -> float:
    points = min(max(truth.spec.max_epochs, config.min_tuning_points), config.max_tuning_points)
    return truth.total_samples / points
