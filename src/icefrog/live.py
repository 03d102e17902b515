"""A live cluster as a library: start and stop the controller of a home, submit and cancel jobs, ask about them."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from icefrog import events as ev
from icefrog.candidate_cache import CandidateCache
from icefrog.controller import Controller, ControllerConfig
from icefrog.driver import RealClock, StallError, Turn, run, vacate
from icefrog.errors import UserError
from icefrog.eventlog import SqliteLog, name_taken
from icefrog.executors.local import LocalExecutor, local_cluster
from icefrog.executors.local.slots import devices_of
from icefrog.home import Home, Settings
from icefrog.livequery import JobRow, explain, follow_log, job_rows, log_paths
from icefrog.policies import make_policy
from icefrog.spec import JobSpec
from icefrog.specfile import load_profile
from icefrog.state import ClusterState, Phase

__all__ = [
    "Home",
    "JobRow",
    "Settings",
    "UpResult",
    "View",
    "cancel",
    "down",
    "explain",
    "follow_log",
    "job_rows",
    "log_paths",
    "submit",
    "submit_all",
    "submittable",
    "up",
]

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LEAVE_EXTRA_S = 15.0  # beyond the longest grace period: for a checkpoint that is being written, and for the kill


class View(Protocol):
    """Whoever watches a running controller."""

    def turn(self, turn: Turn, state: ClusterState) -> None:
        """Something happened."""
        ...

    def refresh(self, state: ClusterState, now_s: float) -> None:
        """Called several times a second."""
        ...

    def message(self, text: str) -> None:
        """Something to tell the user."""
        ...

    def close(self) -> None:
        """The controller is gone."""
        ...


class NoView:
    """Nobody watches."""

    def turn(self, turn: Turn, state: ClusterState) -> None:
        """Nothing."""

    def refresh(self, state: ClusterState, now_s: float) -> None:
        """Nothing."""

    def message(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True)
class UpResult:
    """How a controller's run ended."""

    why: Literal["idle", "signal"]
    unfinished: tuple[str, ...]
    left_running: bool
    """Whether a process is left that did not even die when killed (or belongs to another user)."""
    failed: tuple[str, ...] = ()
    """Jobs that ended as failed or short of their target while this controller ran."""


class _Signals:
    """SIGINT, SIGTERM and SIGHUP as a request to leave; a second one calls ``hurry``."""

    def __init__(self) -> None:
        self.count = 0
        self.hurry: Callable[[], None] = lambda: None

    def _on(self, _signum: int, _frame: Any) -> None:
        self.count += 1
        if self.count > 1:
            self.hurry()

    @contextmanager
    def installed(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # Python takes signals in the main thread only
            return
        before = {number: signal.signal(number, self._on) for number in _STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def up(
    home: Home,
    *,
    policy: str | None = None,
    options: Mapping[str, Any] | None = None,
    slots: int | None = None,
    round_s: float | None = None,
    until_idle: bool = False,
    view: View | None = None,
    poll_s: float = 0.2,
) -> UpResult:
    """Run the controller of a home in the foreground, until a signal (or, with ``until_idle``, until no job is left).

    On SIGINT, SIGTERM or SIGHUP every running job is asked to save a checkpoint and leave; a second signal ends them
    at once. A later ``up`` goes on from the checkpoints. Whatever was interrupted less kindly is taken up from the log.

    Args:
        home: where the log and the jobs are.
        policy: a policy's name; default: the home's last one, else ``icefrog``.
        options: the policy's options; default: the last ones, if the policy is the same.
        slots: use this many CPU slots; default: the last cluster, else this machine's GPUs, else a slot per core.
        round_s: seconds between scheduling rounds.
        until_idle: return when every job is finished.
        view: who watches.
        poll_s: how often to look for events, s.

    Raises:
        UserError: another controller runs there, the log is damaged, a setting is wrong, or (``until_idle``) the jobs left
            cannot run.
    """
    watcher = view if view is not None else NoView()
    with home.open_log(create=True) as log, home.controller_lock():
        settings = _settings(home, policy, options, slots, round_s)
        chosen = make_policy(settings.policy, settings.options)
        clock = RealClock(poll_s)
        executor = LocalExecutor(home.jobs_dir, devices_of(settings.cluster), clock)
        home.save_settings(settings)
        state = home.replay(log, settings.cluster)
        before = {job.job_id for job in state.jobs.values() if job.finished}
        config = ControllerConfig(seed=settings.seed, restart_s=settings.restart_s)
        controller = Controller(state, chosen, CandidateCache(state.active), config)
        signals = _Signals()

        def keep_going() -> bool:
            watcher.refresh(state, clock.now_s())
            return signals.count == 0

        try:
            with signals.installed():
                try:
                    run(
                        controller,
                        executor,
                        log,
                        clock,
                        round_s=settings.round_s,
                        inbox=log,
                        keep_going=keep_going,
                        on_turn=lambda turn: watcher.turn(turn, state),
                        until_idle=until_idle,
                    )
                except (SystemExit, BrokenPipeError):  # nobody reads what we print any more
                    _leave(controller, executor, log, clock, NoView())
                    raise
                if signals.count == 0:
                    return UpResult("idle", tuple(state.active), left_running=False, failed=_failed(state, before))
                signals.hurry = executor.hurry
                left = _leave(controller, executor, log, clock, watcher)
                return replace(left, failed=_failed(state, before))
        except StallError as error:
            raise UserError(str(error), "`icefrog explain JOB` says what each of them waits for") from error
        finally:
            executor.close()
            watcher.close()


def _failed(state: ClusterState, before: set[str]) -> tuple[str, ...]:
    bad = (Phase.FAILED, Phase.TARGET_MISSED)
    return tuple(job.job_id for job in state.jobs.values() if job.phase in bad and job.job_id not in before)


def _settings(
    home: Home,
    policy: str | None,
    options: Mapping[str, Any] | None,
    slots: int | None,
    round_s: float | None,
) -> Settings:
    """The home's settings with what was asked for now on top."""
    if round_s is not None and not 0 < round_s < math.inf:
        raise UserError(f"a round of {round_s:g} s is not possible", "give a positive number of seconds")
    old = home.settings()
    new = old if old is not None and slots is None else Settings(cluster=local_cluster(slots))
    if old is not None and slots is not None:
        new = old.model_copy(update={"cluster": new.cluster})
    update: dict[str, Any] = {}
    if policy is not None:
        update["policy"] = policy
    if options is not None or (policy is not None and policy != new.policy):
        update["options"] = dict(options or {})
    if round_s is not None:
        update["round_s"] = round_s
    return new.model_copy(update=update)


def _leave(
    controller: Controller, executor: LocalExecutor, log: SqliteLog, clock: RealClock, watcher: View
) -> UpResult:
    active = controller.state.active
    running = 0 if executor.idle() else sum(job.holding is not None for job in active.values())
    if running:
        watcher.message(f"stopping: {running} running jobs save a checkpoint and leave (again to end them at once)")
    grace_s = max((job.spec.stop_grace_s for job in active.values()), default=0.0)
    gone = vacate(
        controller,
        executor,
        log,
        clock,
        reason="the controller was stopped",
        wait_s=grace_s + _LEAVE_EXTRA_S,
        on_turn=lambda turn: watcher.turn(turn, controller.state),
    )
    if active:
        watcher.message(f"{len(active)} unfinished jobs go on from their checkpoints with the next `icefrog up`")
    return UpResult("signal", tuple(active), left_running=not gone)


def down(home: Home, *, wait_s: float = 120.0, poll_s: float = 0.1) -> bool:
    """Stop the running controller and wait until it is gone; False if none was running.

    Raises:
        UserError: it is still there after ``wait_s``, or belongs to another user.
    """
    pid = home.controller_pid()
    if pid is None:
        return False
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return False
    except PermissionError as error:
        raise UserError(f"the controller (process {pid}) belongs to another user", "ask them to stop it") from error
    clock = RealClock(poll_s)
    deadline_s = clock.now_s() + wait_s
    while home.controller_pid() == pid:
        if clock.now_s() > deadline_s:
            raise UserError(
                f"the controller (process {pid}) is still waiting for its jobs after {wait_s:g} s",
                "`icefrog down` again ends them at once, without a checkpoint",
            )
        clock.wait_until(deadline_s + 1.0)
    return True


def submit(home: Home, spec: JobSpec, *, cwd: Path | None = None) -> JobSpec:
    """Hand one job in; see :func:`submit_all`."""
    return submit_all(home, [spec], cwd=cwd)[0]


def submit_all(home: Home, specs: Sequence[JobSpec], *, cwd: Path | None = None) -> list[JobSpec]:
    """Hand jobs in, all or none. They start when a controller runs in this home, now or later.

    Args:
        home: where.
        specs: the jobs.
        cwd: the folder their commands run in; default: the current one.

    Returns:
        The jobs as submitted: with their folder, absolute.

    Raises:
        UserError: see :func:`submittable`; or a job's profile cannot be read.
    """
    submittable(home, specs)
    folder = (cwd if cwd is not None else Path.cwd()).absolute()
    placed = [spec.model_copy(update={"cwd": str(folder / (spec.cwd or ""))}) for spec in specs]
    profiles = [None if spec.profile is None else load_profile(Path(spec.cwd or "") / spec.profile) for spec in placed]
    with home.open_log(create=True) as log:
        now_s = RealClock().now_s()
        jobs = zip(placed, profiles, strict=True)
        log.post([ev.JobSubmitted(time_s=now_s, job=spec, profile=profile) for spec, profile in jobs])
    return placed


def submittable(home: Home, specs: Sequence[JobSpec]) -> None:
    """Check jobs without submitting them.

    Raises:
        UserError: a name was used before or is given twice, a job is for simulations only, or larger than the cluster.
    """
    names = [spec.name for spec in specs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"the name {twice} is given twice", "names are unique: change one (name: in the job file)")
    settings = home.settings()
    total = None if settings is None else settings.cluster.num_gpus
    for spec in specs:
        if spec.workload is not None:
            raise UserError(
                f"job {spec.name} names a workload of the catalogue, which only a simulation can run",
                "give it a command or an entry",
            )
        if total is not None and min(spec.gpus) > total:
            raise UserError(
                f"job {spec.name} needs at least {min(spec.gpus)} GPUs, the cluster has {total}",
                f"allow a smaller count (gpus: [..., {total}]), or start the controller with more slots",
            )
    if home.db.exists():
        with home.open_log() as log:
            if taken := next((name for name in names if log.knows(name)), None):
                raise name_taken(taken)


def cancel(home: Home, job_id: str) -> None:
    """Ask for the end of a job; the controller carries it out, now or when it next runs.

    Raises:
        UserError: there is no such job, or it is finished.
    """
    row = next((row for row in job_rows(home) if row.job_id == job_id), None)
    if row is None:
        raise UserError(f"there is no job named {job_id!r}", "`icefrog jobs` lists them")
    if row.finished:
        raise UserError(f"job {job_id} is {row.phase} already", "`icefrog jobs` shows the ones that are not")
    with home.open_log() as log:
        log.post([ev.CancelRequested(time_s=RealClock().now_s(), job_id=job_id)])
