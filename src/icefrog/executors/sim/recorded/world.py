"""The world of recorded jobs, and how a live run is simulated in it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from icefrog.errors import UserError
from icefrog.executors.sim.recorded.job import Cost, RecordedJob
from icefrog.executors.sim.recorded.recording import JobRecording, RecordedCurves, Recording, StartCosts
from icefrog.executors.sim.truth import TrueJob, WorldConfig
from icefrog.rng import generator
from icefrog.simulate import Scenario, SimSettings
from icefrog.spec import ClusterSpec, JobSpec

_EXACT = WorldConfig(noise=0.0, occupancy_noise=0.0, stats_noise=0.0)
"""Profiles and statistics are the reported ones: their errors are those of the live run."""


class RecordedWorld:
    """Jobs as one run recorded them, submitted as in another (or the same).

    Args:
        costs: the run in which they were measured.
        arrivals: the run that is simulated: of it, the submissions only.
        cluster: of both.

    Raises:
        UserError: a job of ``arrivals`` was not recorded.
    """

    failures_per_gpu_h = 0.0

    def __init__(self, costs: Recording, arrivals: Recording, cluster: ClusterSpec) -> None:
        if missing := [job_id for job_id in arrivals.jobs if job_id not in costs.jobs]:
            raise UserError(f"job {missing[0]} was not recorded", "give two runs of the same jobs")
        self.cluster = cluster
        self.specs: tuple[JobSpec, ...] = tuple(
            job.spec.model_copy(update={"submit_s": job.submit_s}) for job in arrivals.jobs.values()
        )
        self._costs = costs
        jobs = costs.jobs.values()
        self._up_s = StartCosts.of([(start.num_gpus, start.up_s) for job in jobs for start in job.starts])
        self._warmup_s = StartCosts.of([pair for job in jobs for pair in job.warmups_s()])
        self._stop_s = _median([seconds for job in jobs for seconds in job.stops_s])

    def start_jobs(self) -> Mapping[str, RecordedJob]:
        """Every job as it is before it is submitted."""
        return {spec.job_id: self._job(spec) for spec in self.specs}

    def rng(self, job_id: str, stream: int) -> np.random.Generator:
        """Nothing is drawn that matters."""
        return generator(0, zlib.crc32(job_id.encode()), stream)

    def _job(self, spec: JobSpec) -> RecordedJob:
        job = self._costs.jobs[spec.job_id]
        truth = TrueJob(
            spec=spec,
            profile=job.profile,
            estimate=job.profile,
            curves=RecordedCurves.of(job),
            split=np.ones(job.profile.num_layers),
            total_samples=job.needed_samples,
        )
        return RecordedJob(
            job, truth, partial(self._cost, job), _EXACT, partial(self.rng, spec.job_id, 1), self.cluster
        )

    def _cost(self, job: JobRecording, num_gpus: int) -> Cost:
        """The job's own where it was started on so many GPUs, else what starts on as many took in that run."""
        ups = StartCosts.of([(start.num_gpus, start.up_s) for start in job.starts])
        warmups = StartCosts.of(job.warmups_s())
        up_s = (ups if num_gpus in ups.by_gpus else self._up_s).seconds(num_gpus)
        warmup_s = (warmups if num_gpus in warmups.by_gpus else self._warmup_s).seconds(num_gpus)
        return Cost(up_s or 0.0, warmup_s or 0.0, _median(list(job.stops_s)) or self._stop_s or 0.0)


def _median(values: list[float]) -> float | None:
    return float(np.median(values)) if values else None


def recorded_scenario(costs: Recording, arrivals: Recording, cluster: ClusterSpec) -> Scenario:
    """Arguments and errors as in :class:`RecordedWorld`. The scheduler knows what it was told at submission."""
    world = RecordedWorld(costs, arrivals, cluster)
    told = {job_id: job.submitted_profile for job_id, job in arrivals.jobs.items() if job.submitted_profile is not None}
    return Scenario(cluster, world, len(world.specs), told)


def recorded_settings(arrivals: Recording, round_s: float, restart_s: float, seed: int = 0) -> SimSettings:
    """Those of the live run: its rounds, on its grid, and what its controller took a restart to cost."""
    settings = SimSettings(seed=seed, round_s=round_s, restart_s=restart_s, check=True)
    return replace(settings, first_round_s=arrivals.first_round_s % round_s)
