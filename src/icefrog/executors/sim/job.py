"""One simulated job: what the training process would do, computed instead of trained.

It keeps two books. The *true* one (samples that count, the variances as they were when layers froze) decides when the job
ends. The *reported* one holds what the job can know: its own noisy statistics and a counter that advances by the frozen
penalty that follows from them. The Layer Tuner reads only the second.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from icefrog.candidates import ARGMAX_RULES
from icefrog.estimate import freezeout, occupancy
from icefrog.estimate.boundary import Standing, dwells, imposed_depth, is_worth_moving
from icefrog.estimate.full_layers import full_step_s
from icefrog.estimate.progress import offered_worth, signal_worth
from icefrog.estimate.throughput import step_s
from icefrog.estimate.tuner import TunerRule, TunerTable, efficiency, max_frozen_layers, penalties
from icefrog.events import Grant, ProgressReported
from icefrog.executors.sim.convergence import Prefix, moved
from icefrog.executors.sim.truth import TrueJob, WorldConfig
from icefrog.profile import FloatArray
from icefrog.spec import ClusterSpec
from icefrog.types import GpuId

_REPORTED_DIGITS = 4
_SAME_TIME_S = 1e-6
_NOTHING: FloatArray = np.zeros((0, 0))
_SIMULATED_RULES = (*ARGMAX_RULES, "freezeout")  # jobs that freeze by another rule of their own train whole here


@dataclass(slots=True)
class Rate:
    """Speeds while nothing changes."""

    samples_per_s: float = 0.0  # processed
    effective_per_s: float = 0.0  # that count, in truth
    counted_per_s: float = 0.0  # that count, as the job believes


class SimJob:
    """The state of one job between events. The executor calls; time is an argument.

    A job whose grant leaves it nothing to tune (*plain*: no freezing, one batch) looks at no statistics, and where nobody
    reads its reports either, nothing happens to it between its start and its end.

    Args:
        truth: from the world.
        config: of the world.
        rng: makes the generator for the sampling error of the job's statistics.
        cluster: says of which type the GPUs are that the job is given.
    """

    def __init__(
        self, truth: TrueJob, config: WorldConfig, rng: Callable[[], np.random.Generator], cluster: ClusterSpec
    ) -> None:
        self.truth = truth
        self.spec = truth.spec
        self.job_id = truth.spec.job_id
        self._config = config
        self._make_rng = rng
        self._cluster = cluster
        self._num_layers = truth.profile.num_layers
        self._promised = truth.total_samples  # P0, as the job believes
        self._interval_samples = _interval_samples(truth, config)
        self.effective = 0.0
        self.counted = 0.0
        self.samples = 0.0
        self._interval_end = self._interval_samples
        self._checkpoint = (0.0, 0.0, 0.0)
        self._frozen_since = 0.0  # true progress when the boundary was put in force
        self._prefix: Prefix = ()
        self._moved_at = -np.inf  # samples processed when it last moved
        self._seen_v: FloatArray | None = None
        self._seen_g: FloatArray | None = None
        self._seen_signal: FloatArray | None = None  # shares of G . P G; of frozen layers as they froze
        self.frozen = 0
        self.psi = 1.0
        self.reason = ""
        # The attempt.
        self.attempt = 0
        self.gpus: tuple[GpuId, ...] = ()
        self.grant: Grant | None = None
        self._true, self._estimate = truth.profile, truth.estimate  # on the type of its GPUs
        self._gpu_mem_bytes = cluster.gpu_mem_bytes  # of its GPUs
        self.generation = 0  # events scheduled for another generation are stale
        self.rate = Rate()
        self._starts = 0
        self._since_s = 0.0  # the books are right at this time
        self._ways: tuple[tuple[int, int], ...] = ()  # (m, k) that the grant allows
        self._way = 0  # the one in force
        self._batches: tuple[int, ...] = ()  # global batch of each, samples
        self._speed: FloatArray = _NOTHING  # true samples/s by way and depth, alone
        self._believed: FloatArray = _NOTHING  # the same by the estimates; 0: does not fit
        self._plain = False  # the grant leaves nothing to tune
        self._plain_per_s = 0.0  # true samples/s then, alone

    @property
    def total_samples(self) -> float | None:
        """P0, effective samples."""
        return self._promised

    @property
    def reported_samples(self) -> float:
        """Effective samples done, as the job counts them."""
        return self.counted

    @property
    def holds(self) -> bool:
        """Whether an attempt holds GPUs."""
        return bool(self.gpus)

    # Needed by jobs that freeze or move their batch only, and costly in a trace of many others.

    @cached_property
    def _rng(self) -> np.random.Generator:
        return self._make_rng()

    @cached_property
    def _stored_v(self) -> FloatArray:
        """True V of the frozen prefix, as it froze."""
        return np.zeros(self._num_layers)

    @cached_property
    def _true_v(self) -> FloatArray:
        """True V at the last look."""
        return self.truth.variance(0.0, 0.0, 0)

    # -- the attempt -------------------------------------------------------------------------------------------------------

    def start(self, now_s: float, attempt: int, gpus: tuple[GpuId, ...], grant: Grant) -> None:
        """Hold the GPUs; compute after the restart cost (none for the first start: the logged time contains it)."""
        self.attempt, self.gpus = attempt, gpus
        self._take_type(grant)
        self._since_s = now_s + (self._config.restart_s if self._starts else 0.0)
        self._starts += 1
        self.regrant(now_s, grant)

    def _take_type(self, grant: Grant) -> None:
        """The costs on the GPUs that it holds. Where a policy made it span types, all wait for the slowest."""
        nodes = {gpu.node for gpu in self.gpus}
        types = sorted({self._cluster.node_types[node] for node in nodes})
        gpu_type = types[0] if len(types) == 1 else max(types, key=lambda t: self._granted_s(t, grant))
        self._true, self._estimate = self.truth.profile.on(gpu_type), self.truth.estimate.on(gpu_type)
        self._gpu_mem_bytes = min(self._cluster.node_mem_bytes[node] for node in nodes)

    def _granted_s(self, gpu_type: str, grant: Grant) -> float:
        m, k = grant.batch_per_gpu, grant.accum_steps
        return float(step_s(self.truth.profile.on(gpu_type), grant.num_gpus, grant.num_nodes, m, 0, k))

    def regrant(self, now_s: float, grant: Grant) -> None:
        """Take new bounds: the tuner runs, as at every re-allocation."""
        self.grant = grant
        self._plain = self.frozen == 0 and not grant.elastic_batch and not self._may_freeze(grant)
        if self._plain:
            self._run_plainly(grant)
        else:
            self._weigh_ways(grant)
            self.tune()

    def _may_freeze(self, grant: Grant) -> bool:
        """Whether it may come to that: a FreezeOut schedule that does not pay freezes nothing."""
        if grant.freezing == "freezeout" and grant.min_frozen_layers == 0:
            return self._schedule_of_its_own.t_0 < 1.0
        return grant.freezing != "none"

    def _run_plainly(self, grant: Grant) -> None:
        """One way to run, all layers."""
        m, k = grant.batch_per_gpu, grant.accum_steps
        batch = grant.num_gpus * m * k
        self._ways, self._way, self._batches = ((m, k),), 0, (batch,)
        self._plain_per_s = batch / full_step_s(self._true, grant.num_gpus, grant.num_nodes, m, k)
        self.psi, self.reason = 1.0, "the grant leaves one depth"

    def _weigh_ways(self, grant: Grant) -> None:
        """The speed of every way to run that the grant allows."""
        granted = (grant.batch_per_gpu, grant.accum_steps)
        # A sharer fits beside its partner with the batch that was priced, so it does not move it.
        moves = grant.elastic_batch and not grant.shared
        batches = self.spec.batch.options() if moves else (grant.global_batch,)
        table = self._table(((grant.num_gpus, grant.num_nodes),), batches)
        ways = list(zip(table.batch_per_gpu[0].tolist(), table.accum_steps[0].tolist(), strict=True))
        rows = [row for row, way in enumerate(ways) if way[0] > 0 and (moves or way == granted)]
        believed = table.throughput[0, rows]
        self._ways = tuple(ways[row] for row in rows)
        if granted not in self._ways:
            self._ways = (granted, *self._ways)
            believed = np.vstack([np.zeros((1, self._num_layers)), believed])
        self._way, self._believed = self._ways.index(granted), believed
        m, k = (np.array(column)[:, None] for column in zip(*self._ways, strict=True))
        depths = np.arange(self._num_layers)
        self._batches = tuple(grant.num_gpus * m * k for m, k in self._ways)
        self._speed = grant.num_gpus * m * k / step_s(self._true, grant.num_gpus, grant.num_nodes, m, depths, k)

    def leave(self) -> None:
        """Let the GPUs go. The books stay as they are."""
        self.gpus, self.grant = (), None
        self.generation += 1

    def save(self) -> None:
        """Write a checkpoint (at a step boundary, wherever that is)."""
        self._checkpoint = (self.effective, self.counted, self.samples)

    def fall_back(self) -> None:
        """The attempt died: the last checkpoint holds. Tuning points at which nothing happened were checkpoints, too."""
        if self._silent:
            since = max(self._next_boundary() - self._interval_samples - self._checkpoint[2], 0.0)
            worth = self.rate.effective_per_s / self.rate.samples_per_s
            effective, counted, samples = self._checkpoint
            self._checkpoint = effective + since * worth, counted + since * worth, samples + since
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
        alone = self._plain_per_s if self._plain else float(self._speed[self._way, self.frozen])
        samples = alone * sharing
        worth, believed = 1.0, 1.0
        if self._batches[self._way] != self.spec.batch.initial:
            worth = float(self._efficiency(self._true_v, self.truth.sqr_norm(self.progress))[self._way])
            believed = float(self._efficiency(self._seen_v, self._seen_g)[self._way])
        self.rate = Rate(samples, samples * self._true_worth() * worth, samples * self.psi * believed)

    def remaining_s(self, now_s: float) -> float | None:
        """True service time left, were it to run as it was logged; for a job without a logged time, samples left."""
        running_s = max(now_s - self._since_s, 0.0) if self.holds else 0.0
        total = self.truth.total_samples
        left = max(total - self.effective - self.rate.effective_per_s * running_s, 0.0)
        return left if self.spec.duration_s is None else self.spec.duration_s * left / total

    @property
    def _silent(self) -> bool:
        """Whether it neither tunes nor reports."""
        return self._plain and self.grant is not None and not self.grant.reports

    def next_event(self) -> tuple[float, bool]:
        """When the interval or the job ends, and whether it is the job. Events never lie in the past."""
        if self._silent:
            left = self.truth.total_samples - self.effective
            return self._since_s + max(left / self.rate.effective_per_s, 0.0), True
        interval_s = (self._interval_end - self.samples) / self.rate.samples_per_s
        finish_s = (self.truth.total_samples - self.effective) / self.rate.effective_per_s
        return self._since_s + max(min(interval_s, finish_s), 0.0), finish_s <= interval_s + _SAME_TIME_S

    def finish(self, now_s: float) -> float:
        """The true samples are all there."""
        self.effective = self.truth.total_samples
        return now_s

    def end_interval(self) -> None:
        """A tuning point: look at the gradients, checkpoint, tune."""
        self.samples = self._interval_end
        self._interval_end = self._next_boundary()
        if not self._plain:
            self._observe()
            self.tune()
        self.save()

    # -- the Layer Tuner ---------------------------------------------------------------------------------------------------

    def tune(self) -> None:
        """argmax of E over the depths and batches that the grant allows, on what the job itself has seen."""
        assert self.grant is not None
        low, high = self._bounds(self.grant)
        psi = self._penalties(self.grant)
        depth, way, self.reason = low, self._way, "the grant leaves one depth"
        scheduled = "freezeout" in (self.grant.freezing, self.spec.freeze.rule)
        if scheduled:
            low, high = self._scheduled(low, high)
            depth, self.reason = low, f"FreezeOut's schedule at {self.counted / self._promised:.0%}"
        if low < high or (len(self._ways) > 1 and self._seen_g is not None):
            depth, way, self.reason = self._guarded(self._offered(psi, self.grant, low), low, high)
        self._way = way
        if depth != self.frozen:
            self._move_boundary(depth)
            self._moved_at = self.samples
        self.psi = float(psi[depth]) if np.isfinite(psi[depth]) else 1.0
        if scheduled:
            self.psi = self.truth.convergence.as_tuned(self._prefix, self._true_v, self.psi)

    def _penalties(self, grant: Grant) -> FloatArray:
        """psi of every depth as the job believes it, shape (L + 1,)."""
        if self._seen_signal is not None and self._by_signal(grant):
            return signal_worth(self._seen_signal)
        return penalties(self._estimate, self._seen_v)

    def _offered(self, psi: FloatArray, grant: Grant, low: int) -> FloatArray:
        """psi of the depths that its rule looks at, NaN of the others; shape (L + 1,)."""
        if self._seen_signal is None or not self._by_signal(grant):
            return psi
        return offered_worth(self._seen_signal, low)

    def _by_signal(self, grant: Grant) -> bool:
        """Whether it goes by the signal's share, as its rule or the policy has it, and not by Eq. 3 or a schedule."""
        rule = self.spec.freeze.rule
        by_penalty = grant.freezing in ("tuner", "signal")
        return by_penalty and (rule == "progress" or (rule == "auto" and grant.freezing == "signal"))

    def _scheduled(self, low: int, high: int) -> tuple[int, int]:
        """The one depth that the schedule leaves: it never opens a layer again."""
        depth = max(self._schedule_of_its_own.depth(self.counted / self._promised, self._num_layers), self.frozen, low)
        depth = min(depth, high)
        return depth, depth

    @cached_property
    def _schedule_of_its_own(self) -> freezeout.Schedule:
        """FreezeOut's, the best at the job's request and first batch, on the curves of the run without freezing.

        The world's own truth: more than any live system could know when a job starts. It favours the policies that use it.
        """
        table = self._table(((self.spec.requested_gpus, self.truth.request_nodes),), (self.spec.batch.initial,))
        deepest = max_frozen_layers(self._num_layers, self.spec.freeze.max_fraction)
        speed = table.throughput[0].max(axis=0, initial=0.0)[: deepest + 1]
        penalty = self.truth.convergence.schedule_penalty(lambda progress: self.truth.variance(progress, 0.0, 0))
        return freezeout.tuned(speed, self._num_layers, penalty)

    def _bounds(self, grant: Grant) -> tuple[int, int]:
        own = self.spec.freeze
        high = max_frozen_layers(self._num_layers, own.max_fraction) if own.rule in _SIMULATED_RULES else 0
        if grant.max_frozen_layers is not None:
            high = min(high, grant.max_frozen_layers)
        return min(grant.min_frozen_layers, high), high

    def _guarded(self, psi: FloatArray, low: int, high: int) -> tuple[int, int, str]:
        """(depth, way, reason): the best, as far as the guards let it."""
        steps = (self.samples - self._moved_at) / float(self._batches[self._way])
        now = Standing(self.frozen, low, self.counted / self._promised, steps)
        guards = self._config.guards
        imposed = imposed_depth(guards, now)
        if imposed is not None and low < high:
            depth, way, _ = self._best(psi, imposed[0], imposed[0])
            return depth, way, imposed[1]
        depth, way, reason = self._best(psi, low, high)
        if dwells(guards, now, depth):
            held = min(max(self.frozen, low), high)
            return held, self._way, "dwells: the last move is too recent"
        return depth, way, reason

    def _best(self, psi: FloatArray, low: int, high: int) -> tuple[int, int, str]:
        """(depth, way) of the largest E; what is in force stays unless that gains more than the hysteresis."""
        if self._seen_v is None:
            return low, self._way, "no gradient statistics yet"
        worth = np.where(np.isnan(psi[low : high + 1]), 0.0, psi[low : high + 1]) if low < high else np.ones(1)
        progress = self._believed[:, low : high + 1] * worth
        if len(self._ways) > 1:
            progress = progress * self._efficiency(self._seen_v, self._seen_g)[:, None]
        best = divmod(int(progress.argmax()), progress.shape[1])
        if progress[best] <= 0.0:
            return low, self._way, "no depth makes progress by the estimates"
        held = self._way, min(max(self.frozen, low), high) - low
        if not is_worth_moving(self._config.guards, progress[best], progress[held]):
            best = held
        way, depth = best[0], best[1] + low
        against = f"E {progress[best]:.4g} against {progress[way, 0]:.4g} at {low}"
        batch = f", batch {self._batches[way]}" if len(self._ways) > 1 else ""
        penalty = 1.0 if np.isnan(psi[depth]) else psi[depth]
        return depth, way, f"{depth} frozen{batch}: psi {penalty:.3f}, {against}"

    def _table(self, placements: tuple[tuple[int, int], ...], batches: tuple[int, ...]) -> TunerTable:
        """Every way to run as the Layer Tuner tabulates it, on the estimates."""
        rule = TunerRule(placements, batches, self.spec.batch.initial, self._num_layers - 1, self._gpu_mem_bytes)
        return TunerTable.of(self._estimate, rule)

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
        self._prefix = moved(self._prefix, depth, self.progress)
        self._true_v = self._look()

    def _observe(self) -> None:
        self._true_v = self._look()
        fresh = self._true_v * self._sampling_error()
        if self._seen_v is not None:
            fresh[: self.frozen] = self._seen_v[: self.frozen]
        self._seen_v = fresh
        if self.grant is not None and self.grant.elastic_batch:
            norm = self.truth.sqr_norm(self.progress) * self._sampling_error()
            if self._seen_g is not None:
                norm[: self.frozen] = self._seen_g[: self.frozen]
            self._seen_g = norm
        if self.grant is not None and self._by_signal(self.grant):
            self._seen_signal = self._look_at_signal()

    def _look_at_signal(self) -> FloatArray:
        """Frozen layers keep the share that they had when they froze; the others divide the rest as without freezing."""
        live = (self.truth.signal(self.progress) * self._sampling_error())[self.frozen :]
        kept = self._seen_signal[: self.frozen] if self._seen_signal is not None else np.zeros(0)
        if len(kept) < self.frozen:  # frozen under another rule
            kept = self.truth.signal(self.progress)[: self.frozen]
        return np.concatenate((kept, live / live.sum() * max(1.0 - float(kept.sum()), 0.0)))

    def _sampling_error(self) -> FloatArray:
        """Factors on what one look at the gradients tells of each layer, shape (L,)."""
        return np.exp(self._config.stats_noise * self._rng.standard_normal(self._num_layers))

    def _true_worth(self) -> float:
        """Of a sample, since layers are frozen."""
        return self.truth.convergence.worth(self._prefix, self._true_v) if self._prefix else 1.0

    def _efficiency(self, variance: FloatArray | None, sqr_norm: FloatArray | None) -> FloatArray:
        """EFF(M) = (phi + M0) / (phi + M) of every way; 1 where phi is not known."""
        if variance is None or sqr_norm is None:
            return np.ones(len(self._batches))
        signal = float(sqr_norm.sum())
        if signal <= 0.0:
            return np.ones(len(self._batches))
        phi = float(variance.sum()) / signal
        return efficiency(phi, self.spec.batch.initial, self._batches)

    def _next_boundary(self) -> float:
        return (math.floor(self.samples / self._interval_samples + 1e-9) + 1.0) * self._interval_samples

    # -- what it says ------------------------------------------------------------------------------------------------------

    def report(self, now_s: float) -> ProgressReported:
        """The report of a tuning point. Statistics are sent where someone can use them: to freeze, or to move the batch."""
        assert self.grant is not None
        moves = self.grant.elastic_batch
        useful = self.grant.max_frozen_layers != 0 or moves
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
            sqr_norm=_short(self._seen_g) if moves else None,
            signal=_short(self._seen_signal) if useful else None,
            reason=self.reason,
        )

    def true_occupancy(self) -> tuple[float, float]:
        """(peak memory in bytes, utilisation in percent) on each of its GPUs as it runs now."""
        assert self.grant is not None
        profile, m = self._true, self._ways[self._way][0]
        return float(occupancy.mem_bytes(profile, m, self.frozen)), float(occupancy.util_pct(profile, m, self.frozen))


def _short(values: FloatArray | None) -> tuple[float, ...] | None:
    """A few significant digits: statistics are noisy, and logs are long."""
    return None if values is None else tuple(float(f"{value:.{_REPORTED_DIGITS}g}") for value in values.tolist())


def _interval_samples(truth: TrueJob, config: WorldConfig) -> float:
    points = min(max(truth.spec.max_epochs, config.min_tuning_points), config.max_tuning_points)
    return truth.total_samples / points
