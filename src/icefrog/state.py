"""The cluster as a fold over the log: one mutator, ``apply``; transitions are a table; an illegal one raises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import assert_never

from icefrog import events as ev
from icefrog.occupied import OccupiedGpus
from icefrog.profile import Profile
from icefrog.spec import ClusterSpec, JobSpec
from icefrog.types import Config, GpuId, GradientStats, JobView, JobViews, Json, Snapshot


class Phase(StrEnum):
    """Where a job stands."""

    PENDING = "pending"  # waits for GPUs
    STARTING = "starting"  # granted; the attempt is not up yet
    RUNNING = "running"
    RESIZING = "resizing"  # the old attempt is asked to stop, the new one follows
    PREEMPTING = "preempting"  # asked to stop; will be pending
    STOPPING = "stopping"  # asked to stop; will be cancelled
    COMPLETED = "completed"
    TARGET_MISSED = "target_missed"
    FAILED = "failed"
    CANCELLED = "cancelled"


FINAL = frozenset({Phase.COMPLETED, Phase.TARGET_MISSED, Phase.FAILED, Phase.CANCELLED})
GRANTED = frozenset({Phase.STARTING, Phase.RUNNING, Phase.RESIZING})
"""Phases in which the scheduler counts the job's GPUs as taken."""

P = Phase
TRANSITIONS: Mapping[tuple[Phase, str], Phase] = {
    (P.PENDING, "start"): P.STARTING,
    (P.PENDING, "cancel_requested"): P.CANCELLED,
    (P.PENDING, "job_failed"): P.FAILED,
    (P.PENDING, "stop"): P.CANCELLED,  # it had left its GPUs by the time the user's wish was read
    (P.STARTING, "job_started"): P.RUNNING,
    (P.STARTING, "job_crashed"): P.PENDING,
    (P.STARTING, "job_stopped"): P.PENDING,
    (P.STARTING, "resize"): P.RESIZING,
    (P.STARTING, "regrant"): P.STARTING,
    (P.STARTING, "preempt"): P.PREEMPTING,
    (P.STARTING, "stop"): P.STOPPING,
    (P.STARTING, "cancel_requested"): P.STARTING,
    (P.STARTING, "job_finished"): P.COMPLETED,
    (P.STARTING, "job_warned"): P.STARTING,
    (P.RUNNING, "progress_reported"): P.RUNNING,
    (P.RUNNING, "job_warned"): P.RUNNING,
    (P.RUNNING, "job_finished"): P.COMPLETED,
    (P.RUNNING, "job_crashed"): P.PENDING,
    (P.RUNNING, "job_stopped"): P.PENDING,  # stopped from outside, with a checkpoint
    (P.RUNNING, "resize"): P.RESIZING,
    (P.RUNNING, "regrant"): P.RUNNING,
    (P.RUNNING, "preempt"): P.PREEMPTING,
    (P.RUNNING, "stop"): P.STOPPING,
    (P.RUNNING, "cancel_requested"): P.RUNNING,
    (P.RESIZING, "job_started"): P.RUNNING,
    (P.RESIZING, "progress_reported"): P.RESIZING,
    (P.RESIZING, "job_warned"): P.RESIZING,
    (P.RESIZING, "job_stopped"): P.RESIZING,  # the old attempt has left its GPUs
    (
        P.RESIZING,
        "job_crashed",
    ): P.RESIZING,  # it died instead: the new attempt resumes from its last checkpoint
    (P.RESIZING, "job_finished"): P.COMPLETED,  # it finished before the request reached it
    (P.RESIZING, "resize"): P.RESIZING,
    (P.RESIZING, "regrant"): P.RESIZING,
    (P.RESIZING, "preempt"): P.PREEMPTING,
    (P.RESIZING, "stop"): P.STOPPING,
    (P.RESIZING, "cancel_requested"): P.RESIZING,
    (P.PREEMPTING, "job_started"): P.PREEMPTING,
    (P.PREEMPTING, "progress_reported"): P.PREEMPTING,
    (P.PREEMPTING, "job_warned"): P.PREEMPTING,
    (P.PREEMPTING, "job_stopped"): P.PENDING,
    (P.PREEMPTING, "job_crashed"): P.PENDING,
    (P.PREEMPTING, "job_finished"): P.COMPLETED,
    (P.PREEMPTING, "stop"): P.STOPPING,
    (P.PREEMPTING, "cancel_requested"): P.PREEMPTING,
    (P.STOPPING, "job_started"): P.STOPPING,
    (P.STOPPING, "progress_reported"): P.STOPPING,
    (P.STOPPING, "job_warned"): P.STOPPING,
    (P.STOPPING, "cancel_requested"): P.STOPPING,
    (P.STOPPING, "job_stopped"): P.CANCELLED,
    (P.STOPPING, "job_crashed"): P.CANCELLED,
    (P.STOPPING, "job_finished"): P.COMPLETED,
    # A cancel that crosses the end of the job changes nothing.
    **{(phase, "cancel_requested"): phase for phase in FINAL},
}
del P


class IllegalTransitionError(Exception):
    """A record that cannot happen in the job's phase; carries the job's recent history."""


@dataclass(slots=True)
class Holding:
    """GPUs that an attempt physically holds."""

    attempt: int
    gpus: tuple[GpuId, ...]
    shared: bool
    since_s: float

    def gpu_s(self, now_s: float) -> float:
        """GPU-seconds held; a sharer counts half."""
        return (now_s - self.since_s) * len(self.gpus) * (0.5 if self.shared else 1.0)


@dataclass(slots=True)
class JobState:
    """One job: what the log says of it."""

    spec: JobSpec  # without the logged duration, which only oracles may see
    oracle_duration_s: float | None
    submit_s: float
    profile: Profile | None
    place: int = 0  # in the order of submission
    phase: Phase = Phase.PENDING
    attempt: int = 0
    gpus: tuple[GpuId, ...] = ()  # granted
    grant: ev.Grant | None = None
    holding: Holding | None = None
    report_offset: int = 0  # of the attempt that holds GPUs (or starts)
    effective_samples: float = 0.0
    total_samples: float | None = None
    epoch: int = 0
    metric: float | None = None
    frozen_layers: int = 0
    psi: float = 1.0
    throughput: float = 0.0
    stats: GradientStats | None = None
    first_start_s: float | None = None
    finish_s: float | None = None
    waiting_since_s: float | None = None
    queue_s: float = 0.0
    attained_gpu_s: float = 0.0
    num_restarts: int = 0
    num_crashes: int = 0
    crash_streak: int = 0  # crashes since the last reported progress
    restart_asked_s: float | None = None
    measured_restart_s: float | None = None
    cancel_requested: bool = False
    reason: str = "submitted"
    history: list[str] = field(default_factory=list)

    @property
    def job_id(self) -> str:
        """The job's id."""
        return self.spec.job_id

    @property
    def finished(self) -> bool:
        """Whether the job has left the system."""
        return self.phase in FINAL

    @property
    def shared(self) -> bool:
        """Whether the grant is half a GPU."""
        return self.grant is not None and self.grant.shared

    def attained_s(self, now_s: float) -> float:
        """GPU-seconds held until now, the current attempt included."""
        return self.attained_gpu_s + (self.holding.gpu_s(now_s) if self.holding else 0.0)


_HISTORY = 12  # transitions kept for the message of an illegal one


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
        # Kept between snapshots, since most jobs do not change from one to the next.
        self._views: dict[str, JobView] = {}
        self._waiting: dict[str, int] = {}  # jobs whose view waits -> place in the order of submission
        self._stale: dict[str, None] = {}  # jobs that something happened to since their view was made
        self._made: JobViews | None = None
        self._made_for: tuple[float, ClusterSpec] | None = None
        self._occupied = OccupiedGpus()

    # -- the mutator ---------------------------------------------------------------------------------------------------

    def apply(self, record: ev.AnyRecord) -> None:
        """Fold one record in. Raises :class:`IllegalTransitionError` on a record that cannot happen."""
        if record.time_s > self.now_s:
            self.now_s = record.time_s
        if isinstance(record, ev.ProgressReported) and self._progressed(record):
            return
        match record:
            case ev.Tick():
                pass
            case ev.PlanDecided():
                self._decided(record)
            case ev.NodeDown():
                self.down.add(record.node)
                self._made = None
            case ev.NodeUp():
                self.down.discard(record.node)
                self._made = None
            case ev.JobSubmitted():
                self._submitted(record)
            case _:
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
        profile = self.profiles.get(spec.job_id)
        job = JobState(
            spec=spec.model_copy(update={"duration_s": None}) if spec.duration_s is not None else spec,
            oracle_duration_s=spec.duration_s,
            submit_s=record.time_s,
            profile=profile,
            place=len(self.jobs),
            total_samples=None if profile is None else float(profile.samples_per_epoch * spec.max_epochs),
            waiting_since_s=record.time_s,
        )
        self.jobs[spec.job_id] = self.active[spec.job_id] = job
        self._stale[spec.job_id] = self.unsaid[spec.job_id] = None

    def _progressed(self, record: ev.ProgressReported) -> bool:
        """The short way for most of a log: a report that is legal and changes no phase. False: go the long way."""
        job = self.jobs.get(record.job_id)
        if job is None or TRANSITIONS.get((job.phase, "progress_reported")) is not job.phase:
            return False
        held = job.holding
        if record.attempt != job.attempt and (held is None or record.attempt != held.attempt):
            return False
        if record.report_offset > job.report_offset:
            job.report_offset = record.report_offset
        _progress(job, record)
        self._stale[job.job_id] = None
        return True

    def _job_record(self, record: ev.AnyRecord) -> None:
        assert not isinstance(record, ev.Tick | ev.PlanDecided | ev.JobSubmitted | ev.NodeDown | ev.NodeUp)
        job = self.jobs.get(record.job_id)
        if job is None:
            raise IllegalTransitionError(f"{record.kind} for an unknown job {record.job_id}")
        target = TRANSITIONS.get((job.phase, record.kind))
        if target is None or not _attempt_fits(job, record):
            past = " <- ".join(reversed(job.history)) or "just submitted"
            raise IllegalTransitionError(
                f"{record.kind} (attempt {getattr(record, 'attempt', '-')}) is illegal for job {job.job_id}, which is "
                f"{job.phase} in attempt {job.attempt}; before: {past}"
            )
        if isinstance(record, ev.JobFinished) and record.outcome == "target_missed":
            target = Phase.TARGET_MISSED
        if isinstance(record, ev.JobCrashed) and job.phase is Phase.RESIZING and record.attempt == job.attempt:
            target = Phase.PENDING  # the new attempt died before it was up; the old one has left its GPUs
        _update(job, record)
        self._stale[job.job_id] = None
        if target is not job.phase:
            job.history.append(f"{job.phase} -{record.kind}@{record.time_s:.0f}s-> {target}")
            del job.history[:-_HISTORY]
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

    # -- views ---------------------------------------------------------------------------------------------------------

    def view(self, job: JobState, default_restart_s: float) -> JobView:
        """What a policy may know of the job now."""
        remaining = None if job.total_samples is None else max(job.total_samples - job.effective_samples, 1.0)
        grant = job.grant
        return JobView(
            spec=job.spec,
            profile=job.profile,
            submit_s=job.submit_s,
            gpus=job.gpus,
            shared=job.shared,
            running=job.phase in GRANTED,
            config=None
            if grant is None
            else Config(
                grant.num_gpus,
                grant.batch_per_gpu,
                grant.accum_steps,
                job.frozen_layers,
                grant.shared,
                grant.gpu_type,
            ),
            effective_samples=job.effective_samples,
            remaining_samples=remaining,
            frozen_layers=job.frozen_layers,
            stats=job.stats,
            attained_gpu_s=job.attained_gpu_s,
            holding_since_s=None if job.holding is None else job.holding.since_s,
            waiting_since_s=job.waiting_since_s,
            restart_s=default_restart_s if job.measured_restart_s is None else job.measured_restart_s,
            num_restarts=job.num_restarts,
        )

    def snapshot(
        self, *, policy: str = "", seed: int = 0, default_restart_s: float = 60.0, oracle: bool = False
    ) -> Snapshot:
        """The unfinished jobs in order of submission. A job that is being cancelled is none of a policy's business.

        A job that is still being preempted holds its GPUs physically, yet may be planned for: its grant is over.
        """
        views = self._current_views(default_restart_s)
        return Snapshot(
            now_s=self.now_s,
            cluster=self.cluster,
            jobs=views,
            seed=seed,
            memory=self.memory.get(policy),
            oracle_remaining_s=_OracleTimes(views, self) if oracle else None,
            down=frozenset(self.down),
        )

    def _current_views(self, default_restart_s: float) -> JobViews:
        """The views, of which only those are made that something happened to."""
        made_for = (default_restart_s, self.cluster)
        if made_for != self._made_for:
            self._made, self._made_for = None, made_for
            self._stale = dict.fromkeys(self.active)
            self._occupied = OccupiedGpus()
        if self._made is not None and not self._stale:
            return self._made
        for job_id in self._stale:
            job = self.active.get(job_id)
            self._waiting.pop(job_id, None)
            if job is not None and not job.cancel_requested:
                view = self._views[job_id] = self.view(job, default_restart_s)
                if not view.running:
                    self._waiting[job_id] = job.place
            else:
                self._views.pop(job_id, None)
        in_order = sorted(self._waiting, key=self._waiting.__getitem__)
        self._made = JobViews.of(self._views, tuple([self._views[job_id] for job_id in in_order]))
        down = frozenset(self.down)
        moved = {job_id: self.jobs[job_id].gpus for job_id in self._stale}
        self._made.free = (down, self._occupied.update(self.cluster, down, moved))
        self._stale = {}
        return self._made

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


class _OracleTimes(Mapping[str, float]):
    """True service time left by job id, computed where it is asked for."""

    def __init__(self, views: JobViews, state: ClusterState) -> None:
        self._views = views
        self._state = state
        self._known: dict[str, float] = {}

    def __getitem__(self, job_id: str) -> float:
        found = self._known.get(job_id)
        if found is None:
            if job_id not in self._views.by_id:
                raise KeyError(job_id)
            ask = self._state.true_remaining_s
            found = None if ask is None else ask(job_id)
            if found is None:
                found = _oracle_remaining_s(self._state.jobs[job_id])
            self._known[job_id] = found
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._views.by_id)

    def __len__(self) -> int:
        return len(self._views)


def _oracle_remaining_s(job: JobState) -> float:
    """True service time left at the requested count, by the log. Jobs without a log entry: by samples, so comparable."""
    left = 1.0
    if job.total_samples:
        left = max(job.total_samples - job.effective_samples, 0.0) / job.total_samples
    return left * (job.oracle_duration_s if job.oracle_duration_s is not None else job.total_samples or 0.0)


def _attempt_fits(job: JobState, record: ev.AnyRecord) -> bool:
    """Whether the record speaks of an attempt that can speak now."""
    match record:
        case ev.Start() | ev.Resize():
            return record.attempt == job.attempt + 1
        case ev.Regrant() | ev.Preempt() | ev.Stop():
            return record.attempt == job.attempt
        case ev.JobStarted():
            return record.attempt == job.attempt and job.holding is None
        case ev.AttemptEvent():
            held = job.holding.attempt if job.holding is not None else None
            return record.attempt in (job.attempt, held)
        case _:
            return True


def _update(job: JobState, record: ev.AnyRecord) -> None:
    """Everything but the phase. Kept apart from the table so that the table can be read at a glance."""
    if isinstance(record, ev.AttemptEvent):
        job.report_offset = max(job.report_offset, record.report_offset)
    match record:
        case ev.Start() | ev.Resize():
            job.attempt, job.gpus, job.grant = record.attempt, record.gpus, record.grant
            if job.first_start_s is not None and job.restart_asked_s is None:
                job.restart_asked_s = record.time_s
            if job.holding is None:
                job.report_offset = 0
            if record.reason:
                job.reason = record.reason
        case ev.Regrant():
            job.grant = record.grant
            held = job.holding  # by an older attempt while resizing: the new bounds are none of its business
            if held is not None and held.attempt == record.attempt and held.shared != record.grant.shared:
                job.attained_gpu_s += held.gpu_s(record.time_s)
                job.holding = Holding(record.attempt, held.gpus, record.grant.shared, record.time_s)
        case ev.Preempt() | ev.Stop():
            job.reason = record.reason or job.reason
        case ev.CancelRequested():
            job.cancel_requested = True
        case ev.JobStarted():
            _started(job, record)
        case ev.ProgressReported():
            _progress(job, record)
        case ev.JobStopped() | ev.JobCrashed():
            if record.effective_samples is not None:
                job.effective_samples = record.effective_samples
            _release(job, record.time_s)
            if isinstance(record, ev.JobCrashed):
                job.num_crashes += 1
                job.crash_streak += record.cause == "job"
                job.reason = f"attempt {record.attempt} died: {record.reason}"
        case ev.JobFinished():
            if record.effective_samples is not None:
                job.effective_samples = record.effective_samples
            job.metric = record.metric if record.metric is not None else job.metric
            job.reason = record.outcome
            _release(job, record.time_s)
        case ev.JobFailed():
            job.reason = record.reason
        case ev.JobWarned() | ev.Tick() | ev.PlanDecided() | ev.JobSubmitted() | ev.NodeDown() | ev.NodeUp():
            pass
        case _:
            assert_never(record)


def _started(job: JobState, record: ev.JobStarted) -> None:
    now_s = record.time_s
    if job.waiting_since_s is not None:
        job.queue_s += now_s - job.waiting_since_s
        job.waiting_since_s = None
    if job.first_start_s is None:
        job.first_start_s = now_s
    else:
        job.num_restarts += 1
    if job.restart_asked_s is not None:
        job.measured_restart_s = None if now_s == job.restart_asked_s else now_s - job.restart_asked_s
        job.restart_asked_s = None
    # A job that is asked to stop before it came up has lost its grant, yet holds GPUs until it leaves: none to count.
    if job.grant is not None:
        job.holding = Holding(record.attempt, job.gpus, job.grant.shared, now_s)
    else:
        job.holding = Holding(record.attempt, (), False, now_s)
    job.profile = record.profile or job.profile
    job.total_samples = record.total_samples if record.total_samples is not None else job.total_samples


def _progress(job: JobState, record: ev.ProgressReported) -> None:
    job.crash_streak = 0
    job.epoch = record.epoch
    job.effective_samples = record.effective_samples
    job.total_samples = record.total_samples if record.total_samples is not None else job.total_samples
    job.metric = record.metric if record.metric is not None else job.metric
    job.frozen_layers, job.psi, job.throughput = record.frozen_layers, record.psi, record.throughput
    if record.variance is not None:
        sqr_norm = record.sqr_norm if record.sqr_norm is not None else (0.0,) * len(record.variance)
        job.stats = GradientStats(record.variance, sqr_norm)
    job.profile = record.profile or job.profile


def _release(job: JobState, now_s: float) -> None:
    if job.holding is not None:
        job.attained_gpu_s += job.holding.gpu_s(now_s)
        job.holding = None
        job.report_offset = 0
        job.waiting_since_s = now_s
