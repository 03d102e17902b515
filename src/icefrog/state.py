"""The cluster as a fold over the log: one mutator, ``apply``; transitions are a table; an illegal one raises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from icefrog import events as ev
from icefrog.jobstate import FINAL, GRANTED, TRANSITIONS, JobState, Phase, attempt_fits, progressed, update
from icefrog.profile import Profile
from icefrog.spec import ClusterSpec, without_duration
from icefrog.types import GpuId, Json, Snapshot
from icefrog.views import OracleTimes, Views

__all__ = ["FINAL", "GRANTED", "TRANSITIONS", "ClusterState", "IllegalTransitionError", "JobState", "Phase"]

_HISTORY = 12  # transitions kept for the message of an illegal one


class IllegalTransitionError(Exception):
    """A record that cannot happen in the job's phase; carries the job's recent history."""


class ClusterState:
    """All jobs, in order of submission, and who holds which GPU.

    ``profiles`` gives the estimated profile of a job whose cost is known beforehand (a catalogue model); a live job brings
    its own with its first report.
    """

    def __init__(self, cluster: ClusterSpec, profiles: Mapping[str, Profile] | None = None) -> None:
        self.cluster = cluster
        self.profiles = profiles if profiles is not None else {}
        self.jobs: dict[str, JobState] = {}
        self.active: dict[str, JobState] = {}  # the unfinished ones
        self.memory: dict[str, Json] = {}  # by policy: what it asked to be told again
        self.down: set[int] = set()  # nodes out of service
        self.now_s = 0.0
        self.unsaid: dict[str, None] = {}
        """Waiting jobs whose reason is not ``waiting_reason``: they are new, or were told one of their own."""
        self.waiting_reason: str | None = None
        self.true_remaining_s: Callable[[str], float | None] | None = None
        """For oracles in a simulation: true service time left now. None: told by the last report and the logged duration."""
        self._views = Views(cluster, self.active)

    # -- the mutator ---------------------------------------------------------------------------------------------------

    def apply(self, record: ev.AnyRecord) -> None:
        """Fold one record in. Raises :class:`IllegalTransitionError` on a record that cannot happen."""
        if record.time_s > self.now_s:
            self.now_s = record.time_s
        if record.kind == "progress_reported" and self._progressed(record):
            return
        if record.kind == "plan_decided":
            self._decided(record)
        elif record.kind == "job_submitted":
            self._submitted(record)
        elif record.kind == "node_down":
            self.down.add(record.node)
        elif record.kind == "node_up":
            self.down.discard(record.node)
        elif record.kind != "tick":
            self._job_record(record)

    def replay(self, records: Iterable[ev.AnyRecord]) -> None:
        """Fold a whole log in."""
        for record in records:
            self.apply(record)

    def _decided(self, record: ev.PlanDecided) -> None:
        if record.memory is not None:
            self.memory[record.policy] = record.memory
        if record.waiting_reason is not None and record.waiting_reason != self.waiting_reason:
            self.waiting_reason = record.waiting_reason
            self.unsaid = {job_id: None for job_id, job in self.active.items() if job.phase is Phase.PENDING}
        for job_id, reason in record.reasons.items():
            job = self.active.get(job_id)
            if job is None:
                continue
            job.reason = reason
            if reason == self.waiting_reason:
                self.unsaid.pop(job_id, None)
            elif job.phase is Phase.PENDING:
                self.unsaid[job_id] = None

    def _submitted(self, record: ev.JobSubmitted) -> None:
        spec = record.job
        if spec.job_id in self.jobs:
            raise IllegalTransitionError(f"job {spec.job_id} was submitted twice")
        profile = record.profile or self.profiles.get(spec.job_id)
        job = JobState(
            spec=without_duration(spec),
            oracle_duration_s=spec.duration_s,
            submit_s=record.time_s,
            profile=profile,
            place=len(self.jobs),
            total_samples=None if profile is None else float(profile.samples_per_epoch * spec.max_epochs),
            waiting_since_s=record.time_s,
        )
        self.jobs[spec.job_id] = self.active[spec.job_id] = job
        self._views.stale[spec.job_id] = self.unsaid[spec.job_id] = None

    def _progressed(self, record: ev.ProgressReported) -> bool:
        """The short way for most of a log: a report that is legal and changes no phase. False: go the long way."""
        job = self.jobs.get(record.job_id)
        if job is None or TRANSITIONS.get((job.phase, "progress_reported")) is not job.phase:
            return False
        held = job.holding
        if record.attempt != job.attempt and (held is None or record.attempt != held.attempt):
            return False
        progressed(job, record)
        self._views.stale[record.job_id] = None
        return True

    def _job_record(self, record: ev.JobRecord) -> None:
        job = self.jobs.get(record.job_id)
        if job is None:
            raise IllegalTransitionError(f"{record.kind} for an unknown job {record.job_id}")
        kind, before = record.kind, job.phase
        target = TRANSITIONS.get((before, kind))
        if target is None or not attempt_fits(job, record):
            raise IllegalTransitionError(
                f"{kind} (attempt {getattr(record, 'attempt', '-')}) is illegal for job {job.job_id}, which is "
                f"{before} in attempt {job.attempt}; before: {job.past()}"
            )
        if record.kind == "job_finished" and record.outcome == "target_missed":
            target = Phase.TARGET_MISSED
        if record.kind == "job_crashed" and before is Phase.RESIZING and record.attempt == job.attempt:
            target = Phase.PENDING  # the new attempt died before it was up; the old one has left its GPUs
        update(job, record)
        self._views.stale[record.job_id] = None
        if target is not before:
            job.history.append((before, kind, record.time_s, target))
            if len(job.history) > _HISTORY:
                del job.history[0]
            self._enter(job, target, record.time_s)

    def _enter(self, job: JobState, phase: Phase, now_s: float) -> None:
        job.phase = phase
        if phase not in GRANTED:
            job.gpus, job.grant = (), None
        self.unsaid.pop(job.job_id, None)
        if phase is Phase.PENDING:
            if job.reason != self.waiting_reason:
                self.unsaid[job.job_id] = None
            job.restart_asked_s = None  # a move that came to nothing; from here on it waits, which costs no restart
            if job.waiting_since_s is None:
                job.waiting_since_s = now_s
        if phase is Phase.CANCELLED:
            job.reason = "cancelled"
        if phase in FINAL:
            job.finish_s = now_s
            if job.waiting_since_s is not None:
                job.queue_s += now_s - job.waiting_since_s
                job.waiting_since_s = None
            del self.active[job.job_id]
            if job.job_id in self.profiles:  # known beforehand, and of no use any more: traces are long
                job.profile, job.stats = None, None

    # -- what a decision reads -----------------------------------------------------------------------------------------

    def snapshot(
        self, *, policy: str = "", seed: int = 0, default_restart_s: float = 60.0, oracle: bool = False
    ) -> Snapshot:
        """The unfinished jobs in order of submission. A job that is being cancelled is none of a policy's business.

        A job that is still being preempted holds its GPUs physically, yet may be planned for: its grant is over.
        """
        down = frozenset(self.down)
        views = self._views.current(down, default_restart_s)
        return Snapshot(
            now_s=self.now_s,
            cluster=self.cluster,
            jobs=views,
            seed=seed,
            memory=self.memory.get(policy),
            oracle_remaining_s=OracleTimes(views, self.jobs, self.true_remaining_s) if oracle else None,
            down=down,
        )

    def check(self) -> None:
        """Raise ``AssertionError`` where an invariant is broken: GPUs used + free = total, one grant a job, sane times."""
        owners: dict[GpuId, list[JobState]] = {}
        for job in self.active.values():
            assert (job.phase in GRANTED) == bool(job.gpus) == (job.grant is not None), job.job_id
            assert not job.finished, job.job_id
            assert (job.waiting_since_s is None) or job.holding is None, f"{job.job_id} waits and holds GPUs"
            for gpu in job.gpus:
                owners.setdefault(gpu, []).append(job)
        sizes = self.cluster.gpus_per_node
        for gpu, jobs in owners.items():
            assert 0 <= gpu.node < len(sizes), gpu
            assert 0 <= gpu.device < sizes[gpu.node], gpu
            assert gpu.node not in self.down, f"{gpu} of {jobs[0].job_id} is out of service"
            alone = len(jobs) == 1
            assert alone or (len(jobs) == 2 and all(job.shared for job in jobs)), f"{gpu}: {[j.job_id for j in jobs]}"
        assert len(owners) <= self.cluster.num_gpus
        for job in self.jobs.values():
            assert job.finished == (job.job_id not in self.active), job.job_id
            assert not job.finished or (job.holding is None and not job.gpus), job.job_id
            if job.finish_s is not None:
                assert job.queue_s <= job.finish_s - job.submit_s + 1e-6, job.job_id
