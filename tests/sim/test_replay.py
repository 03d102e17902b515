"""What is replayed: pooled days, a faster pace, jobs that restrict freezing; and the fold that runs along."""

from __future__ import annotations

import pytest

from icefrog.eventlog import read_log
from icefrog.replay import FreezeLimit, TraceChoice, prepare, replay, run_policy
from icefrog.report import fold
from icefrog.simulate import SimSettings, icefrog_scenario
from icefrog.testing import builders as b

CLUSTER = b.cluster(2, 4)
CHOICE = TraceChoice("synth:philly-120", num_jobs=8, seed=3)


def test_a_faster_pace_keeps_the_jobs_and_presses_the_gaps() -> None:
    slow, fast = CHOICE.read(), TraceChoice("synth:philly-120", num_jobs=8, seed=3, pace=2.0).read()
    assert [job.job_id for job in slow.jobs] == [job.job_id for job in fast.jobs]
    assert [job.submit_s / 2 for job in slow.jobs] == [job.submit_s for job in fast.jobs]


def test_days_are_pooled(tmp_path) -> None:
    path = tmp_path / "jobs.csv"
    rows = "".join(f"j{i},2017-10-{1 + i // 24:02d}T{i % 24:02d}:30:00,1,60\n" for i in range(72))
    path.write_text("job_id,submit_time,num_gpus,duration_s\n" + rows)
    trace = TraceChoice(str(path), day_hours=(3, 7)).read()
    assert len(trace) == 3 * 4
    assert all(0 <= job.submit_s < 4 * 3600 for job in trace.jobs)


def test_half_the_jobs_restrict_freezing() -> None:
    free = prepare(CHOICE, CLUSTER).specs
    half = prepare(CHOICE, CLUSTER, FreezeLimit(0.5, 0.3)).specs
    limits = [spec.freeze.max_fraction for spec in half]
    assert sorted(limits) == [0.3] * 4 + [0.9] * 4
    assert [spec.labels["freezing"] for spec in half] == ["restricted" if x == 0.3 else "free" for x in limits]
    for before, after in zip(free, half, strict=True):  # nothing else changes
        unlabelled = {key: value for key, value in after.labels.items() if key != "freezing"}
        assert after.model_copy(update={"freeze": before.freeze, "labels": unlabelled}) == before
    assert half == prepare(CHOICE, CLUSTER, FreezeLimit(0.5, 0.3)).specs
    assert FreezeLimit(0.5).apply(free, 1) != FreezeLimit(0.5).apply(free, 2)


@pytest.mark.parametrize(("share", "restricted"), [(0.0, 0), (1.0, 8), (0.3, 2)])
def test_the_share_is_in_whole_jobs(share: float, restricted: int) -> None:
    specs = prepare(CHOICE, CLUSTER, FreezeLimit(share)).specs
    assert sum(spec.labels["freezing"] == "restricted" for spec in specs) == restricted


def test_the_fold_along_the_way_is_the_fold_of_the_log(tmp_path) -> None:
    workload = prepare(CHOICE, CLUSTER)
    settings = SimSettings()
    scenario = icefrog_scenario(workload.specs, workload.profiles, workload.curves, CLUSTER, settings)
    run, row = run_policy(scenario, "fifo", None, settings, tmp_path)
    assert run == fold(read_log(tmp_path / "fifo" / "events.jsonl"), CLUSTER, live=False)
    in_memory, again = run_policy(scenario, "fifo", None, settings)
    assert in_memory == run
    assert {**row, "wall_s": 0, "decision_s": 0} == {**again, "wall_s": 0, "decision_s": 0}


def test_the_summary_says_how_fair_it_was() -> None:
    (row,) = replay(prepare(CHOICE, CLUSTER), CLUSTER, ["fifo"])["runs"]
    assert 0 < row["mean_rho"] <= row["p99_rho"] <= row["max_rho"]
    assert 0 < row["jain_index"] <= 1
    assert row["p50_queue_s"] <= row["p90_queue_s"] <= row["p99_queue_s"] <= row["max_queue_s"]
    assert (row["restart_s"], row["restart_gpu_hours"]) == (60.0, 0.0)  # fifo moves nobody
