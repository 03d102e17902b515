"""Fairness and the cost of restarts on logs small enough to work out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_logs import CLUSTER, Log, generate, spec

from icefrog import events as ev
from icefrog.report import fold, summarise
from icefrog.report.fairness import finish_time_rho, jain_index, restart_gpu_s, worst_mean
from icefrog.report.metrics import integral
from icefrog.report.record import Folder


def logged(log: Log, time_s: float, name: str, *, gpus: int, duration_s: float) -> None:
    job = spec(name).model_copy(update={"num_gpus": gpus, "duration_s": duration_s})
    log.records.append(ev.JobSubmitted(time_s=time_s, job=job))
    log.attempt[name] = 0


def contended() -> Log:
    """Four GPUs. a asks for 4 and runs 0-100. b asks for 1, waits until 100 and runs 100-200."""
    log = Log()
    logged(log, 0, "a", gpus=4, duration_s=100)
    log.start(0, "a", [(0, 0), (0, 1), (1, 0), (1, 1)])
    logged(log, 50, "b", gpus=1, duration_s=100)
    log.finish(100, "a")
    log.start(100, "b", [(0, 0)])
    log.finish(200, "b")
    return log


def test_finish_time_fairness_by_hand() -> None:
    run = fold(contended().records, CLUSTER)
    # a: alone for 50 s, with b for 50 s: N = 1.5, so 1/N of 4 GPUs is 2.67 < 4: T_id = 100 x 1.5.
    # b: with a for 50 of its 150 s: N = 4/3, 1/N is 3 GPUs >= 1: T_id = 100, T_sh = 150.
    assert finish_time_rho(run) == (pytest.approx(100 / 150), pytest.approx(1.5))
    row = summarise(run)
    assert (row["max_rho"], row["unfair_fraction"]) == (pytest.approx(1.5), 0.5)
    assert row["mean_rho"] == pytest.approx((2 / 3 + 1.5) / 2)
    assert row["p99_rho"] == pytest.approx(2 / 3 + 0.99 * (1.5 - 2 / 3))
    assert row["jain_index"] == pytest.approx((1.5 + 2 / 3) ** 2 / (2 * (1.5**2 + (2 / 3) ** 2)))
    assert (row["max_queue_s"], row["worst_queue_s"], row["p50_queue_s"], row["p90_queue_s"]) == (50, 50, 25, 45)


def test_jobs_that_did_not_finish_contend_but_have_no_rho() -> None:
    log = contended()
    logged(log, 100, "c", gpus=1, duration_s=10)
    log.start(100, "c", [(1, 1)])
    log.records.sort(key=lambda record: record.time_s)
    run = fold(log.records, CLUSTER)
    a, b, c = finish_time_rho(run)
    assert c is None
    assert a == pytest.approx(100 / 150)
    assert b == pytest.approx(1.5)  # N = 5/3: its share is still more than its one GPU
    assert summarise(run)["unfair_fraction"] == 0.5


def test_a_live_job_has_no_rho() -> None:
    log = Log()
    log.submit(0, "a")
    log.start(0, "a", [(0, 0)])
    log.finish(10, "a")
    row = summarise(fold(log.records, CLUSTER))
    assert (row["mean_rho"], row["max_rho"], row["jain_index"], row["unfair_fraction"]) == (None, None, None, None)


@pytest.mark.parametrize(
    ("values", "expected"), [([], None), ([0.0], None), ([3, 3, 3], 1.0), ([1, 0, 0, 0], 0.25), ([1, 3], 16 / 20)]
)
def test_jain(values: list[float], expected: float | None) -> None:
    assert jain_index(values) == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("count", "expected"), [(0, None), (1, 0), (19, 18), (40, 38.5), (100, 97)]
)  # of 0, 1, ..: the largest 5 %, one at least
def test_the_worst_off(count: int, expected: float | None) -> None:
    assert worst_mean([float(i) for i in range(count)]) == expected


def test_gpu_hours_lost_to_restarts_in_a_simulation() -> None:
    """Stops and starts take no time there; the cost is the first ``restart_s`` of every later attempt."""
    log = Log()
    log.submit(0, "a")
    log.start(0, "a", [(0, 0)])
    log.resize(100, "a", [(0, 0), (0, 1)], gap_s=0)  # 60 s x 2
    log.resize(200, "a", [(0, 0), (0, 1), (1, 0), (1, 1)], gap_s=0)  # 20 s x 4: moved again at 220
    log.resize(220, "a", [(0, 1)], gap_s=0)  # 60 s x 1
    log.crash(400, "a")
    log.start(500, "a", [(0, 0)], shared=True)  # 30 s x 1/2: done at 530
    log.finish(530, "a")
    run = fold(log.records, CLUSTER)
    assert run.jobs[0].restarted_s == (100, 200, 220, 500)
    assert restart_gpu_s(run.jobs[0], 60) == pytest.approx(120 + 80 + 60 + 15)
    assert restart_gpu_s(run.jobs[0], 0) == 0
    row = summarise(run, restart_s=60)
    assert (row["restart_s"], row["restart_gpu_hours"]) == (60, pytest.approx(275 / 3600))


def test_gpu_hours_lost_to_restarts_on_a_live_cluster() -> None:
    """GPUs are kept from when they are both granted and free until the attempt is up; the first start costs nothing."""
    log = Log()
    log.submit(0, "a")
    log.grant(0, "a", [(0, 0)])
    log.up(9, "a")
    log.resize(50, "a", [(0, 0), (0, 1)], gap_s=5)
    log.crash(70, "a")
    log.grant(75, "a", [(0, 0)])
    log.up(82, "a")
    log.finish(90, "a")
    run = fold(log.records, CLUSTER)
    assert run.jobs[0].reserved_gpu_s == 2 * 5 + 7
    assert summarise(run)["restart_gpu_hours"] == pytest.approx(17 / 3600)


@given(seed=st.integers(0, 1000), jobs=st.integers(1, 20), cut=st.floats(0, 1), restart_s=st.floats(0, 500))
def test_laws_of_any_log(seed: int, jobs: int, cut: float, restart_s: float) -> None:
    records = generate(seed=seed, jobs=jobs, cluster=CLUSTER)
    run = fold(records, CLUSTER)
    folder = Folder(CLUSTER)
    at = int(cut * len(records))
    folder.append(records[:at])
    folder.append(records[at:])
    assert folder.run() == run  # folding in pieces is folding at once
    for job in run.jobs:
        assert len(job.restarted_s) == job.restarts
        lost_s = restart_gpu_s(job, restart_s)
        assert 0 <= lost_s <= integral(job.gpus, run.end_s) + 1e-6
        assert lost_s <= restart_gpu_s(job, restart_s + 10) + 1e-9
