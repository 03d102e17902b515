"""The one loop: poll, log, handle, log, submit. Only the clock and the executor differ between simulation and reality."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from icefrog import events as ev
from icefrog.controller import Controller, Step
from icefrog.executors.base import Executor
from icefrog.state import GRANTED, ClusterState
from icefrog.values import value


class Clock(Protocol):
    """Time, and the only way to let it pass."""

    def now_s(self) -> float:
        """Seconds: since the epoch, or since the start of a trace."""
        ...

    def wait_until(self, time_s: float) -> None:
        """Let time pass, at most until then; a real clock may come back earlier to look for events."""
        ...


class RealClock:
    """Wall-clock time."""

    def __init__(self, poll_s: float = 0.2) -> None:
        self.poll_s = poll_s

    def now_s(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def wait_until(self, time_s: float) -> None:
        """Sleep for ``poll_s`` at most."""
        time.sleep(max(0.0, min(self.poll_s, time_s - time.time())))


class VirtualClock:
    """Simulated time: jumps."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        """Seconds since the start of the simulation."""
        return self._now_s

    def wait_until(self, time_s: float) -> None:
        """Be there at once. Time never goes back."""
        self._now_s = max(self._now_s, time_s)


class LogWriter(Protocol):
    """Where records go. ``append`` returns when they are safe."""

    def append(self, records: Sequence[ev.AnyRecord]) -> None:
        """Write records in order, all or none."""
        ...


class Inbox(Protocol):
    """Events that other processes put in (submissions, cancellations).

    They are not in the log yet: the order of the log is the order in which records are applied, and only the controller
    knows that. What ``receive`` hands out leaves the inbox when the next ``append`` has logged it, in the same transaction,
    so an interruption in between neither loses nor doubles it.
    """

    def receive(self) -> list[ev.Event]:
        """What is in the inbox, oldest first."""
        ...


@value
class Turn:
    """One pass of the loop, for whoever watches."""

    now_s: float
    events: Sequence[ev.Event]
    step: Step
    decision_s: float


class StallError(Exception):
    """Nothing can happen any more, yet jobs are unfinished (fault S13)."""


def run(
    controller: Controller,
    executor: Executor,
    log: LogWriter,
    clock: Clock,
    *,
    round_s: float,
    first_round_s: float | None = None,
    inbox: Inbox | None = None,
    keep_going: Callable[[], bool] = lambda: True,
    on_turn: Callable[[Turn], None] = lambda turn: None,
    until_idle: bool = True,
) -> None:
    """Run until every job is finished (``until_idle``) or ``keep_going`` says no.

    Write-ahead: events are logged before they are handled, commands before they are carried out; whatever is interrupted can
    be taken up from the log. Rounds in which the plan would stay as it is (``Plan.stands_until_s``) are spared; the others
    keep their places on the grid.

    Raises:
        StallError: nothing can happen any more (in a simulation), yet jobs are unfinished; it names them.
    """
    executor.adopt(controller.state)
    _carry_out(controller.recover(), log, executor)
    rounds = _Rounds(clock.now_s() if first_round_s is None else first_round_s, round_s)
    idle_rounds = 0
    while keep_going():
        # 1. What happened. While no job is there no round is due, so that idle gaps cost nothing.
        busy = bool(controller.state.active)
        horizon_s = rounds.next_from(controller.round_needed_s) if busy else math.inf
        incoming = inbox.receive() if inbox is not None else []
        polled = executor.poll(horizon_s)
        if not incoming and not polled:
            if until_idle and executor.idle():
                if not busy:
                    return
                if horizon_s == math.inf:
                    raise _stall(controller)
            clock.wait_until(horizon_s)
        now_s = clock.now_s()
        if not busy or now_s < horizon_s:
            rounds.skip_to(now_s)  # those before now were spared, or nobody was there
        events: list[ev.Event] = [*incoming, *polled]
        ticks = [ev.Tick(time_s=now_s)] if rounds.due(now_s, controller.round_needed_after(events)) else []
        events += ticks
        if not events:
            continue
        log.append(events)
        # 2. What to do about it.
        started = time.perf_counter()
        step = controller.handle(events)
        decision_s = time.perf_counter() - started
        # 3. Write it down, then do it.
        _carry_out(step, log, executor)
        on_turn(Turn(now_s, events, step, decision_s))
        idle_rounds = idle_rounds + 1 if ticks and not step.commands and executor.idle() else 0
        if until_idle and idle_rounds > _STALLED_ROUNDS:
            raise _stall(controller)


def _stall(controller: Controller) -> StallError:
    state = controller.state
    jobs = ", ".join(
        f"{job.job_id} (asks for {job.spec.requested_gpus} GPUs)" for job in list(state.active.values())[:5]
    )
    more = f" and {len(state.active) - 5} more" if len(state.active) > 5 else ""
    up = state.cluster.num_gpus - sum(state.cluster.gpus_per_node[node] for node in state.down)
    return StallError(
        f"nothing runs and nothing will come, yet these jobs are not finished: {jobs}{more}. Of the cluster's "
        f"{state.cluster.num_gpus} GPUs {up} are in service"
        + (": the capacity or the failed nodes never come back" if state.down else "")
    )


def _carry_out(step: Step, log: LogWriter, executor: Executor) -> None:
    if step.facts or step.commands:
        log.append([*step.facts, *step.commands])
        executor.submit(step.commands)


def vacate(
    controller: Controller,
    executor: Executor,
    log: LogWriter,
    clock: Clock,
    *,
    reason: str,
    wait_s: float,
    on_turn: Callable[[Turn], None] = lambda turn: None,
) -> bool:
    """Ask every job to save a checkpoint and leave its GPUs, and wait for that; no decision is taken meanwhile.

    The jobs wait again afterwards, in the log and in truth, so a later controller takes them up from their checkpoints.
    Returns False if one was still there after ``wait_s``.
    """
    state = controller.state
    granted = [job for job in state.active.values() if job.phase in GRANTED]
    asked = [ev.Preempt(time_s=clock.now_s(), job_id=job.job_id, attempt=job.attempt, reason=reason) for job in granted]
    _apply(state, asked, log)
    executor.submit(asked)
    give_up_s = clock.now_s() + wait_s
    while True:
        events = executor.poll(give_up_s)
        _apply(state, events, log)
        if events:
            on_turn(Turn(clock.now_s(), events, Step(), 0.0))
        if executor.idle() or clock.now_s() >= give_up_s:
            return executor.idle()
        clock.wait_until(give_up_s)


def _apply(state: ClusterState, records: Sequence[ev.AnyRecord], log: LogWriter) -> None:
    if records:
        log.append(records)
        for record in records:
            state.apply(record)


_STALLED_ROUNDS = 3  # in a row, with an idle executor and no command


class _Rounds:
    """The grid of scheduling rounds."""

    def __init__(self, origin_s: float, round_s: float) -> None:
        self.round_s = round_s
        self.next_s = origin_s

    def next_from(self, time_s: float) -> float:
        """The next round that is not before ``time_s``; infinite if that is."""
        if time_s <= self.next_s or time_s == math.inf:
            return max(self.next_s, time_s)
        return self.next_s + math.ceil((time_s - self.next_s) / self.round_s) * self.round_s

    def skip_to(self, now_s: float) -> None:
        """Forget rounds that are over; the next one is the first on the grid at ``now_s`` or later."""
        if now_s > self.next_s:
            self.next_s += math.ceil((now_s - self.next_s) / self.round_s) * self.round_s

    def due(self, now_s: float, needed_s: float) -> bool:
        """Whether a round on the grid at ``needed_s`` or later has come. Those that have, needed or not, are over."""
        if now_s < self.next_s:
            return False
        due = self.next_from(needed_s) <= now_s
        self.skip_to(now_s)
        if self.next_s <= now_s:
            self.next_s += self.round_s
        return due
