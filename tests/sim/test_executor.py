"""The executor by hand: what a command does, and that nothing of an old attempt is heard again."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from worlds import Workload, workload

from icefrog import events as ev
from icefrog.driver import VirtualClock
from icefrog.executors.sim import SimExecutor, World, WorldConfig
from icefrog.executors.sim.world import sharing_speed
from icefrog.profile import OccupancyParams
from icefrog.state import ClusterState
from icefrog.testing.builders import cluster, gpus, grant

UTIL_PCT = 10.0 + 0.2 * 256 + 10.0 + 5.0  # of the builders' profile at batch 256, nothing frozen
EXACT = WorldConfig(noise=0.0, occupancy_noise=0.0, stats_noise=0.0)


class Bench:
    """Two jobs on one node, submitted; every event is kept."""

    def __init__(self, work: Workload | None = None, config: WorldConfig = EXACT) -> None:
        work = work or workload(2, span_s=1.0, max_gpus=1)
        self.ids = [spec.job_id for spec in work.specs]
        self.clock = VirtualClock()
        self.world = World(work.specs, work.profiles, work.curves, cluster(1, 4), config)
        self.executor = SimExecutor(self.world, self.clock)
        self.events: list[ev.Event] = []
        self.drain(until_s=1.0)

    def drain(self, until_s: float = math.inf) -> list[ev.Event]:
        new: list[ev.Event] = []
        while polled := self.executor.poll(until_s):
            assert len({event.time_s for event in polled}) == 1
            new += polled
        self.events += new
        return new

    def start(self, job_id: str, attempt: int = 1, num_gpus: int = 1, shared: bool = False, first: int = 0) -> None:
        given = grant(num_gpus, shared=shared).model_copy(update={"batch_per_gpu": 256 // num_gpus})
        kind = ev.Start if attempt == 1 else ev.Resize
        self.executor.submit(
            [
                kind(
                    time_s=self.clock.now_s(),
                    job_id=job_id,
                    attempt=attempt,
                    gpus=gpus(num_gpus, first=first),
                    grant=given,
                )
            ]
        )

    def finish_s(self, job_id: str) -> float:
        return next(e.time_s for e in self.events if isinstance(e, ev.JobFinished) and e.job_id == job_id)

    def duration_s(self, job_id: str) -> float:
        duration_s = self.world.jobs[job_id].spec.duration_s
        assert duration_s is not None
        return duration_s


def plain(bench: Bench, job_id: str, attempt: int) -> ev.Preempt:
    return ev.Preempt(time_s=bench.clock.now_s(), job_id=job_id, attempt=attempt)


def no_freezing(config: WorldConfig = EXACT) -> Bench:
    work = workload(2, span_s=1.0, max_gpus=1)
    rule = work.specs[0].freeze.model_copy(update={"rule": "none"})
    specs = tuple(spec.model_copy(update={"freeze": rule}) for spec in work.specs)
    return Bench(replace(work, specs=specs), config)


def test_a_job_alone_runs_for_its_logged_time() -> None:
    bench = no_freezing()
    bench.start(bench.ids[0])
    bench.drain()
    started = next(e.time_s for e in bench.events if isinstance(e, ev.JobStarted))
    assert bench.finish_s(bench.ids[0]) - started == pytest.approx(bench.duration_s(bench.ids[0]), abs=1e-3)


def test_a_restart_costs_once_and_loses_nothing() -> None:
    bench = no_freezing()
    job_id = bench.ids[0]
    bench.start(job_id)
    bench.drain(until_s=100.0)
    bench.clock.wait_until(100.0)
    bench.executor.submit([plain(bench, job_id, 1)])
    stopped = bench.drain(until_s=100.0)
    assert [type(event) for event in stopped] == [ev.JobStopped]
    bench.clock.wait_until(500.0)
    assert bench.drain(until_s=500.0) == []  # reports of the attempt that is over are never heard
    bench.start(job_id, attempt=2)
    bench.drain()
    started = next(e.time_s for e in bench.events if isinstance(e, ev.JobStarted))
    assert bench.finish_s(job_id) == pytest.approx(started + bench.duration_s(job_id) + 400.0 + 60.0, abs=1e-3)


def test_commands_are_idempotent() -> None:
    bench = no_freezing()
    job_id = bench.ids[0]
    bench.start(job_id)
    bench.start(job_id)
    bench.executor.submit([ev.Preempt(time_s=1.0, job_id=bench.ids[1], attempt=0)])  # holds nothing: nothing to say
    assert [type(event) for event in bench.drain(until_s=bench.clock.now_s())] == [ev.JobStarted]


def test_sharers_slow_each_other_down_only_while_both_are_there() -> None:
    alone, together = no_freezing(), no_freezing()
    first, second = together.ids
    alone.start(first)
    alone.drain()
    together.start(first, shared=True)
    together.start(second, shared=True)
    together.drain()
    short, long = sorted(together.ids, key=together.finish_s)
    assert together.finish_s(first) > alone.finish_s(first)
    slow = together.finish_s(short) - 1.0
    speed = together.duration_s(short) / slow
    assert speed == pytest.approx(sharing_speed(UTIL_PCT, UTIL_PCT), rel=1e-3)
    expected = together.duration_s(long) + slow * (1.0 - speed)  # both have the same costs, so the same speed
    assert together.finish_s(long) - 1.0 == pytest.approx(expected, abs=1.5)


def test_a_job_that_has_ended_is_gone() -> None:
    """Nothing that was scheduled for it makes it again."""
    bench = no_freezing(replace(EXACT, failures_per_gpu_h=1e-3))
    for job_id in bench.ids:
        bench.start(job_id, shared=True)
    bench.drain()
    assert sum(isinstance(event, ev.JobFinished) for event in bench.events) == 2
    assert not bench.executor._alive


def test_three_on_a_gpu_is_a_fault_and_not_a_simulation() -> None:
    work = workload(3, span_s=1.0, max_gpus=1)
    bench = Bench(work)
    bench.start(bench.ids[0], shared=True)
    bench.start(bench.ids[1], shared=True)
    with pytest.raises(AssertionError, match="is held by"):
        bench.start(bench.ids[2], shared=True)


@pytest.mark.parametrize("regrant_first", [False, True])
def test_a_pair_of_which_one_is_told_to_freeze_fits_whatever_comes_first(regrant_first: bool) -> None:
    """The job that runs needs 95 % of the memory as it is, and a quarter at the depth that the same decision grants it."""
    work = workload(2, span_s=1.0, max_gpus=1)
    whole = cluster(1, 4).gpu_mem_bytes
    heavy = OccupancyParams(mem_bytes=(0.1 * whole, 0.0, 0.85 * whole, 0.0), util_pct=(30.0, 0.0, 0.0, 0.0))
    profiles = {name: profile.model_copy(update={"occupancy": heavy}) for name, profile in work.profiles.items()}
    bench = Bench(replace(work, profiles=profiles))
    early, late = bench.ids
    bench.start(late)
    bench.drain(until_s=bench.clock.now_s())
    deep = {"batch_per_gpu": 256, "min_frozen_layers": 10, "max_frozen_layers": None}
    half, now_s = grant(1, shared=True).model_copy(update=deep), bench.clock.now_s()
    start = ev.Start(time_s=now_s, job_id=early, attempt=1, gpus=gpus(1), grant=half)
    regrant = ev.Regrant(time_s=now_s, job_id=late, attempt=1, grant=half)
    bench.executor.submit([regrant, start] if regrant_first else [start, regrant])
    assert [type(event) for event in bench.drain(until_s=now_s)] == [ev.JobStarted]


def test_a_simulation_is_not_taken_up_from_a_log() -> None:
    bench = Bench()
    state = ClusterState(cluster(1, 4))
    bench.executor.adopt(state)
    state.replay([event for event in bench.events if isinstance(event, ev.JobSubmitted)])
    with pytest.raises(ValueError, match="same seed"):
        bench.executor.adopt(state)


@pytest.mark.parametrize("stats_noise", [0.0, 0.2])
def test_a_job_that_moves_its_batch_sees_its_gradients_with_an_error(stats_noise: float) -> None:
    """What it is told of them must not be the truth: statistical efficiency would be known for certain."""
    bench = Bench(config=replace(EXACT, stats_noise=stats_noise))
    a = bench.ids[0]
    given = grant(1).model_copy(update={"batch_per_gpu": 256, "elastic_batch": True})
    start = ev.Start(time_s=bench.clock.now_s(), job_id=a, attempt=1, gpus=gpus(1), grant=given)
    bench.executor.submit([start])
    bench.drain()
    seen = [e for e in bench.events if isinstance(e, ev.ProgressReported) and e.job_id == a]
    assert seen
    for report in seen:
        assert report.sqr_norm is not None
        exact = report.sqr_norm == (0.01,) * len(report.sqr_norm)  # as the curves have it at every progress
        assert exact == (stats_noise == 0.0)
