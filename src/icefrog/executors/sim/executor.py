"""The simulated executor: obeys commands in zero time, and jumps from event to event."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from icefrog import events as ev
from icefrog.driver import VirtualClock
from icefrog.executors.sim.base import SimulatedJob, SimWorld
from icefrog.executors.sim.failures import NodeChange
from icefrog.executors.sim.world import sharing_speed
from icefrog.lazymap import LazyMap
from icefrog.state import ClusterState
from icefrog.types import GpuId

_DECIMALS = 6  # of a time: microseconds

_SUBMIT, _STEP, _FAIL = "submit", "step", "fail"


class SimExecutor:
    """Runs the jobs of a world.

    Stops are answered at once (their cost is charged to the next start), so GPUs are free before others start on them.
    Determinism: events of equal time come in the order in which they were scheduled.

    Args:
        world: the truth.
        clock: advanced by :meth:`poll`.
        node_changes: when nodes leave service and come back, in order of time; may be without end.
    """

    def __init__(self, world: SimWorld, clock: VirtualClock, node_changes: Iterable[NodeChange] = ()) -> None:
        self._world = world
        self._clock = clock
        self._alive: dict[str, SimulatedJob] = {}  # submitted, and not finished
        self._jobs = LazyMap({spec.job_id: spec for spec in world.specs}, world.start_jobs().__getitem__, self._alive)
        self._holders: dict[GpuId, list[SimulatedJob]] = {}
        self._heap: list[tuple[float, int, str, str, int]] = []
        self._scheduled = 0
        self._ready: list[ev.Event] = []  # happened already: at the next poll
        self._node_changes = iter(node_changes)
        self._next_change = next(self._node_changes, None)
        self._down: set[int] = set()
        self._waited_for: Collection[str] = ()  # jobs that are not finished, of the state that we were told of
        self._failures = {job_id: world.rng(job_id, 2) for job_id in self._jobs if world.failures_per_gpu_h > 0}
        for spec in world.specs:
            self._schedule(spec.submit_s, spec.job_id, _SUBMIT, 0)

    # -- Executor ----------------------------------------------------------------------------------------------------------

    def adopt(self, state: ClusterState) -> None:
        """Nothing to take over. Raises ``ValueError`` for a state that is under way: the log does not hold the truth."""
        if state.jobs:
            raise ValueError("a simulation cannot be taken up from a log: start it again with the same seed")
        self._waited_for = state.active

    def submit(self, commands: Sequence[ev.AnyCommand]) -> None:
        """Carry out commands: whoever leaves first, then the starts."""
        now_s = self._clock.now_s()
        for command in commands:
            job = self._jobs[command.job_id]
            if command.kind in ("preempt", "stop", "resize") and job.holds:
                self._ready.append(self._stop(job, now_s))
        changed: list[SimulatedJob] = []
        for command in commands:
            job = self._jobs[command.job_id]
            if command.kind == "start" or command.kind == "resize":
                if command.attempt > job.attempt:
                    self._ready.append(self._start(job, command, now_s))
                    changed.append(job)
            elif command.kind == "regrant" and command.attempt == job.attempt and job.holds:
                job.advance(now_s)
                job.regrant(now_s, command.grant)
                self._retime(job, now_s)
                changed.append(job)
        # Last: a job may start beside one that is told only now to freeze so deep that both fit.
        for job in changed:
            self._ready += self._overflow(job, now_s)

    def poll(self, until_s: float) -> list[ev.Event]:
        """All that happens at the next time at which something happens, if that is not later than ``until_s``."""
        if self._ready:
            ready, self._ready = self._ready, []
            return ready
        happened: list[ev.Event] = []
        while self._heap and not happened and self._heap[0][0] <= until_s:
            time_s = self._heap[0][0]
            if (change := self._due_change(time_s)) is not None:
                return self._change_nodes(change)
            while self._heap and self._heap[0][0] == time_s:
                _, _, job_id, kind, generation = heapq.heappop(self._heap)
                if kind == _SUBMIT or job_id in self._alive:  # what is late for a job that has ended would make it anew
                    happened += self._happen(self._jobs[job_id], kind, generation, time_s)
            if happened:
                self._clock.wait_until(time_s)
        # No job has anything to say until then. To those that wait a change of nodes matters; where nothing else can ever
        # happen, only the return of one.
        hope = until_s < math.inf or self._down
        if not happened and self._waited_for and hope and (change := self._due_change(until_s)) is not None:
            return self._change_nodes(change)
        return happened

    def idle(self) -> bool:
        """Whether nothing runs, nothing will be submitted, and no job waits for a node to come back."""
        hope = self._waited_for and self._down and self._next_change is not None
        return not self._ready and not self._heap and not hope

    def close(self) -> None:
        """Nothing to let go of."""

    def remaining_s(self, job_id: str) -> float | None:
        """True service time left, for oracles; None where the world has no such notion."""
        return self._jobs[job_id].remaining_s(self._clock.now_s())

    # -- events ------------------------------------------------------------------------------------------------------------

    def _schedule(self, time_s: float, job_id: str, kind: str, generation: int) -> None:
        heapq.heappush(self._heap, (round(time_s, _DECIMALS), self._scheduled, job_id, kind, generation))
        self._scheduled += 1

    def _happen(self, job: SimulatedJob, kind: str, generation: int, now_s: float) -> list[ev.Event]:
        if kind == _SUBMIT:
            return [ev.JobSubmitted(time_s=now_s, job=job.spec)]
        if not job.holds or generation != (job.attempt if kind == _FAIL else job.generation):
            return []  # of an attempt or a speed that is over
        if kind == _FAIL:
            return [self._crash(job, now_s, "random failure")]
        job.advance(now_s)
        if job.next_event()[1]:
            return [self._finish(job, now_s)]
        job.end_interval()
        self._retime(job, now_s)
        report = job.report(now_s)
        return [*([report] if report is not None else []), *self._overflow(job, now_s)]

    def _start(self, job: SimulatedJob, command: ev.Start | ev.Resize, now_s: float) -> ev.JobStarted:
        for gpu in command.gpus:
            self._holders.setdefault(gpu, []).append(job)
        job.start(now_s, command.attempt, command.gpus, command.grant)
        self._retime(job, now_s)
        if job.job_id in self._failures:
            rate_per_s = self._world.failures_per_gpu_h * len(job.gpus) / 3600.0
            after_s = float(self._failures[job.job_id].exponential(1.0 / rate_per_s))
            self._schedule(now_s + after_s, job.job_id, _FAIL, job.attempt)
        return ev.JobStarted(time_s=now_s, job_id=job.job_id, attempt=job.attempt, total_samples=job.total_samples)

    def _stop(self, job: SimulatedJob, now_s: float) -> ev.JobStopped:
        job.advance(now_s)
        job.save()
        self._release(job, now_s)
        return ev.JobStopped(
            time_s=now_s, job_id=job.job_id, attempt=job.attempt, effective_samples=job.reported_samples
        )

    def _finish(self, job: SimulatedJob, now_s: float) -> ev.JobFinished:
        finish_s = job.finish(now_s)
        self._release(job, now_s)
        del self._alive[job.job_id]
        return ev.JobFinished(
            time_s=finish_s,
            job_id=job.job_id,
            attempt=job.attempt,
            outcome="completed",
            effective_samples=job.total_samples,
        )

    def _crash(
        self, job: SimulatedJob, now_s: float, reason: str, *, cause: Literal["job", "node"] = "job"
    ) -> ev.JobCrashed:
        job.advance(now_s)
        job.fall_back()
        self._release(job, now_s)
        return ev.JobCrashed(
            time_s=now_s,
            job_id=job.job_id,
            attempt=job.attempt,
            reason=reason,
            cause=cause,
            effective_samples=job.reported_samples,
        )

    # -- nodes -------------------------------------------------------------------------------------------------------------

    def _due_change(self, until_s: float) -> NodeChange | None:
        """The next change, if that is not later than ``until_s``."""
        change = self._next_change
        return change if change is not None and round(change.time_s, _DECIMALS) <= until_s else None

    def _change_nodes(self, first: NodeChange) -> list[ev.Event]:
        """All changes at the time of the first: the nodes, then what becomes of the jobs on them."""
        time_s = round(first.time_s, _DECIMALS)
        nodes: list[ev.Event] = []
        jobs: list[ev.Event] = []
        while (change := self._due_change(time_s)) is not None:
            self._next_change = next(self._node_changes, None)
            if change.up:
                self._down.discard(change.node)
                nodes.append(ev.NodeUp(time_s=time_s, node=change.node))
            else:
                self._down.add(change.node)
                nodes.append(ev.NodeDown(time_s=time_s, node=change.node, reason=change.reason))
                jobs += self._vacate(change, time_s)
        self._clock.wait_until(time_s)
        return [*nodes, *jobs]

    def _vacate(self, change: NodeChange, now_s: float) -> list[ev.Event]:
        """Jobs that hold a GPU of a node that leaves: stopped with a checkpoint if it was planned, else dead."""
        events: list[ev.Event] = []
        devices = range(self._world.cluster.gpus_per_node[change.node])
        holders = (self._holders.get(GpuId(change.node, device), ()) for device in devices)
        for job in dict.fromkeys(job for on_gpu in holders for job in on_gpu):
            if change.planned:
                warned = f"node {change.node} leaves service ({change.reason}): stopped with a checkpoint"
                events.append(ev.JobWarned(time_s=now_s, job_id=job.job_id, attempt=job.attempt, message=warned))
                events.append(self._stop(job, now_s))
            else:
                events.append(self._crash(job, now_s, f"lost with node {change.node} ({change.reason})", cause="node"))
        return events

    # -- GPUs --------------------------------------------------------------------------------------------------------------

    def _partner(self, job: SimulatedJob) -> SimulatedJob | None:
        """The other job on its (one) GPU."""
        others = [other for other in self._holders[job.gpus[0]] if other is not job] if job.gpus else []
        if len(others) > 1:
            raise AssertionError(f"{job.gpus[0]} is held by {job.job_id} and {[o.job_id for o in others]}")
        return others[0] if others else None

    def _release(self, job: SimulatedJob, now_s: float) -> None:
        partner = self._partner(job)
        for gpu in job.gpus:
            self._holders[gpu].remove(job)
        job.leave()
        if partner is not None:
            self._retime(partner, now_s)

    def _retime(self, job: SimulatedJob, now_s: float) -> None:
        """The job's speed may have changed, and with it its partner's: schedule what comes next for both."""
        partner = self._partner(job)
        for one, other in ((job, partner), (partner, job)):
            if one is None:
                continue
            one.advance(now_s)
            one.set_rate(1.0 if other is None else sharing_speed(one.true_occupancy()[1], other.true_occupancy()[1]))
            one.generation += 1
            self._schedule(one.next_event()[0], one.job_id, _STEP, one.generation)

    def _overflow(self, job: SimulatedJob, now_s: float) -> list[ev.Event]:
        """A pair that in truth needs more memory than there is: the later-submitted one dies."""
        partner = self._partner(job)
        if partner is None:
            return []
        mem_bytes = self._world.cluster.node_mem_bytes[job.gpus[0].node]
        if job.true_occupancy()[0] + partner.true_occupancy()[0] <= mem_bytes:
            return []
        victim = max(job, partner, key=lambda one: (one.spec.submit_s, one.job_id))
        return [self._crash(victim, now_s, f"out of GPU memory beside {(partner if victim is job else job).job_id}")]
