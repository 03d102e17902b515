"""What one can ask about the jobs of a home, whether a controller runs or not: folded from its log alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from icefrog import events as ev
from icefrog.driver import RealClock
from icefrog.errors import UserError
from icefrog.executors.local.attempts import JobFolder
from icefrog.executors.local.files import open_regular
from icefrog.executors.local.slots import local_cluster
from icefrog.executors.local.text import plain
from icefrog.home import Home
from icefrog.state import FINAL, GRANTED, ClusterState, JobState, Phase
from icefrog.types import GpuId


@dataclass(frozen=True, slots=True)
class JobRow:
    """One line of ``icefrog jobs``."""

    job_id: str
    phase: str
    gpus: tuple[GpuId, ...]
    shared: bool
    epoch: int
    max_epochs: int
    metric: float | None
    target: str | None
    frozen_layers: int
    num_layers: int | None
    psi: float
    throughput: float
    effective_samples: float
    total_samples: float | None
    restarts: int
    crashes: int
    submit_s: float
    first_start_s: float | None
    finish_s: float | None
    queue_s: float
    reason: str

    @property
    def finished(self) -> bool:
        """Whether the job has left the system."""
        return self.phase in FINAL

    @property
    def progress(self) -> float | None:
        """Effective samples as a fraction of the total, at most 1."""
        return min(self.effective_samples / self.total_samples, 1.0) if self.total_samples else None


def row_of(job: JobState, now_s: float) -> JobRow:
    """A job's line at a time."""
    waiting = 0.0 if job.waiting_since_s is None else max(now_s - job.waiting_since_s, 0.0)
    target = job.spec.target
    return JobRow(
        job_id=job.job_id,
        phase=str(job.phase),
        gpus=job.gpus,
        shared=job.shared,
        epoch=job.epoch,
        max_epochs=job.spec.max_epochs,
        metric=job.metric,
        target=None if target is None else plain(f"{target.metric} {_SIGNS[target.mode]} {target.value:g}"),
        frozen_layers=job.frozen_layers,
        num_layers=None if job.profile is None else job.profile.num_layers,
        psi=job.psi,
        throughput=job.throughput,
        effective_samples=job.effective_samples,
        total_samples=job.total_samples,
        restarts=job.num_restarts,
        crashes=job.num_crashes,
        submit_s=job.submit_s,
        first_start_s=job.first_start_s,
        finish_s=job.finish_s,
        queue_s=job.queue_s + waiting,
        reason=plain(job.reason),
    )


_SIGNS = {"max": ">=", "min": "<="}


def load_state(home: Home) -> ClusterState:
    """The state as the log has it, with what still lies in the inbox on top.

    Raises:
        UserError: there is no log, or it is damaged.
    """
    settings = home.settings()
    with home.open_log() as log:
        state = home.replay(log, settings.cluster if settings is not None else local_cluster())
        for event in log.receive():
            state.apply(event)
    return state


def job_rows(home: Home) -> list[JobRow]:
    """All jobs in order of submission; none if nothing was ever submitted."""
    if not home.db.exists():
        return []
    now_s = RealClock().now_s()
    return [row_of(job, now_s) for job in load_state(home).jobs.values()]


def _find(state: ClusterState, job_id: str) -> JobState:
    job = state.jobs.get(job_id)
    if job is None:
        known = ", ".join(list(state.jobs)[-5:]) or "none yet"
        raise UserError(f"there is no job named {job_id}", f"the latest jobs: {known}; `icefrog jobs` lists all")
    return job


# -- explain ---------------------------------------------------------------------------------------------------------------


def explain(home: Home, job_id: str) -> list[str]:
    """Why the job is where it is, and how it got there, as lines of text.

    Raises:
        UserError: there is no such job.
    """
    state = load_state(home)
    job = _find(state, job_id)
    now_s = RealClock().now_s()
    lines = [f"{job_id}: {job.phase}{_where(job)}", f"  why: {plain(job.reason)}"]
    if job.cancel_requested and not job.finished:
        lines.append("  a request to cancel it is on its way")
    if not job.finished and home.controller_pid() is None:
        lines.append("  no controller is running, so nothing will change before `icefrog up`")
    if job.phase is Phase.PENDING:
        lines += _waiting(state, job, now_s)
    lines += _numbers(job, now_s)
    with home.open_log() as log:
        lines += ["history:", *history(job, log.job_records(job_id))]
    return lines


def _where(job: JobState) -> str:
    if not job.gpus:
        return ""
    names = ", ".join(f"{gpu.node}:{gpu.device}" for gpu in job.gpus)
    return f" on {len(job.gpus)} GPU{'s' * (len(job.gpus) > 1)} ({names}{', shared' if job.shared else ''})"


def _waiting(state: ClusterState, job: JobState, now_s: float) -> list[str]:
    """What a waiting job needs, what is free, and who is before it."""
    taken: dict[GpuId, list[str]] = {}
    for other in state.active.values():
        held = other.gpus if other.phase in GRANTED else (other.holding.gpus if other.holding else ())
        for gpu in held:
            taken.setdefault(gpu, []).append(other.job_id)
    total = state.cluster.num_gpus
    choice = " or ".join(str(count) for count in job.spec.gpus) + (" GPU" if job.spec.gpus == (1,) else " GPUs")
    share = ", or half of one beside another job" if job.spec.share else ""
    since_s = job.waiting_since_s if job.waiting_since_s is not None else job.submit_s
    waited_s, free = max(now_s - since_s, 0.0), total - len(taken)
    lines = [f"  waits for {waited_s:.0f} s; needs {choice}{share}; {free} of {total} are free"]
    for other in state.active.values():
        gpus = sorted(gpu for gpu, owners in taken.items() if other.job_id in owners)
        if gpus and other is not job:
            half = ", shared" if other.shared else ""
            lines.append(f"  {other.job_id} holds {len(gpus)} ({other.phase}{half})")
    before = []
    for other in state.active.values():
        if other is job:
            break
        if other.phase is Phase.PENDING:
            before.append(other.job_id)
    if before:
        lines.append(f"  submitted earlier and waiting, too: {', '.join(before)}")
    return lines


def _numbers(job: JobState, now_s: float) -> list[str]:
    row = row_of(job, now_s)
    lines = [
        f"  queued {row.queue_s:.0f} s, {job.attained_s(max(now_s, job.submit_s)):.0f} GPU-seconds used, "
        f"{row.restarts} restarts, {row.crashes} crashes"
    ]
    if row.epoch or row.metric is not None:
        metric = "" if row.metric is None else f", {row.metric:.4g}"
        target = "" if row.target is None else f" (target {row.target})"
        of = "" if row.num_layers is None else f" of {row.num_layers}"
        lines.append(
            f"  epoch {row.epoch}{metric}{target}; {row.frozen_layers}{of} layers frozen, "
            f"penalty psi {row.psi:.3f}, {row.throughput:.0f} samples/s"
        )
    if row.total_samples:
        # A pass with layers frozen counts for less than an epoch, so there may be more passes than max_epochs; and the
        # last interval may go beyond P0.
        done, total = row.effective_samples, row.total_samples
        lines.append(f"  {done:.0f} effective samples; P0, where it ends at the latest, is {total:.0f}")
    return lines


def history(job: JobState, records: list[ev.AnyRecord]) -> list[str]:
    """What happened to a job, one line each; of its reports those that changed the frozen depth."""
    lines: list[str] = []
    depth = 0
    for record in records:
        text = told(record, depth)
        if isinstance(record, ev.ProgressReported):
            depth = record.frozen_layers
        if text is not None:
            lines.append(f"  {record.time_s - job.submit_s:+9.1f} s  {text}")
    return lines


def told(record: ev.AnyRecord, depth: int) -> str | None:
    """What a record means for its job, in a line; None where that is nothing new. ``depth``: layers frozen before it."""
    reason = plain(getattr(record, "reason", ""))
    because = f": {reason}" if reason else ""
    match record:
        case ev.JobSubmitted():
            return "submitted"
        case ev.CancelRequested():
            return "asked to be cancelled"
        case ev.Start():
            return f"attempt {record.attempt} gets {_grant(record.grant)}{because}"
        case ev.Resize():
            return f"resized to {_grant(record.grant)} as attempt {record.attempt}{because}"
        case ev.Regrant():
            return f"new bounds: {_grant(record.grant)}{because}"
        case ev.Preempt():
            return f"asked to leave its GPUs{because}"
        case ev.Stop():
            return f"asked to end{because}"
        case ev.JobStarted():
            return f"attempt {record.attempt} is up"
        case ev.ProgressReported() if record.frozen_layers != depth:
            verb = "freezes" if record.frozen_layers > depth else "un-freezes"
            return f"epoch {record.epoch}: {verb} {depth} -> {record.frozen_layers} layers{because}"
        case ev.JobWarned():
            return f"warning: {plain(record.message)}"
        case ev.JobStopped():
            return f"attempt {record.attempt} left its GPUs"
        case ev.JobCrashed():
            return f"attempt {record.attempt} died{because}"
        case ev.JobFinished():
            metric = "" if record.metric is None else f", {record.metric:.4g}"
            return f"{'done' if record.outcome == 'completed' else 'out of samples, target missed'}{metric}"
        case ev.JobFailed():
            return f"given up{because}"
        case _:
            return None


def _grant(grant: ev.Grant) -> str:
    half = "half of one GPU" if grant.shared else f"{grant.num_gpus} GPU{'s' * (grant.num_gpus > 1)}"
    bounds = []
    if grant.min_frozen_layers:
        bounds.append(f"freezing at least {grant.min_frozen_layers} layers")
    if grant.max_frozen_layers is not None:
        bounds.append(f"at most {grant.max_frozen_layers} frozen")
    return half + (f" ({', '.join(bounds)})" if bounds else "")


# -- logs ------------------------------------------------------------------------------------------------------------------


def log_paths(home: Home, job_id: str) -> list[Path]:
    """The output of the job's attempts, oldest first; those that wrote one.

    Raises:
        UserError: there is no such job.
    """
    job = _find(load_state(home), job_id)
    folder = JobFolder(home.jobs_dir / job_id)
    logs = (folder.attempt(number).log for number in range(1, job.attempt + 1))
    return [log for log in logs if log.is_file()]


def follow_log(home: Home, job_id: str, *, poll_s: float = 0.5) -> Iterator[str]:
    """The job's output as it comes, through all attempts, until the job is finished. ``""`` when there was nothing new.

    Raises:
        UserError: there is no such job.
    """
    state = load_state(home)
    _find(state, job_id)
    clock, folder = RealClock(poll_s), JobFolder(home.jobs_dir / job_id)
    state, seen, read = ClusterState(state.cluster), 0, dict[Path, int]()
    while True:
        with home.open_log() as log:
            for seq, record in log.records(after_seq=seen):
                state.apply(record)
                seen = seq
        job = state.jobs.get(job_id)  # None while its submission lies in the inbox
        attempts = range(1, job.attempt + 1) if job is not None else ()
        yield "".join(_read_on(folder.attempt(number).log, read) for number in attempts)
        if job is not None and job.finished:
            return
        clock.wait_until(clock.now_s() + poll_s)


def _read_on(path: Path, read: dict[Path, int]) -> str:
    """What was added to a file since the last time."""
    try:
        with open_regular(path) as file:
            file.seek(read.get(path, 0))
            data = file.read()
    except OSError:
        return ""
    read[path] = read.get(path, 0) + len(data)
    return data.decode(errors="replace")
