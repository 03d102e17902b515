"""The Pollux world: its jobs, and the scenario that replays a workload in it."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from icefrog.errors import UserError
from icefrog.executors.sim.pollux.application import MAX_GPUS, RULES, Application, NotMeasuredError
from icefrog.executors.sim.pollux.job import PolluxJob, WorldConfig
from icefrog.executors.sim.pollux.pricing import PolluxCandidates, packed
from icefrog.spec import BatchRule, ClusterSpec, FreezeRule, JobSpec
from icefrog.traces.trace import TraceJob

GPUS_PER_NODE = 4
"""The measurements are of such nodes."""


class PolluxWorld:
    """Implements :class:`icefrog.executors.sim.base.SimWorld`.

    Args:
        specs: jobs whose ``workload`` is an application of the artifact; in order of submission.
        apps: their measurements, by name.
        cluster: nodes of at most four GPUs.
        config: of the world.

    Raises:
        UserError: a node has more GPUs than were measured.
    """

    def __init__(
        self,
        specs: Sequence[JobSpec],
        apps: dict[str, Application],
        cluster: ClusterSpec,
        config: WorldConfig | None = None,
    ) -> None:
        _check_nodes(cluster)
        self.specs = tuple(specs)
        self.apps = apps
        self._cluster = cluster
        self._config = config or WorldConfig()

    @property
    def cluster(self) -> ClusterSpec:
        """The nodes."""
        return self._cluster

    @property
    def failures_per_gpu_h(self) -> float:
        """Rate of random crashes."""
        return self._config.failures_per_gpu_h

    def start_jobs(self) -> dict[str, PolluxJob]:
        """Every job as it is before it is submitted."""
        return {spec.job_id: PolluxJob(spec, self.apps[spec.workload or ""], self._config) for spec in self.specs}

    def rng(self, job_id: str, stream: int) -> np.random.Generator:
        """A generator of the job's own."""
        return np.random.default_rng([self._config.seed, zlib.crc32(job_id.encode()), stream])

    def candidates(self, active: Collection[str]) -> PolluxCandidates:
        """A fresh source of options; ``active``: the ids of the unfinished jobs."""
        return PolluxCandidates(self.apps, active)


def read_applications(data_dir: Path, names: Sequence[str] = tuple(RULES)) -> dict[str, Application]:
    """The measurements of some applications. Raises :class:`UserError`."""
    return {name: Application.read(data_dir, name) for name in dict.fromkeys(names)}


def pollux_specs(jobs: Sequence[TraceJob], apps: dict[str, Application], cluster: ClusterSpec) -> tuple[JobSpec, ...]:
    """The jobs of a workload file: application, requested GPUs and batch as given there.

    Raises:
        UserError: a job without application or batch, or one that was not measured with them; nodes that were not.
    """
    _check_nodes(cluster)
    return tuple(_spec(job, apps, cluster) for job in jobs)


def _check_nodes(cluster: ClusterSpec) -> None:
    if max(cluster.gpus_per_node) > GPUS_PER_NODE:
        raise UserError(
            f"the Pollux world was measured on nodes of up to {GPUS_PER_NODE} GPUs, the cluster is {cluster.label()}",
            "for example --cluster 16x4, the one of the publication",
        )


def _spec(job: TraceJob, apps: dict[str, Application], cluster: ClusterSpec) -> JobSpec:
    if job.application not in apps:
        raise UserError(
            f"job {job.job_id}: application {job.application or '(none)'!r} is none of the Pollux world's",
            f"a workload file (name,time,application,num_replicas,batch_size) with {', '.join(apps)}",
        )
    app = apps[job.application]
    batch, request = job.batch_size, job.num_gpus
    if batch is None or not app.init_batch <= batch <= app.max_batch:
        raise UserError(
            f"job {job.job_id}: {app.name} was not measured with a global batch of {batch}",
            f"batch_size from {app.init_batch} to {app.max_batch}",
        )
    try:
        app.times(packed(request, cluster), app.local_batch(batch, request).batch_per_gpu)
    except NotMeasuredError as error:
        raise UserError(f"job {job.job_id}: {error}", f"up to {app.max_gpus(batch)} GPUs for this batch") from error
    most = min(max(app.max_gpus(batch), app.max_gpus(app.max_batch)), MAX_GPUS, cluster.num_gpus)
    return JobSpec(
        name=job.job_id,
        gpus=tuple(sorted({*range(1, most + 1), request})),
        batch=BatchRule(**{"global": batch}),
        freeze=FreezeRule(rule="none"),
        max_epochs=app.epochs,
        workload=app.name,
        submit_s=job.submit_s,
        num_gpus=request,
    )
