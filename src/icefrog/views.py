"""What a policy may know of the jobs: their views, of which only those are made anew that something happened to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from icefrog.jobstate import GRANTED, JobState
from icefrog.occupied import OccupiedGpus
from icefrog.spec import ClusterSpec
from icefrog.types import Config, GpuId, JobView, JobViews


def view(job: JobState, default_restart_s: float) -> JobView:
    """What a policy may know of the job now.

    Args:
        job: its state.
        default_restart_s: what a change of allocation costs it, while that was not measured.
    """
    grant = job.grant
    config = None
    if grant is not None:
        m, k = grant.batch_per_gpu, grant.accum_steps
        config = Config(grant.num_gpus, m, k, job.frozen_layers, grant.shared, grant.gpu_type)
    return JobView(
        spec=job.spec,
        profile=job.profile,
        submit_s=job.submit_s,
        gpus=job.gpus,
        shared=job.shared,
        running=job.phase in GRANTED,
        config=config,
        effective_samples=job.effective_samples,
        remaining_samples=None if job.total_samples is None else max(job.total_samples - job.effective_samples, 1.0),
        frozen_layers=job.frozen_layers,
        stats=job.stats,
        attained_gpu_s=job.attained_gpu_s,
        holding_since_s=None if job.holding is None else job.holding.since_s,
        waiting_since_s=job.waiting_since_s,
        restart_s=default_restart_s if job.measured_restart_s is None else job.measured_restart_s,
        num_restarts=job.num_restarts,
    )


class Views:
    """The views of one cluster's unfinished jobs, kept from one snapshot to the next.

    Args:
        cluster: always the same.
        active: the unfinished jobs by id.
    """

    def __init__(self, cluster: ClusterSpec, active: Mapping[str, JobState]) -> None:
        self._cluster, self._active = cluster, active
        self.stale: dict[str, None] = {}
        """Jobs that something happened to since their view was made; whoever changes a job notes it here."""
        self._views: dict[str, JobView] = {}
        self._waiting: dict[str, int] = {}  # jobs whose view waits -> place in the order of submission
        self._unlike_requested: frozenset[str] = frozenset()
        self._made: JobViews | None = None
        self._made_for: tuple[frozenset[int], float] | None = None  # nodes out of service, restart cost
        self._occupied = OccupiedGpus()

    def current(self, down: frozenset[int], default_restart_s: float) -> JobViews:
        """The views now. A job that is being cancelled has none: it is none of a policy's business.

        Args:
            down: nodes out of service.
            default_restart_s: as in :func:`view`.
        """
        if self._made_for is None or self._made_for[1] != default_restart_s:
            self.stale = dict.fromkeys(self._active)
        made_for = (down, default_restart_s)
        if self._made is not None and not self.stale and made_for == self._made_for:
            return self._made
        moved: dict[str, tuple[GpuId, ...]] = {}
        unlike: list[str] = []
        for job_id in self.stale:
            job = self._active.get(job_id)
            self._waiting.pop(job_id, None)
            moved[job_id] = () if job is None else job.gpus
            if job is not None and not job.cancel_requested:
                made = self._views[job_id] = view(job, default_restart_s)
                if not made.running:
                    self._waiting[job_id] = job.place
                elif not made.as_requested:
                    unlike.append(job_id)
            else:
                self._views.pop(job_id, None)
        in_order = sorted(self._waiting, key=self._waiting.__getitem__)
        if unlike or self._unlike_requested:
            self._unlike_requested = self._unlike_requested.difference(self.stale).union(unlike)
        waiting = tuple([self._views[job_id] for job_id in in_order])
        self._made = JobViews.of(self._views, waiting, self._unlike_requested)
        self._made_for = made_for
        self._made.free = (down, self._occupied.update(self._cluster, down, moved))
        self.stale = {}
        return self._made


class OracleTimes(Mapping[str, float]):
    """True service time left by job id, s, computed where it is asked for.

    Args:
        views: the jobs that may be asked about.
        jobs: their states.
        true_remaining_s: asks a simulation; None, or its answer: told by the last report and the logged duration.
    """

    def __init__(
        self,
        views: JobViews,
        jobs: Mapping[str, JobState],
        true_remaining_s: Callable[[str], float | None] | None,
    ) -> None:
        self._views = views
        self._jobs = jobs
        self._ask = true_remaining_s
        self._known: dict[str, float] = {}

    def __getitem__(self, job_id: str) -> float:
        found = self._known.get(job_id)
        if found is None:
            if job_id not in self._views.by_id:
                raise KeyError(job_id)
            found = None if self._ask is None else self._ask(job_id)
            if found is None:
                found = _by_the_log_s(self._jobs[job_id])
            self._known[job_id] = found
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._views.by_id)

    def __len__(self) -> int:
        return len(self._views)


def _by_the_log_s(job: JobState) -> float:
    """True service time left at the requested count, by the log. Jobs without a log entry: by samples, so comparable."""
    left = 1.0
    if job.total_samples:
        left = max(job.total_samples - job.effective_samples, 0.0) / job.total_samples
    return left * (job.oracle_duration_s if job.oracle_duration_s is not None else job.total_samples or 0.0)
