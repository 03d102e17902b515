"""Jobs that nobody asks for reports are not interrupted; nothing else changes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import pytest
from worlds import workload

from icefrog import events as ev
from icefrog.driver import VirtualClock
from icefrog.executors.sim import SimExecutor, World, WorldConfig
from icefrog.policies import fifo
from icefrog.simulate import SimSettings, icefrog_scenario, simulate
from icefrog.state import ClusterState
from icefrog.testing.builders import cluster, gpus, grant
from icefrog.types import Pricing

WORK = workload(30)


class Asking(fifo.Fifo):
    """Fifo that wants reports."""

    pricing: ClassVar[Pricing] = Pricing(counts="requested", shares=False)  # type: ignore[misc]


def run(policy: type[fifo.Fifo], monkeypatch: pytest.MonkeyPatch) -> list[ev.AnyRecord]:
    monkeypatch.setattr(fifo, "Fifo", policy)
    settings = SimSettings(check=True)
    scenario = icefrog_scenario(WORK.specs, WORK.profiles, WORK.curves, cluster(2, 4), settings)
    return list(simulate(scenario, "fifo", settings=settings).records)


def ends(records: list[ev.AnyRecord]) -> dict[str, float]:
    return {record.job_id: record.time_s for record in records if isinstance(record, ev.JobFinished)}


def test_jobs_end_when_they_would_with_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    silent, loud = run(fifo.Fifo, monkeypatch), run(Asking, monkeypatch)
    assert ends(silent).keys() == {spec.job_id for spec in WORK.specs}
    for job_id, time_s in ends(loud).items():
        assert ends(silent)[job_id] == pytest.approx(time_s, abs=1e-4)
    assert not any(isinstance(record, ev.ProgressReported) for record in silent)
    assert sum(isinstance(record, ev.ProgressReported) for record in loud) > 400
    assert len(silent) < len(WORK.specs) * 8  # no rounds, no reports: what is left is about each job


@pytest.mark.parametrize("reports", [True, False])
def test_a_crash_falls_back_to_the_last_tuning_point_silent_or_not(reports: bool) -> None:
    work = workload(1, span_s=1.0, max_gpus=1)
    world = World(work.specs, work.profiles, work.curves, cluster(1, 4), WorldConfig(noise=0.0))
    clock = VirtualClock()
    executor = SimExecutor(world, clock)
    executor.adopt(ClusterState(cluster(1, 4)))
    job_id = work.specs[0].job_id
    while executor.poll(1.0):
        pass
    given = grant(1).model_copy(update={"batch_per_gpu": 256, "freezing": "none", "reports": reports})
    given = given.model_copy(update={"max_frozen_layers": 0})
    executor.submit([ev.Start(time_s=clock.now_s(), job_id=job_id, attempt=1, gpus=gpus(1), grant=given)])
    start_s = clock.now_s()
    truth = world.jobs[job_id]
    points = max(work.specs[0].max_epochs, 20)
    duration_s = work.specs[0].duration_s
    assert duration_s is not None
    crash_s = start_s + duration_s * 3.4 / points  # between the third point and the fourth
    while executor.poll(crash_s):
        pass
    clock.wait_until(crash_s)
    job = executor._jobs[job_id]
    crashed = executor._crash(job, crash_s, "test")
    assert crashed.effective_samples == pytest.approx(3 * truth.total_samples / points)


def test_an_oracle_is_told_what_is_left_at_any_time() -> None:
    work = workload(1, span_s=1.0, max_gpus=1)
    world = World(work.specs, work.profiles, work.curves, cluster(1, 4), WorldConfig())
    clock = VirtualClock()
    executor = SimExecutor(world, clock)
    executor.adopt(ClusterState(cluster(1, 4)))
    spec = work.specs[0]
    while executor.poll(1.0):
        pass
    assert executor.remaining_s(spec.job_id) == spec.duration_s
    given = grant(1).model_copy(update={"batch_per_gpu": 256, "freezing": "none", "reports": False})
    executor.submit([ev.Start(time_s=clock.now_s(), job_id=spec.job_id, attempt=1, gpus=gpus(1), grant=given)])
    clock.wait_until(clock.now_s() + 0.25 * (spec.duration_s or 0.0))
    assert executor.remaining_s(spec.job_id) == pytest.approx(0.75 * (spec.duration_s or 0.0), rel=1e-6)


def test_a_job_of_years_costs_no_rounds() -> None:
    spec = WORK.specs[0].model_copy(update={"duration_s": 1e9, "share": False})
    work = replace(WORK, specs=(spec,))
    settings = SimSettings(world=WorldConfig(noise=0.0))
    scenario = icefrog_scenario(work.specs, work.profiles, work.curves, cluster(2, 4), settings)
    result = simulate(scenario, "fifo", settings=settings)
    assert len(result.records) < 10
    assert math.isclose(next(iter(ends(list(result.records)).values())), spec.submit_s + 1e9, rel_tol=1e-6)
