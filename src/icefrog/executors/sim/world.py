"""The truth of a simulation: what jobs really cost, how they really converge. No policy ever reads it.

The job log is the truth: a job run as it was logged (its requested GPUs, nothing frozen, alone) takes the logged time. The
*estimates* that the scheduler and the job's own tuner work with are that truth with seeded errors. Decisions and sources:
``docs/notes/simulator-world.md``.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np

from icefrog.candidates import min_nodes
from icefrog.estimate.tuner import TunerRule, TunerTable
from icefrog.executors.sim.job import SimJob
from icefrog.executors.sim.truth import Curves, TrueJob, WorldConfig
from icefrog.profile import ComputeCurve, OccupancyParams, Profile, SyncCurve, ThroughputParams
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
        self.jobs = {spec.job_id: self._job(spec, profiles[spec.job_id], curves[spec.job_id]) for spec in specs}

    @property
    def estimates(self) -> dict[str, Profile]:
        """Estimated profile by job id: all that the scheduler is told."""
        return {job_id: job.estimate for job_id, job in self.jobs.items()}

    @property
    def failures_per_gpu_h(self) -> float:
        """Rate of random crashes."""
        return self.config.failures_per_gpu_h

    def start_jobs(self) -> dict[str, SimJob]:
        """Every job as it is before it is submitted."""
        mem_bytes = self.cluster.gpu_mem_bytes
        return {i: SimJob(job, self.config, self.rng(i, 1), mem_bytes) for i, job in self.jobs.items()}

    def rng(self, job_id: str, stream: int) -> np.random.Generator:
        """A generator of the job's own, so that what a policy does to one job cannot change the luck of another."""
        return np.random.default_rng([self.config.seed, zlib.crc32(job_id.encode()), stream])

    def _job(self, spec: JobSpec, profile: Profile, curves: Curves) -> TrueJob:
        rng = self.rng(spec.job_id, 0)
        truth = calibrated(spec, profile, self.cluster)
        estimate = truth.model_copy(
            update={
                "throughput": _perturbed(truth.throughput, self.config.noise, rng),
                "occupancy": _perturbed_occupancy(
                    truth.occupancy, self.config.occupancy_noise, rng, _memory_margin(spec, truth, self.cluster)
                ),
            }
        )
        split = np.exp(self.config.split_noise * rng.standard_normal(profile.num_layers))
        total = float(spec.max_epochs * profile.samples_per_epoch)
        return TrueJob(spec, truth, estimate, curves, split, total, _request_nodes(spec, self.cluster))


def calibrated(spec: JobSpec, profile: Profile, cluster: ClusterSpec) -> Profile:
    """The profile with all times scaled so that P0 samples take the logged time at the requested count, nothing frozen.

    Unchanged for a job without a logged time, or whose initial batch cannot run on the requested count.
    """
    if spec.duration_s is None:
        return profile
    table = _as_logged(spec, profile, cluster)
    fastest = float(table.throughput.max()) if table.throughput.size else 0.0
    if fastest <= 0.0:
        return profile
    factor = spec.duration_s * fastest / (spec.max_epochs * profile.samples_per_epoch)
    return profile.model_copy(update={"throughput": scaled(profile.throughput, factor)})


def _as_logged(spec: JobSpec, profile: Profile, cluster: ClusterSpec) -> TunerTable:
    """The ways to run the job at its requested count and initial batch, nothing frozen."""
    placement = (spec.requested_gpus, _request_nodes(spec, cluster))
    rule = TunerRule((placement,), (spec.batch.initial,), spec.batch.initial, 0, cluster.gpu_mem_bytes)
    return TunerTable.of(profile, rule)


def _request_nodes(spec: JobSpec, cluster: ClusterSpec) -> int:
    gpus = spec.requested_gpus
    return min_nodes(cluster, gpus) or -(-gpus // max(cluster.gpus_per_node))


def _memory_margin(spec: JobSpec, truth: Profile, cluster: ClusterSpec) -> float:
    """How far the estimate of its memory may be too high before a job, which did run, would seem never to fit."""
    table = _as_logged(spec, truth, cluster)
    if not table.legal.any():
        return np.inf
    return cluster.gpu_mem_bytes / max(float(table.mem_bytes[table.legal].min()), 1.0)


def scaled(params: ThroughputParams, factor: float) -> ThroughputParams:
    """Every time ``factor`` times as long: T_iter is homogeneous in them."""
    return _with_factors(params, [factor] * _NUM_FACTORS)


_NUM_FACTORS = 11


def _with_factors(params: ThroughputParams, factors: list[float]) -> ThroughputParams:
    f = iter(factors)
    fwd, bwd, sync = params.fwd, params.bwd, params.sync
    return params.model_copy(
        update={
            "fwd": ComputeCurve(alpha_s=fwd.alpha_s * next(f), beta_s=fwd.beta_s * next(f), smooth=fwd.smooth),
            "bwd": ComputeCurve(alpha_s=bwd.alpha_s * next(f), beta_s=bwd.beta_s * next(f), smooth=bwd.smooth),
            "sync": SyncCurve(
                intra_alpha_s=sync.intra_alpha_s * next(f),
                intra_beta_s=sync.intra_beta_s * next(f),
                inter_alpha_s=sync.inter_alpha_s * next(f),
                inter_beta_s=sync.inter_beta_s * next(f),
                pair_beta_s=sync.pair_beta_s * next(f),
            ),
            "flop_alpha_s": params.flop_alpha_s * next(f),
            "sync_alpha_s": params.sync_alpha_s * next(f),
        }
    )


def _perturbed(params: ThroughputParams, noise: float, rng: np.random.Generator) -> ThroughputParams:
    draws = rng.standard_normal(_NUM_FACTORS + 1)  # drawn even without noise: later draws stay the same
    if noise == 0.0:
        return params
    factors = np.exp(noise * draws).tolist()
    noisy = _with_factors(params, factors[:_NUM_FACTORS])
    return noisy.model_copy(update={"flop_gamma": params.flop_gamma * factors[_NUM_FACTORS]})


def _perturbed_occupancy(
    params: OccupancyParams, noise: float, rng: np.random.Generator, most: float
) -> OccupancyParams:
    mem, util = np.exp(noise * rng.standard_normal(2)).tolist()
    mem = min(mem, most)
    a, b, c, d = params.mem_bytes
    e, f, g, h = params.util_pct
    return OccupancyParams(
        mem_bytes=(a * mem, b * mem, c * mem, d * mem), util_pct=(e * util, f * util, g * util, h * util)
    )


def sharing_speed(own_util_pct: float, other_util_pct: float) -> float:
    """True speed of a sharer, 1.0 = alone: less by INTERFERENCE where the partner is busy, and by capacity above 100 %.

    Both jobs' demands together cannot exceed the GPU: above 100 % each gets its part of it. Below, kernels of the two still
    meet in caches and on the memory bus, the more the busier the partner is.
    """
    total = max(own_util_pct + other_util_pct, 1e-9)
    return min(1.0, 100.0 / total) * (1.0 - INTERFERENCE * other_util_pct / 100.0)
