"""Metrics on logs small enough to work out by hand, and laws that hold for any log."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_logs import CLUSTER, Log, generate

from icefrog import events as ev
from icefrog.report import fold, summarise
from icefrog.report.metrics import busy_gpu_s, focus_end_s, integral, job_row, percentile, resample
from icefrog.report.record import Segment, Sharing
from icefrog.spec import Target
from icefrog.state import IllegalTransitionError
from icefrog.testing import builders as b


def two_jobs() -> Log:
    """a: 0-10 waits, 10-50 on two GPUs, 50-60 restarts, 60-100 on four. b: 20-100 waits, 100-120 on one."""
    log = Log()
    log.submit(0, "a")
    log.start(10, "a", [(0, 0), (0, 1)])
    log.submit(20, "b")
    log.progress(30, "a", frozen_layers=3, variance=(1.0,) * 10)
    log.resize(50, "a", [(0, 0), (0, 1), (1, 0), (1, 1)], gap_s=10)
    log.progress(80, "a", frozen_layers=2, variance=(1.0,) * 10)
    log.finish(100, "a")
    log.start(100, "b", [(0, 0)])
    log.finish(120, "b")
    return log


def test_two_jobs_by_hand() -> None:
    run = fold(two_jobs().records, CLUSTER)
    a, b = run.jobs
    assert (a.submit_s, a.start_s, a.finish_s, a.jct_s) == (0, 10, 100, 100)
    assert (a.queue_s, a.gpu_s, a.restarts, a.status) == (20, 2 * 40 + 4 * 40, 1, "completed")
    assert (b.submit_s, b.start_s, b.finish_s, b.jct_s) == (20, 100, 120, 100)
    assert (b.queue_s, b.gpu_s, b.restarts) == (80, 20, 0)
    assert a.gpus == ((10, 2), (50, 0), (60, 4), (100, 0))
    assert a.frozen == ((10, 0), (30, 3), (80, 2))
    assert a.num_layers == 10
    assert run.in_use == ((10, 2), (50, 0), (60, 4), (100, 1), (120, 0))
    assert run.waiting == ((0, 1), (10, 0), (20, 1), (50, 2), (60, 1), (100, 0))
    assert a.segments(run.end_s) == [
        Segment(0, 10, 0, 0),
        Segment(10, 30, 2, 0),
        Segment(30, 50, 2, 3),
        Segment(50, 60, 0, 3),
        Segment(60, 80, 4, 3),
        Segment(80, 100, 4, 2),
    ]


def test_summary_by_hand() -> None:
    row = summarise(fold(two_jobs().records, CLUSTER), policy="p", seed=7, wall_s=1.5, decision_s={"mean": 1, "max": 2})
    assert list(row)[:13] == [
        *("policy", "seed", "jobs", "completed", "avg_jct_s", "p50_jct_s", "p99_jct_s", "makespan_s"),
        *("avg_queue_s", "restarts", "gpu_utilization", "decision_s", "wall_s"),
    ]
    assert (row["policy"], row["seed"], row["jobs"], row["completed"]) == ("p", 7, 2, 2)
    assert (row["avg_jct_s"], row["avg_queue_s"], row["restarts"], row["makespan_s"]) == (100, 50, 1, 120)
    assert row["gpu_utilization"] == pytest.approx(260 / (4 * 120))
    # GPU-seconds by depth: 2 x 20 at 0, 2 x 20 + 4 x 20 at 3 of 10, 4 x 20 at 2 of 10; b never froze.
    assert row["mean_frozen_fraction"] == pytest.approx((120 * 0.3 + 80 * 0.2) / 260)
    assert (row["decision_s"], row["wall_s"]) == ({"mean": 1, "max": 2}, 1.5)


def test_a_sharer_counts_half_until_it_is_alone_again() -> None:
    log = Log()
    log.submit(0, "a")
    log.submit(0, "b")
    log.start(0, "a", [(1, 1)], shared=True)
    log.start(10, "b", [(1, 1)], shared=True)
    log.finish(50, "b")
    log.regrant(50, "a", shared=False)
    log.finish(80, "a")
    run = fold(log.records, CLUSTER)
    a, b = run.jobs
    assert a.gpu_s == 50 / 2 + 30
    assert b.gpu_s == 40 / 2
    assert (a.restarts, a.queue_s) == (0, 0)
    assert a.sharing == (Sharing(10, 50, "b"),)
    assert b.sharing == (Sharing(10, 50, "a"),)
    assert a.shared_s == 40
    assert run.in_use == ((0, 0.5), (10, 1.0), (80, 0.0))


def test_unfinished_jobs_are_counted_and_left_out() -> None:
    log = two_jobs()
    log.submit(120, "runs")
    log.start(120, "runs", [(0, 0)])
    log.submit(130, "waits")
    log.progress(200, "runs")
    run = fold(log.records, CLUSTER)
    row = summarise(run)
    assert (row["jobs"], row["completed"], row["unfinished"]) == (4, 2, 2)
    assert (row["avg_jct_s"], row["avg_queue_s"], row["makespan_s"]) == (100, 50, 200)
    assert row["gpu_utilization"] == pytest.approx((260 + 80) / (4 * 200))
    runs, waits = (job_row(job) for job in run.jobs[2:])
    for cell in ("finish_s", "jct_s", "queue_s", "metric", "time_to_target_s"):
        assert runs[cell] is None
        assert waits[cell] is None
    assert (runs["status"], runs["start_s"], runs["gpu_s"]) == ("unfinished", 120, 80)
    assert (waits["status"], waits["start_s"], waits["gpu_s"]) == ("unfinished", None, 0)


def test_failed_and_cancelled_jobs_are_no_fast_jobs() -> None:
    log = two_jobs()
    log.submit(100, "refused")
    log.fail(100, "refused")
    log.submit(100, "unwanted")
    log.cancel(101, "unwanted")
    run = fold(log.records, CLUSTER)
    row = summarise(run)
    assert (row["failed"], row["cancelled"], row["completed"], row["avg_jct_s"]) == (1, 1, 2, 100)
    refused = job_row(run.jobs[2])
    assert (refused["status"], refused["finish_s"], refused["jct_s"]) == ("failed", 100, None)


def test_a_missed_target_has_a_completion_time() -> None:
    log = Log()
    log.submit(0, "a", target=Target(value=0.9))
    log.start(0, "a", [(0, 0)])
    log.progress(10, "a", metric=0.7)
    log.finish(30, "a", outcome="target_missed", metric=0.8)
    run = fold(log.records, CLUSTER)
    row = summarise(run)
    assert (row["completed"], row["target_missed"], row["avg_jct_s"]) == (0, 1, 30)
    assert run.jobs[0].time_to_target_s is None
    assert run.jobs[0].metric == ((10, 0.7), (30, 0.8))


def test_time_to_target_is_the_first_report_that_meets_it() -> None:
    log = Log()
    log.submit(5, "a", target=Target(metric="loss", value=0.2, mode="min"))
    log.start(5, "a", [(0, 0)])
    log.progress(10, "a", metric=0.3)
    log.progress(20, "a", metric=0.15)
    log.progress(30, "a", metric=0.25)
    log.finish(40, "a")
    assert fold(log.records, CLUSTER).jobs[0].time_to_target_s == 15


def test_a_crash_waits_and_restarts() -> None:
    log = Log()
    log.submit(0, "a")
    log.start(0, "a", [(0, 0)])
    log.crash(10, "a")
    log.start(25, "a", [(0, 1)])
    log.finish(30, "a")
    job = fold(log.records, CLUSTER).jobs[0]
    assert (job.crashes, job.restarts, job.queue_s, job.gpu_s) == (1, 1, 15, 15)
    assert job.deaths == ((10, "attempt 1 died: out of memory"),)


def test_times_of_a_live_log_start_at_the_first_submission() -> None:
    epoch_s = 1.7e9
    log = Log()
    log.submit(epoch_s, "a")
    log.start(epoch_s + 1, "a", [(0, 0)])
    log.finish(epoch_s + 9, "a")
    run = fold(log.records, CLUSTER)
    assert run.live
    assert (run.start_s, run.end_s) == (0, 9)
    assert (run.jobs[0].submit_s, run.jobs[0].start_s, run.jobs[0].finish_s) == (0, 1, 9)
    assert run.in_use == ((1, 1), (9, 0))


def test_times_of_a_simulation_stay() -> None:
    log = Log()
    log.submit(100, "a")
    log.start(100, "a", [(0, 0)])
    log.finish(150, "a")
    run = fold(log.records, CLUSTER)
    assert not run.live
    assert run.jobs[0].submit_s == 100
    assert summarise(run)["makespan_s"] == 50


def test_an_empty_log() -> None:
    row = summarise(fold([], CLUSTER), policy="fifo")
    assert (row["jobs"], row["completed"], row["makespan_s"], row["gpu_utilization"]) == (0, 0, 0, 0)
    assert row["avg_jct_s"] is None
    assert row["p99_jct_s"] is None


def test_an_impossible_log_is_refused() -> None:
    log = two_jobs()
    log.finish(130, "b")
    with pytest.raises(IllegalTransitionError, match="illegal for job b"):
        fold(log.records, CLUSTER)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([1, 2, 3, 4], 50, 2.5), ([1, 2, 3, 4], 99, 3.97), ([10, 0], 90, 9), ([5], 99, 5), ([], 50, None)],
)
def test_percentiles_are_linear(values: list[float], percent: float, expected: float | None) -> None:
    assert percentile(values, percent) == (None if expected is None else pytest.approx(expected))


@given(seed=st.integers(0, 10_000), jobs=st.integers(1, 25), finish=st.booleans())
def test_gpu_seconds_of_jobs_are_the_busy_gpu_seconds(seed: int, jobs: int, finish: bool) -> None:
    """Two ways to the same number: what the state charges each job, and what was in use at each instant."""
    run = fold(generate(seed=seed, jobs=jobs, cluster=CLUSTER, finish=finish), CLUSTER)
    assert busy_gpu_s(run) == pytest.approx(integral(run.in_use, run.end_s))
    assert max((used for _, used in run.in_use), default=0) <= CLUSTER.num_gpus
    assert all(waiting >= 0 for _, waiting in run.waiting)
    for job in run.jobs:
        assert integral(job.gpus, run.end_s) == pytest.approx(job.gpu_s)
        parts = job.segments(run.end_s)
        assert sum(part.gpus * (part.end_s - part.start_s) for part in parts) == pytest.approx(job.gpu_s)
        assert all(before.end_s == after.start_s for before, after in pairwise(parts))
        waited_s = sum(part.end_s - part.start_s for part in parts if part.gpus == 0)
        assert waited_s == pytest.approx(job.queue_s)
    if finish:
        assert run.unfinished == 0
        assert integral(run.waiting, run.end_s) == pytest.approx(sum(job.queue_s for job in run.jobs))


@given(
    steps=st.lists(st.tuples(st.floats(0.1, 50), st.integers(0, 48)), min_size=1, max_size=80),
    buckets=st.integers(1, 30),
)
def test_resampling_keeps_the_integral(steps: list[tuple[float, int]], buckets: int) -> None:
    time_s, series = 0.0, []
    for gap_s, value in steps:
        time_s += gap_s
        series.append((time_s, float(value)))
    end_s = time_s + 1
    coarse = resample(tuple(series), 0.0, end_s, buckets)
    assert len(coarse) <= max(buckets, 1)
    assert integral(coarse, end_s) == pytest.approx(integral(tuple(series), end_s))


def test_a_long_tail_does_not_press_a_plot_into_its_first_pixels():
    events = []
    for i in range(40):
        name, finish_s = f"j{i}", 1e6 if i == 0 else 100.0 + i
        events += [
            ev.JobSubmitted(time_s=0.0, job=b.job_spec(name)),
            ev.Start(time_s=0.0, job_id=name, attempt=1, gpus=b.gpus(1, node=i), grant=b.grant(1)),
            ev.JobStarted(time_s=0.0, job_id=name, attempt=1),
            ev.JobFinished(time_s=finish_s, job_id=name, attempt=1, outcome="completed"),
        ]
    run = fold(sorted(events, key=lambda e: e.time_s), b.cluster(40, 1))
    assert 138.0 <= focus_end_s(run) <= 170.0
    short = fold(sorted(events[4:], key=lambda e: e.time_s), b.cluster(40, 1))
    assert focus_end_s(short) == short.end_s
