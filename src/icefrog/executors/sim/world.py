"""The truth of a simulation: what jobs really cost, how they really converge. No policy ever reads it.

The job log is the truth: a job run as it was logged (its requested GPUs, nothing frozen, alone) takes the logged time. The
*estimates* that the scheduler and the job's own tuner work with are that truth with seeded errors. Decisions and sources:
``docs/notes/simulator-world.md``.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from weakref import WeakValueDictionary

import numpy as np

from icefrog.candidates import min_nodes
from icefrog.copying import copied
from icefrog.estimate.tuner import TunerRule, TunerTable
from icefrog.executors.sim.job import SimJob
from icefrog.executors.sim.truth import Curves, TrueJob, WorldConfig, convergence_of
from icefrog.lazymap import LazyMap
from icefrog.profile import (
    ComputeCurve,
    FloatArray,
    GpuCost,
    OccupancyParams,
    Parallel,
    Pipelined,
    Profile,
    Replicated,
    Sharded,
    ThroughputParams,
    altered,
)
from icefrog.rng import Streams, generator
from icefrog.spec import ClusterSpec, JobSpec

INTERFERENCE = 0.1
"""Speed that a sharer loses to a partner which keeps the GPU fully busy, beyond what the GPU's capacity takes."""


class World:
    """True jobs, by id.

    Args:
        specs: the jobs.
        profiles: catalogue profile by job id.
        curves: gradient statistics by job id.
        cluster: decides over how many nodes a logged request spread.
        config: seed and errors.
    """

    def __init__(
        self,
        specs: tuple[JobSpec, ...],
        profiles: Mapping[str, Profile],
        curves: Mapping[str, Curves],
        cluster: ClusterSpec,
        config: WorldConfig,
    ) -> None:
        self.config = config
        self.cluster = cluster
        self.specs = specs
        self._specs = {spec.job_id: spec for spec in specs}
        self._profiles = profiles
        self._curves = curves
        self._errors = Streams(config.seed, self._specs, 0)  # of the estimates
        self._as_logged: dict[tuple[int, ...], tuple[Profile, AsLogged]] = {}
        # Of the logarithms of the errors that a job draws: of its throughput parameters, its memory and its utilisation.
        self._deviations = np.array([config.noise] * (_NUM_FACTORS + 1) + [config.occupancy_noise] * 2)
        self._no_split: dict[int, FloatArray] = {}  # by number of layers
        self.jobs: Mapping[str, TrueJob] = LazyMap(self._specs, self._job, WeakValueDictionary())
        """By id; made anew where nobody has kept it."""
        self.estimates: Mapping[str, Profile] = LazyMap(self._specs, lambda job_id: self.jobs[job_id].estimate)
        """Estimated profile by job id: all that the scheduler is told."""

    @property
    def failures_per_gpu_h(self) -> float:
        """Rate of random crashes."""
        return self.config.failures_per_gpu_h

    def start_jobs(self) -> Mapping[str, SimJob]:
        """Every job as it is before it is submitted."""
        cluster = self.cluster
        return LazyMap(self._specs, lambda i: SimJob(self.jobs[i], self.config, partial(self.rng, i, 1), cluster))

    def rng(self, job_id: str, stream: int) -> np.random.Generator:
        """A generator of the job's own, so that what a policy does to one job cannot change the luck of another."""
        return generator(self.config.seed, zlib.crc32(job_id.encode()), stream)

    def _job(self, job_id: str) -> TrueJob:
        spec, profile, curves = self._specs[job_id], self._profiles[job_id], self._curves[job_id]
        rng = self._errors[job_id]
        logged = self._logged(spec, profile)
        truth = _calibrated(spec, profile, logged)
        margin = np.inf if logged.mem_bytes is None else logged.gpu_mem_bytes / max(logged.mem_bytes, 1.0)
        # Drawn even without noise: later draws stay the same.
        errors = np.exp(self._deviations * rng.standard_normal(_NUM_FACTORS + 3)).tolist()
        estimate = altered(
            truth,
            throughput=_with_factors(truth.throughput, errors[:_NUM_FACTORS], errors[_NUM_FACTORS]),
            parallel=self._perturbed_parallel(job_id, truth.parallel),
            occupancy=_occupancy_with_factors(truth.occupancy, min(errors[-2], margin), errors[-1]),
            by_gpu_type={t: self._perturbed_cost(job_id, t, cost) for t, cost in truth.by_gpu_type.items()},
        )
        split = self._split(profile.num_layers, rng)
        total = float(spec.max_epochs * profile.samples_per_epoch)
        convergence = convergence_of(job_id, curves, profile.num_layers, self.config)
        return TrueJob(spec, truth, estimate, curves, split, total, request_nodes(spec, self.cluster), convergence)

    def _split(self, num_layers: int, rng: np.random.Generator) -> FloatArray:
        """Factors on the catalogue's variances; the last draw of a job, so that nobody misses it where there are none."""
        if self.config.split_noise:
            return np.asarray(np.exp(self.config.split_noise * rng.standard_normal(num_layers)))
        if num_layers not in self._no_split:
            self._no_split[num_layers] = np.ones(num_layers)
        return self._no_split[num_layers]

    def _perturbed_parallel(self, job_id: str, truth: Parallel) -> Parallel:
        """One error for all of its communication; plain replicas draw none."""
        if isinstance(truth, Replicated) or self.config.noise == 0.0:
            return truth
        draw = self.rng(job_id, zlib.crc32(b"parallel")).standard_normal()
        return scaled_parallel(truth, float(np.exp(self.config.noise * draw)))

    def _perturbed_cost(self, job_id: str, gpu_type: str, cost: GpuCost) -> GpuCost:
        """Errors of its own for each type."""
        rng = self.rng(job_id, zlib.crc32(gpu_type.encode()))
        errors = np.exp(self.config.noise * rng.standard_normal(_NUM_FACTORS + 1)).tolist()
        noisy = _with_factors(cost.throughput, errors[:_NUM_FACTORS], errors[_NUM_FACTORS])
        factor = float(np.exp(self.config.occupancy_noise * rng.standard_normal()))
        a, b, c, d = cost.util_pct
        return GpuCost(throughput=noisy, util_pct=(a * factor, b * factor, c * factor, d * factor))

    def _logged(self, spec: JobSpec, profile: Profile) -> AsLogged:
        """One for all jobs of a task with the same request and batch: their profiles differ in the length of an epoch."""
        parts = (id(profile.throughput), id(profile.parallel), id(profile.occupancy), id(profile.layers))
        key = (*parts, profile.min_local_batch, profile.max_local_batch, spec.requested_gpus, spec.batch.initial)
        known = self._as_logged.get(key)
        if known is None:
            known = (profile, as_logged(spec, profile, self.cluster))  # with the profile, the ids stay taken
            self._as_logged[key] = known
        return known[1]


@dataclass(frozen=True, slots=True)
class AsLogged:
    """A job as it ran: at its requested count and initial batch, nothing frozen, alone."""

    samples_per_s: float
    """Of the fastest way that fits; 0: there is none."""
    mem_bytes: float | None
    """Of the leanest way that fits, on each GPU; None: there is none."""
    gpu_mem_bytes: float = 0.0
    """Of the GPUs that it ran on."""


def as_logged(spec: JobSpec, profile: Profile, cluster: ClusterSpec) -> AsLogged:
    """What the profile says of the job as it was logged: on the type with the most GPUs of those that it fits."""
    for gpu_type, part in cluster.parts.items():
        placement = (spec.requested_gpus, request_nodes(spec, part))
        rule = TunerRule((placement,), (spec.batch.initial,), spec.batch.initial, 0, part.gpu_mem_bytes)
        table = TunerTable.of(profile.on(gpu_type), rule)
        if table.legal.any():
            fastest, leanest = float(table.throughput.max()), float(table.mem_bytes[table.legal].min())
            return AsLogged(fastest, leanest, part.gpu_mem_bytes)
    return AsLogged(0.0, None)


def calibrated(spec: JobSpec, profile: Profile, cluster: ClusterSpec) -> Profile:
    """The profile with all times scaled so that P0 samples take the logged time at the requested count, nothing frozen.

    Unchanged for a job without a logged time, or whose initial batch cannot run on the requested count.
    """
    return _calibrated(spec, profile, as_logged(spec, profile, cluster))


def _calibrated(spec: JobSpec, profile: Profile, logged: AsLogged) -> Profile:
    if spec.duration_s is None or logged.samples_per_s <= 0.0:
        return profile
    factor = spec.duration_s * logged.samples_per_s / (spec.max_epochs * profile.samples_per_epoch)
    others = {
        gpu_type: altered(cost, throughput=scaled(cost.throughput, factor))
        for gpu_type, cost in profile.by_gpu_type.items()
    }
    return altered(
        profile,
        throughput=scaled(profile.throughput, factor),
        parallel=scaled_parallel(profile.parallel, factor),
        by_gpu_type=others,
    )


def request_nodes(spec: JobSpec, cluster: ClusterSpec) -> int:
    """Over how many nodes the job spread when it was logged: as few as hold its request."""
    gpus = spec.requested_gpus
    return min_nodes(cluster, gpus) or -(-gpus // max(cluster.gpus_per_node))


def scaled(params: ThroughputParams, factor: float) -> ThroughputParams:
    """Every time ``factor`` times as long: T_iter is homogeneous in them."""
    return _with_factors(params, [factor] * _NUM_FACTORS)


def scaled_parallel(parallel: Parallel, factor: float) -> Parallel:
    """The same of the times that the kind of parallelism adds."""
    match parallel:
        case Sharded():
            gather = altered(parallel.gather, **{name: time * factor for name, time in parallel.gather})
            return altered(parallel, gather=gather, gather_alpha_s=parallel.gather_alpha_s * factor)
        case Pipelined():
            link = altered(parallel.link, **{name: time * factor for name, time in parallel.link})
            return altered(parallel, link=link)
    return parallel


_NUM_FACTORS = 11


def _with_factors(params: ThroughputParams, factors: list[float], flop_gamma_factor: float = 1.0) -> ThroughputParams:
    f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10 = factors
    sync = params.sync
    changed_sync = {
        "intra_alpha_s": sync.intra_alpha_s * f4,
        "intra_beta_s": sync.intra_beta_s * f5,
        "inter_alpha_s": sync.inter_alpha_s * f6,
        "inter_beta_s": sync.inter_beta_s * f7,
        "pair_beta_s": sync.pair_beta_s * f8,
    }
    return altered(
        params,
        fwd=_with_curve(params.fwd, f0, f1),
        bwd=_with_curve(params.bwd, f2, f3),
        sync=copied(sync, changed_sync),
        flop_alpha_s=params.flop_alpha_s * f9,
        flop_gamma=params.flop_gamma * flop_gamma_factor,
        sync_alpha_s=params.sync_alpha_s * f10,
    )


def _with_curve(curve: ComputeCurve, alpha: float, beta: float) -> ComputeCurve:
    values = {"alpha_s": curve.alpha_s * alpha, "beta_s": curve.beta_s * beta, "smooth": curve.smooth}
    return copied(curve, values)


def _occupancy_with_factors(params: OccupancyParams, mem: float, util: float) -> OccupancyParams:
    a, b, c, d = params.mem_bytes
    e, f, g, h = params.util_pct
    return altered(
        params, mem_bytes=(a * mem, b * mem, c * mem, d * mem), util_pct=(e * util, f * util, g * util, h * util)
    )


def sharing_speed(own_util_pct: float, other_util_pct: float) -> float:
    """True speed of a sharer, 1.0 = alone: less by INTERFERENCE where the partner is busy, and by capacity above 100 %.

    Both jobs' demands together cannot exceed the GPU: above 100 % each gets its part of it. Below, kernels of the two still
    meet in caches and on the memory bus, the more the busier the partner is.
    """
    total = max(own_util_pct + other_util_pct, 1e-9)
    return min(1.0, 100.0 / total) * (1.0 - INTERFERENCE * other_util_pct / 100.0)
