"""Windows, samples and loads of a trace; nothing is left out without being counted."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icefrog.errors import UserError
from icefrog.replay import TraceChoice
from icefrog.traces import (
    ReadReport,
    Trace,
    TraceJob,
    describe,
    describe_text,
    limit_gpus,
    pool_days,
    read_trace,
    sample,
    scale_load,
    window,
    write_text,
)

START = datetime(2017, 10, 3, 2, 30)


def hourly(num_jobs: int, start: datetime | None = START) -> Trace:
    """One job an hour; job i asks for i + 1 GPUs for half an hour."""
    jobs = tuple(TraceJob(f"j{i}", 3600.0 * i, i + 1, 1800.0, vc="v") for i in range(num_jobs))
    return Trace(jobs, ReadReport(num_jobs, num_jobs), "hourly", start)


def test_a_window_counts_from_its_start_and_excludes_its_end() -> None:
    cut = window(hourly(10), datetime(2017, 10, 3, 3), 2.5)  # 03:00 to 05:30; jobs at 03:30, 04:30; 05:30 is outside
    assert [(j.job_id, j.submit_s) for j in cut.jobs] == [("j1", 1800.0), ("j2", 5400.0)]
    assert cut.start == datetime(2017, 10, 3, 3)
    assert cut.report == ReadReport(10, 2, {"outside the window": 8})


def test_without_a_start_it_begins_with_the_first_job() -> None:
    later = window(hourly(10), START + timedelta(hours=2))
    assert [j.submit_s for j in window(later, None, 1.5).jobs] == [0.0, 3600.0]
    assert window(hourly(3)).jobs == hourly(3).jobs


def test_a_window_keeps_the_zone_of_its_local_time() -> None:
    trace = replace(hourly(10), zone="+08:00")
    assert window(trace, None, 2.5).zone == "+08:00"
    assert "from 2017-10-03 02:30:00 +08:00" in describe_text(window(trace, None, 2.5))


def test_wrong_windows() -> None:
    with pytest.raises(UserError, match="no job was submitted in this window; the trace spans 2017-10-03 02:30:00 to"):
        window(hourly(3), datetime(2018, 1, 1), 4)
    with pytest.raises(UserError, match="relative times only"):
        window(hourly(3, None), START, 4)
    for hours in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="hours: got"):
            window(hourly(3), None, hours)


def test_days_are_pooled_by_time_of_day() -> None:
    pooled = pool_days(hourly(30), first_hour=3, hours=2)  # 03:30, 04:30 of day 1; 03:30, 04:30 of day 2
    assert sorted((j.submit_s, j.job_id) for j in pooled.jobs) == [
        (1800.0, "j1"),
        (1800.0, "j25"),
        (5400.0, "j2"),
        (5400.0, "j26"),
    ]
    assert pooled.report == ReadReport(30, 4, {"outside hours 3-5 of the day": 26})


@given(num=st.integers(1, 20), seed=st.integers(0, 5))
def test_a_sample_is_a_subset_in_order_and_depends_on_the_seed_alone(num: int, seed: int) -> None:
    trace = hourly(20)
    drawn = sample(trace, num, seed)
    assert drawn == sample(trace, num, seed)
    assert len({j.job_id for j in drawn.jobs}) == num
    assert set(drawn.jobs) <= set(trace.jobs)
    assert list(drawn.jobs) == sorted(drawn.jobs, key=lambda j: j.submit_s)


def test_seeds_draw_different_samples() -> None:
    assert len({sample(hourly(20), 5, seed).jobs for seed in range(8)}) > 4


@pytest.mark.parametrize("num", [0, -1, 21])
def test_a_sample_needs_that_many_jobs(num: int) -> None:
    with pytest.raises(UserError, match=r"allowed: 1\.\.20"):
        sample(hourly(20), num, 0)


def test_load_draws_a_larger_sample_from_the_same_times() -> None:
    assert len(sample(hourly(40), 10, 0, load=2.0)) == 20
    with pytest.raises(UserError, match=r"got 10 x load 5, allowed: 1\.\.40"):
        sample(hourly(40), 10, 0, load=5.0)
    with pytest.raises(UserError, match="load: got nan"):
        sample(hourly(40), 10, 0, load=float("nan"))


def test_what_load_means_for_a_file_a_sample_and_a_generator(tmp_path: Path) -> None:
    log = tmp_path / "jobs.csv"
    log.write_text(write_text(hourly(40)))
    whole = TraceChoice(str(log), load=2.0).read()
    assert (len(whole), whole.jobs[-1].submit_s) == (40, 39 * 1800.0)  # played twice as fast
    drawn = TraceChoice(str(log), load=2.0, num_jobs=10).read()
    assert len(drawn) == 20
    assert {job.submit_s % 3600.0 for job in drawn.jobs} == {0.0}  # at the times of the log
    assert len(TraceChoice("synth:philly-120", load=2.0).read()) == 240
    assert len(TraceChoice("synth:philly-120", load=2.0, num_jobs=30).read()) == 60


def test_load_divides_the_gaps() -> None:
    assert [j.submit_s for j in scale_load(hourly(3), 2.0).jobs] == [0.0, 1800.0, 3600.0]
    for load in (0.0, float("nan"), -2.0):
        with pytest.raises(UserError, match="load: got"):
            scale_load(hourly(3), load)


def test_too_large_requests_are_counted() -> None:
    assert limit_gpus(hourly(10), 4).report == ReadReport(10, 4, {"asks for more than 4 GPUs": 6})


def test_describe() -> None:
    facts = describe(hourly(5))
    assert facts["jobs"] == 5
    assert facts["span_s"] == 4 * 3600
    assert facts["gpu_hours"] == 7.5
    assert facts["num_gpus"]["p50"] == 3.0
    assert facts["jobs_by_class"] == {"small": 1, "medium": 4, "large": 0, "extra-large": 0}  # 1 GPU h is medium
    assert facts["vcs"] == 1
    assert " 10-60 min  5  100.0 %  " + "█" * 40 in describe_text(hourly(5))


@pytest.mark.data
def test_a_morning_of_philly(data_dir: Path) -> None:
    cut = window(read_trace(data_dir / "philly/jobs.csv.gz"), datetime(2017, 10, 3, 3), 4)
    assert len(cut.jobs) == 37
    assert cut.report.read == 82248
    assert cut.jobs[0].submit_s == 115.0
