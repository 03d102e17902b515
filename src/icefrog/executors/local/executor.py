"""The local executor: what should run is compared with what runs, again and again, and brought one step closer each time.

Nothing is remembered that cannot be found out anew from the state and the attempts' folders, so it does not matter when a
controller dies and another one takes over.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from icefrog import events as ev
from icefrog.driver import Clock
from icefrog.executors.local.attempts import Attempt, JobFolder, Life, job_grant
from icefrog.executors.local.reports import Ending, Story, Tail, ending, progress_event, started_event
from icefrog.executors.local.slots import Devices
from icefrog.executors.local.text import plain
from icefrog.runtime import protocol
from icefrog.spec import JobSpec
from icefrog.state import GRANTED, ClusterState, JobState, Phase
from icefrog.types import GpuId

_MAX_SPAWNS = 5  # supervisors started for an attempt that none took up, before that counts as a crash


@dataclass(frozen=True, slots=True)
class Goal:
    """What the scheduler wants of a job. Without a grant: that it leaves its GPUs."""

    attempt: int
    gpus: tuple[GpuId, ...] = ()
    grant: ev.Grant | None = None


@dataclass(slots=True)
class Current:
    """The one attempt of a job that may be running."""

    attempt: Attempt
    gpus: tuple[GpuId, ...]
    shared: bool
    announced: bool  # whether the log has its JobStarted
    told_offset: int  # reports up to here are in the log
    tail: Tail
    story: Story = field(default_factory=Story)
    child: subprocess.Popen[bytes] | None = None  # its supervisor, if this process started it
    spawns: int = 0
    note: str = ""  # a warning that is still to be told

    @property
    def number(self) -> int:
        """The attempt's number."""
        return self.attempt.number


@dataclass(slots=True)
class Job:
    """One job under this executor."""

    spec: JobSpec
    folder: JobFolder
    goal: Goal
    latest_s: float
    """Time of its last event, or of the command that began it: its events never go back behind it."""
    current: Current | None = None

    @property
    def job_id(self) -> str:
        """The job's id."""
        return self.spec.job_id


class LocalExecutor:
    """Runs attempts on this machine.

    Args:
        jobs_dir: ``home/jobs``.
        devices: how ranks are told which GPUs are theirs.
        clock: for the time of what has no time stamp of its own.
        silent_s: a job whose ranks run for so long without a report is counted as started; it may be a command that does
            not use our runtime.
        obey_s: so long after a running job was told to freeze deeper, its new partner waits for it to say that it has.
    """

    def __init__(
        self, jobs_dir: Path, devices: Devices, clock: Clock, *, silent_s: float = 30.0, obey_s: float = 300.0
    ) -> None:
        self._jobs_dir = jobs_dir
        self._devices = devices
        self._clock = clock
        self._silent_s = silent_s
        self._obey_s = obey_s
        self._specs: dict[str, JobSpec] = {}
        self._state: ClusterState | None = None
        self._jobs: dict[str, Job] = {}

    # -- the Executor interface --------------------------------------------------------------------------------------------

    def adopt(self, state: ClusterState) -> None:
        """Take up every job that the log grants GPUs to, or that still has to leave them."""
        self._state = state
        for job in state.active.values():
            if job.phase is Phase.PENDING:
                continue
            goal = Goal(job.attempt, job.gpus, job.grant) if job.phase in GRANTED else Goal(job.attempt)
            latest_s = job.submit_s if job.holding is None else job.holding.since_s
            self._jobs[job.job_id] = taken = Job(job.spec, self._folder(job.job_id), goal, latest_s)
            taken.current = self._adopt_current(taken, job)
        for taken in self._jobs.values():
            self._tell_bounds(taken)

    def submit(self, commands: Sequence[ev.AnyCommand]) -> None:
        """Note what should be; :meth:`poll` brings it about. A command that was overtaken changes nothing."""
        for command in commands:
            job = self._jobs.get(command.job_id)
            if job is not None and command.attempt < job.goal.attempt:
                continue
            goal = _goal(command, job)
            if job is not None:
                job.goal = goal
                self._tell_bounds(job)
            elif isinstance(command, ev.Start | ev.Resize):
                folder = self._folder(command.job_id)
                self._jobs[command.job_id] = Job(self._spec(command.job_id), folder, goal, command.time_s)

    def poll(self, until_s: float) -> list[ev.Event]:
        """What happened since the last call; does not wait."""
        found: list[ev.Event] = []
        for job in list(self._jobs.values()):  # first whoever leaves, so that its GPUs are free for the others
            found += [self._timed(job, event) for event in self._observe(job)]
        for job in list(self._jobs.values()):
            if (
                job.current is not None
                and job.current.shared
                and job.goal.grant is not None
                and not job.goal.grant.shared
            ):
                self._tell_bounds(job)  # its partner may have left
            if job.current is None and job.goal.grant is not None and self._free(job):
                found += [self._timed(job, event) for event in self._begin(job)]
        return sorted(found, key=lambda event: event.time_s)

    def _timed(self, job: Job, event: ev.Event) -> ev.Event:
        """The event, not before the job's last one and not in the future, whatever the job's clock says."""
        now_s = self._clock.now_s()
        told_s = event.time_s if math.isfinite(event.time_s) else now_s
        job.latest_s = max(job.latest_s, min(told_s, now_s))
        return event if event.time_s == job.latest_s else event.model_copy(update={"time_s": job.latest_s})

    def idle(self) -> bool:
        """Whether nothing runs, nor should."""
        return not self._jobs

    def close(self) -> None:
        """Nothing to let go of: attempts do not need this process."""

    def hurry(self) -> None:
        """End whatever runs at once, without a checkpoint."""
        for job in self._jobs.values():
            if job.current is not None:
                job.current.attempt.ask_kill()

    # -- taking over -------------------------------------------------------------------------------------------------------

    def _folder(self, job_id: str) -> JobFolder:
        return JobFolder(self._jobs_dir / job_id)

    def _spec(self, job_id: str) -> JobSpec:
        assert self._state is not None, "adopt comes first"
        return self._state.jobs[job_id].spec

    def _adopt_current(self, job: Job, state: JobState) -> Current | None:
        """The attempt that may run: the one that the log says holds GPUs, else the newest that was written down."""
        held = state.holding
        attempt = job.folder.attempt(held.attempt) if held is not None else job.folder.newest(state.attempt)
        if attempt is None:
            return None
        announced = held is not None
        offset = state.report_offset if announced else 0
        # Of an attempt that spoilt its folder the log still knows what it may run on.
        known = (held.gpus, held.shared) if held is not None and held.gpus else (job.goal.gpus, state.shared)
        on, shared = attempt.holds() or known
        return Current(attempt, on, shared, announced, offset, tail=Tail(attempt.reports))

    def _new(self, job: Job, attempt: Attempt) -> Current:
        assert job.goal.grant is not None
        return Current(attempt, job.goal.gpus, job.goal.grant.shared, False, 0, tail=Tail(attempt.reports))

    # -- one job, one look -------------------------------------------------------------------------------------------------

    def _observe(self, job: Job) -> list[ev.Event]:
        current = job.current
        if current is None:
            return self._nothing_runs(job)
        if current.child is not None:
            current.child.poll()  # no zombies
        notes: list[ev.Event] = []
        if current.announced and current.note:
            notes = [self._warned(job, current, current.note)]
            current.note = ""
        life = self._life(current)  # before the reports: once it is over, they are complete
        wanted = job.goal.grant is not None and current.number == job.goal.attempt
        if not wanted and life is not Life.OVER:
            current.attempt.ask_stop()
            if life is Life.NOT_BEGUN:  # a supervisor that comes late finds the request and leaves at once
                life = self._life(current)
        events = notes + self._read_reports(job, current, wanted)
        match life:
            case Life.OVER:
                events += self._over(job, current, wanted)
            case Life.NOT_BEGUN if wanted:
                events += self._spawn(job, current)
            case Life.NOT_BEGUN:
                job.current = None
                events += self._nothing_runs(job)
            case Life.RUNNING:
                now_s = self._clock.now_s()
                since_s = self._up_since_s(current, now_s)
                if wanted and not current.announced and now_s - since_s >= self._silent_s:
                    events.append(self._announce(job, current, since_s))  # it has used its GPUs since then
        return events

    def _life(self, current: Current) -> Life:
        """How far the attempt is; what a killed supervisor left behind is ended, and counts until it is gone."""
        life = current.attempt.life()
        if life is not Life.NOT_BEGUN and current.attempt.orphaned() and current.attempt.kill_orphans():
            return Life.RUNNING
        if life is Life.NOT_BEGUN and current.announced:  # the log saw it run, yet its folder is gone
            return Life.RUNNING if current.attempt.kill_orphans() else Life.OVER
        return life

    def _nothing_runs(self, job: Job) -> list[ev.Event]:
        if job.goal.grant is not None:
            return []
        del self._jobs[job.job_id]
        return [ev.JobStopped(time_s=self._clock.now_s(), job_id=job.job_id, attempt=job.goal.attempt)]

    def _read_reports(self, job: Job, current: Current, wanted: bool) -> list[ev.Event]:
        """What the job says; of an attempt that the log never saw start, and that is not wanted any more, nothing."""
        events: list[ev.Event] = []
        for report, offset in current.tail.read():
            if not isinstance(report, str):
                current.story.add(report)
            if offset <= current.told_offset:
                continue
            started = isinstance(report, protocol.Started)
            if not current.announced and not (started and wanted):
                continue
            match report:
                case protocol.Started() if not current.announced:
                    events.append(started_event(job.spec, current.number, report, offset))
                    current.announced = True
                case protocol.Started() | protocol.Progress():
                    events.append(progress_event(job.spec, current.number, report, offset))
                case protocol.Warned():
                    events.append(self._warned(job, current, plain(report.message), offset, report.time_s))
                case str():
                    events.append(self._warned(job, current, f"a line of its reports cannot be read: {report}", offset))
                case _:
                    continue
            current.told_offset = offset
        return events

    def _warned(
        self, job: Job, current: Current, message: str, offset: int | None = None, time_s: float | None = None
    ) -> ev.JobWarned:
        return ev.JobWarned(
            time_s=self._clock.now_s() if time_s is None else time_s,
            job_id=job.job_id,
            attempt=current.number,
            report_offset=current.told_offset if offset is None else offset,
            message=message,
        )

    def _up_since_s(self, current: Current, default_s: float) -> float:
        since_s = current.attempt.up_since_s()
        return default_s if since_s is None else since_s

    def _announce(self, job: Job, current: Current, time_s: float) -> ev.JobStarted:
        current.announced = True
        return ev.JobStarted(
            time_s=time_s,
            job_id=job.job_id,
            attempt=current.number,
            report_offset=current.told_offset,
        )

    def _over(self, job: Job, current: Current, wanted: bool) -> list[ev.Event]:
        """Nothing is left of the attempt: its GPUs are free. Say how it ended, and what becomes of the job."""
        job.current = None
        end = ending(current.attempt, job.spec, current.story, self._clock.now_s())
        if wanted:
            del self._jobs[job.job_id]
            endings = self._ending_events(job, current, end)
            if current.announced or (end.kind == "crashed" and current.attempt.up_since_s() is None):
                return endings  # one whose ranks never ran was never up
            return [self._announce(job, current, self._up_since_s(current, end.time_s)), *endings]
        if current.announced:
            if end.kind == "finished" or job.goal.grant is None:
                del self._jobs[job.job_id]
            return self._ending_events(job, current, end)
        # The log never saw this attempt start and has moved on to another number. Only a result is worth telling.
        if end.kind == "finished":
            del self._jobs[job.job_id]
            return [end.event(job.job_id, job.goal.attempt, 0)]
        return self._nothing_runs(job)

    def _ending_events(self, job: Job, current: Current, end: Ending) -> list[ev.Event]:
        offset = current.told_offset
        common = {"time_s": end.time_s, "job_id": job.job_id, "attempt": current.number, "report_offset": offset}
        notes: list[ev.Event] = [ev.JobWarned(**common, message=note) for note in end.notes]
        return [*notes, end.event(job.job_id, current.number, offset)]

    # -- starting ----------------------------------------------------------------------------------------------------------

    def _free(self, job: Job) -> bool:
        """Whether the GPUs are physically free: nobody is on them, or one sharer where this one shares, too."""
        grant = job.goal.grant
        assert grant is not None
        for gpu in job.goal.gpus:
            others = self._others_on(job, (gpu,)).values()
            if len(others) > (1 if grant.shared else 0) or not all(other.shared for other in others):
                return False
            if any(self._too_open(other) and not self._overdue(other) for other in others):
                return False
        return True

    def _others_on(self, job: Job, gpus: tuple[GpuId, ...]) -> dict[str, Current]:
        """Attempts of other jobs on one of these GPUs, by job."""
        others = {name: other.current for name, other in self._jobs.items() if other is not job}
        return {name: on for name, on in others.items() if on is not None and not set(on.gpus).isdisjoint(gpus)}

    def _too_open(self, sharer: Current) -> bool:
        """Whether it does not freeze yet what it was told to, to leave room for a partner: it will after its step."""
        told = sharer.attempt.read_grant()
        if told is None or told.min_frozen_layers == 0:
            return False
        return not sharer.story.obeys(told, sharer.attempt.born_with())

    def _overdue(self, sharer: Current) -> bool:
        """Whether it had its time to obey."""
        return self._clock.now_s() - sharer.attempt.told_at_s() >= self._obey_s

    def _begin(self, job: Job) -> list[ev.Event]:
        goal = job.goal
        assert goal.grant is not None
        attempt = job.folder.attempt(goal.attempt)
        devices = self._devices.env([gpu.device for gpu in goal.gpus])
        current = self._new(job, attempt)
        for name, other in self._others_on(job, goal.gpus).items():
            if self._too_open(other):
                current.note = f"started beside {name}, which did not say within {self._obey_s:g} s that it has frozen"
        try:
            attempt.create(job.spec, goal.gpus, goal.grant, devices)
        except OSError as error:
            return self._cannot_begin(job, current, f"cannot write {error.filename}: {error.strerror}")
        job.current = current
        return self._spawn(job, current)

    def _spawn(self, job: Job, current: Current) -> list[ev.Event]:
        """Start a supervisor, unless one is on its way."""
        if current.child is not None and current.child.returncode is None:
            return []
        if current.spawns >= _MAX_SPAWNS:
            reason = f"no supervisor could be started; see {current.attempt.path / 'supervisor.log'}"
            return self._cannot_begin(job, current, reason)
        current.spawns += 1
        try:
            current.child = current.attempt.spawn()
        except OSError as error:
            return self._cannot_begin(job, current, f"no supervisor could be started: {error.strerror}")
        return []

    def _cannot_begin(self, job: Job, current: Current, reason: str) -> list[ev.Event]:
        """A crash like any other: the controller gives the job up when it comes too often."""
        del self._jobs[job.job_id]
        common = {"time_s": self._clock.now_s(), "job_id": job.job_id, "attempt": current.number}
        return [ev.JobCrashed(**common, reason=plain(reason))]

    def _tell_bounds(self, job: Job) -> None:
        """Write new bounds where the running attempt finds them."""
        grant, current = job.goal.grant, job.current
        if grant is None or current is None or current.number != job.goal.attempt or not current.attempt.exists():
            return
        if not grant.shared and self._others_on(job, current.gpus):
            return  # which needs its memory until it has left; poll looks again
        current.shared = grant.shared
        told = job_grant(job.spec, grant)
        if current.attempt.read_grant() != told:
            try:
                current.attempt.write_grant(told)
            except OSError as error:
                current.note = f"cannot be told its new bounds: {error.strerror}: {error.filename}"


def _goal(command: ev.AnyCommand, job: Job | None) -> Goal:
    match command:
        case ev.Start() | ev.Resize():
            return Goal(command.attempt, command.gpus, command.grant)
        case ev.Regrant():
            return Goal(command.attempt, job.goal.gpus if job is not None else (), command.grant)
        case ev.Preempt() | ev.Stop():
            return Goal(command.attempt)
