"""One job as a fold over its records: its phase by a table of transitions, the rest by a function a kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from icefrog import events as ev
from icefrog.profile import Profile
from icefrog.spec import JobSpec
from icefrog.types import GpuId, GradientStats


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
    history: list[tuple[Phase, str, float, Phase]] = field(default_factory=list)
    """The last transitions: from, kind of the record, when (s), to."""

    @property
    def job_id(self) -> str:
        """The job's id."""
        return self.spec.name

    @property
    def finished(self) -> bool:
        """Whether the job has left the system."""
        return self.phase in FINAL

    @property
    def shared(self) -> bool:
        """Whether the grant is half a GPU."""
        return self.grant is not None and self.grant.shared

    def past(self) -> str:
        """The last transitions in words, the latest first."""
        steps = [f"{old} -{kind}@{time_s:.0f}s-> {new}" for old, kind, time_s, new in reversed(self.history)]
        return " <- ".join(steps) or "just submitted"

    def read_up_to(self, report_offset: int) -> None:
        """The executor has read the attempt's reports that far."""
        if report_offset > self.report_offset:
            self.report_offset = report_offset

    def attained_s(self, now_s: float) -> float:
        """GPU-seconds held until now, the current attempt included."""
        return self.attained_gpu_s + (self.holding.gpu_s(now_s) if self.holding else 0.0)


def attempt_fits(job: JobState, record: ev.JobRecord) -> bool:
    """Whether the record speaks of an attempt that can speak now."""
    kind = record.kind
    if kind in _OF_NO_ATTEMPT:
        return True
    attempt: int = getattr(record, "attempt")  # noqa: B009 (records of no attempt are gone)
    if kind in _OPENS:
        return attempt == job.attempt + 1
    if kind in _COMMANDS:
        return attempt == job.attempt
    held = job.holding
    if kind == "job_started":
        return attempt == job.attempt and held is None
    return attempt == job.attempt or (held is not None and attempt == held.attempt)


_OF_NO_ATTEMPT = frozenset({"cancel_requested", "job_failed"})
_OPENS = frozenset({"start", "resize"})
_COMMANDS = frozenset({"regrant", "preempt", "stop"})


def update(job: JobState, record: ev.JobRecord) -> None:
    """Everything but the phase. Kept apart from the table of phases so that that can be read at a glance."""
    _UPDATES[record.kind](job, record)


def _granted(job: JobState, record: ev.Start | ev.Resize) -> None:
    job.attempt, job.gpus, job.grant = record.attempt, record.gpus, record.grant
    if job.first_start_s is not None and job.restart_asked_s is None:
        job.restart_asked_s = record.time_s
    if job.holding is None:
        job.report_offset = 0
    if record.reason:
        job.reason = record.reason


def _regranted(job: JobState, record: ev.Regrant) -> None:
    job.grant = record.grant
    held = job.holding  # by an older attempt while resizing: the new bounds are none of its business
    if held is not None and held.attempt == record.attempt and held.shared != record.grant.shared:
        job.attained_gpu_s += held.gpu_s(record.time_s)
        job.holding = Holding(record.attempt, held.gpus, record.grant.shared, record.time_s)


def _asked_to_leave(job: JobState, record: ev.Preempt | ev.Stop) -> None:
    job.reason = record.reason or job.reason


def _cancel_requested(job: JobState, record: ev.CancelRequested) -> None:
    job.cancel_requested = True


def _failed(job: JobState, record: ev.JobFailed) -> None:
    job.reason = record.reason


def _warned(job: JobState, record: ev.JobWarned) -> None:
    job.read_up_to(record.report_offset)


def _started(job: JobState, record: ev.JobStarted) -> None:
    now_s = record.time_s
    job.read_up_to(record.report_offset)
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
    _note_batch(job, record)
    job.profile = record.profile or job.profile
    job.total_samples = record.total_samples if record.total_samples is not None else job.total_samples


def _note_batch(job: JobState, record: ev.JobStarted | ev.ProgressReported) -> None:
    """What a job that moves its batch runs with now: a sharer would have to give it up."""
    grant = job.grant if record.attempt == job.attempt else None
    if grant is not None and grant.elastic_batch and record.batch_per_gpu is not None:
        moved = {"batch_per_gpu": record.batch_per_gpu, "accum_steps": record.accum_steps or 1}
        job.grant = grant.model_copy(update=moved)


def progressed(job: JobState, record: ev.ProgressReported) -> None:
    """A tuning interval is over."""
    job.read_up_to(record.report_offset)
    job.crash_streak = 0
    job.epoch = record.epoch
    job.effective_samples = record.effective_samples
    job.total_samples = record.total_samples if record.total_samples is not None else job.total_samples
    job.metric = record.metric if record.metric is not None else job.metric
    job.frozen_layers, job.psi, job.throughput = record.frozen_layers, record.psi, record.throughput
    _note_batch(job, record)
    if record.variance is not None or record.signal is not None:
        variance = record.variance or ()
        sqr_norm = record.sqr_norm if record.sqr_norm is not None else (0.0,) * len(variance)
        job.stats = GradientStats(variance, sqr_norm, record.signal or ())
    job.profile = record.profile or job.profile


def _stopped(job: JobState, record: ev.JobStopped) -> None:
    job.read_up_to(record.report_offset)
    _left(job, record)


def _crashed(job: JobState, record: ev.JobCrashed) -> None:
    job.read_up_to(record.report_offset)
    _left(job, record)
    job.num_crashes += 1
    job.crash_streak += record.cause == "job"
    job.reason = f"attempt {record.attempt} died: {record.reason}"


def _finished(job: JobState, record: ev.JobFinished) -> None:
    job.read_up_to(record.report_offset)
    job.metric = record.metric if record.metric is not None else job.metric
    job.reason = record.outcome
    _left(job, record)


def _left(job: JobState, record: ev.JobStopped | ev.JobCrashed | ev.JobFinished) -> None:
    """The attempt is over, and its GPUs are free."""
    if record.effective_samples is not None:
        job.effective_samples = record.effective_samples
    if job.holding is not None:
        job.attained_gpu_s += job.holding.gpu_s(record.time_s)
        job.holding = None
        job.report_offset = 0
        job.waiting_since_s = record.time_s


_UPDATES: Mapping[str, Callable[[JobState, Any], None]] = {
    "start": _granted,
    "resize": _granted,
    "regrant": _regranted,
    "preempt": _asked_to_leave,
    "stop": _asked_to_leave,
    "cancel_requested": _cancel_requested,
    "job_started": _started,
    "progress_reported": progressed,
    "job_warned": _warned,
    "job_stopped": _stopped,
    "job_crashed": _crashed,
    "job_finished": _finished,
    "job_failed": _failed,
}
"""By kind of record; every kind that speaks of a job after its submission."""
