"""Whole simulations: conservation, exactness, determinism, and the effects that the world is made of."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from worlds import SettlingCurves, Workload, workload

from icefrog import events as ev
from icefrog.executors.sim import WorldConfig
from icefrog.policies import policy_names
from icefrog.profile import FloatArray, OccupancyParams
from icefrog.simulate import RunResult, SimSettings, icefrog_scenario, simulate
from icefrog.spec import BatchRule, FreezeRule, JobSpec
from icefrog.state import ClusterState, JobState
from icefrog.testing.builders import cluster

EXACT = WorldConfig(noise=0.0, occupancy_noise=0.0, stats_noise=0.0)


def run(work: Workload, policy: str, nodes: int = 3, **settings: object) -> RunResult:
    options = settings.pop("options", None)
    chosen = SimSettings(**{"check": True, **settings})  # type: ignore[arg-type]
    scenario = icefrog_scenario(work.specs, work.profiles, work.curves, cluster(nodes, 4), chosen)
    return simulate(scenario, policy, options, chosen)  # type: ignore[arg-type]


STANDARD = workload(40)


@cache
def standard(policy: str) -> RunResult:
    """One run that several tests look at."""
    return run(STANDARD, policy)


def mean_jct_s(result: RunResult) -> float:
    return float(np.mean([_finish_s(job) - job.submit_s for job in result.state.jobs.values()]))


def _finish_s(job: JobState) -> float:
    assert job.finish_s is not None
    return job.finish_s


def reports(result: RunResult) -> list[ev.ProgressReported]:
    return [record for record in result.records if isinstance(record, ev.ProgressReported)]


@pytest.mark.parametrize("policy", policy_names())
def test_every_job_ends_and_the_invariants_hold_after_every_turn(policy: str) -> None:
    result = standard(policy)
    assert result.stalled == ""
    assert {job.phase for job in result.state.jobs.values()} == {"completed"}
    assert result.decisions.count > 40


@pytest.mark.parametrize("policy", policy_names())
def test_the_log_alone_gives_the_same_state(policy: str) -> None:
    result = standard(policy)
    replayed = ClusterState(cluster(3, 4))
    replayed.replay(result.records)
    for job_id, job in result.state.jobs.items():
        other = replayed.jobs[job_id]
        assert (other.finish_s, other.attained_gpu_s, other.num_restarts) == (
            job.finish_s,
            job.attained_gpu_s,
            job.num_restarts,
        )


def test_fifo_takes_the_logged_time_to_the_second() -> None:
    """With or without errors in the estimates: the log is the truth, and fifo follows no estimate."""
    for world in (EXACT, WorldConfig()):
        result = run(workload(60), "fifo", world=world)
        for job in result.state.jobs.values():
            assert job.num_restarts == 0
            assert job.oracle_duration_s is not None
            assert _finish_s(job) - job.submit_s == pytest.approx(job.queue_s + job.oracle_duration_s, abs=1.0)


@pytest.mark.parametrize("policy", policy_names())
def test_gpu_seconds_are_conserved(policy: str) -> None:
    """What jobs hold, summed over jobs from the state, is what the log's starts and ends of attempts add up to."""
    result = standard(policy)
    held: dict[str, tuple[float, float]] = {}
    total: dict[str, float] = {}
    grants: dict[tuple[str, int], ev.Grant] = {}
    for record in result.records:
        if isinstance(record, ev.Start | ev.Resize | ev.Regrant):
            grants[record.job_id, record.attempt] = record.grant
        share = 0.0
        if isinstance(record, ev.JobStarted | ev.Regrant):
            grant = grants[record.job_id, record.attempt]
            share = grant.num_gpus * (0.5 if grant.shared else 1.0)
        if isinstance(record, ev.JobStarted | ev.Regrant | ev.JobStopped | ev.JobFinished | ev.JobCrashed):
            since_s, rate = held.get(record.job_id, (record.time_s, 0.0))
            total[record.job_id] = total.get(record.job_id, 0.0) + rate * (record.time_s - since_s)
            held[record.job_id] = (record.time_s, share)
    for job_id, job in result.state.jobs.items():
        assert total[job_id] == pytest.approx(job.attained_gpu_s, rel=1e-9, abs=1e-3)
    finish_s = max(_finish_s(job) for job in result.state.jobs.values())
    assert sum(total.values()) <= 12 * finish_s


@pytest.mark.parametrize("policy", policy_names())
def test_effective_samples_never_fall_and_end_at_p0(policy: str) -> None:
    work = STANDARD
    result = standard(policy)
    last: dict[str, float] = {}
    for record in result.records:
        if isinstance(record, ev.ProgressReported | ev.JobStopped | ev.JobFinished):
            assert record.effective_samples is not None
            if not isinstance(record, ev.JobFinished):  # the job's counter may be off the truth by its own noise
                assert record.effective_samples >= last.get(record.job_id, 0.0) - 1e-6
            last[record.job_id] = record.effective_samples
    for spec in work.specs:
        assert last[spec.job_id] == spec.max_epochs * work.profiles[spec.job_id].samples_per_epoch


def test_nothing_freezes_under_a_policy_that_does_not_freeze() -> None:
    result = run(workload(20), "fifo", options={"backfill": "easy"})  # looks at progress, so that jobs report it
    assert {report.frozen_layers for report in reports(result)} == {0}


def test_layers_freeze_and_open_again() -> None:
    """Nothing forces it: the front settles early, and towards the end what is left to learn lies in front again."""
    by_job: dict[str, list[int]] = {}
    result = standard("icefrog")
    for report in reports(result):
        by_job.setdefault(report.job_id, []).append(report.frozen_layers)
    deeper = sum(any(b > a for a, b in pairwise(depths)) for depths in by_job.values())
    shallower = sum(any(b < a for a, b in pairwise(depths)) for depths in by_job.values())
    assert deeper >= 15
    assert shallower >= 3
    assert all(0.0 < report.psi <= 1.0 for report in reports(result))


@pytest.mark.parametrize("rule", ["freezeout", "egeria"])
def test_a_job_s_own_freezeout_is_simulated_and_rules_without_a_model_train_whole(rule: str) -> None:
    quiet: dict[str, SettlingCurves] = {
        job_id: QuietFront(curve.num_layers) for job_id, curve in STANDARD.curves.items()
    }
    own = tuple(spec.model_copy(update={"freeze": FreezeRule(rule=rule)}) for spec in STANDARD.specs)  # type: ignore[arg-type]
    by_job: dict[str, list[int]] = {}
    for report in reports(run(replace(STANDARD, specs=own, curves=quiet), "icefrog")):
        by_job.setdefault(report.job_id, []).append(report.frozen_layers)
    assert all(b >= a for depths in by_job.values() for a, b in pairwise(depths))
    assert (sum(depths[-1] > 0 for depths in by_job.values()) >= 15) == (rule == "freezeout")


def test_freezeout_freezes_by_its_schedule_and_never_opens() -> None:
    quiet: dict[str, SettlingCurves] = {
        job_id: QuietFront(curve.num_layers) for job_id, curve in STANDARD.curves.items()
    }
    by_job: dict[str, list[int]] = {}
    for report in reports(run(replace(STANDARD, curves=quiet), "icefrog", options={"penalty": "freezeout"})):
        by_job.setdefault(report.job_id, []).append(report.frozen_layers)
    assert sum(depths[-1] > 0 for depths in by_job.values()) >= 15
    assert all(b >= a for depths in by_job.values() for a, b in pairwise(depths))


def test_the_batch_moves_only_where_job_and_policy_let_it() -> None:
    """A noise scale far above the batch makes a larger batch worth as much: it saves launches and synchronisation."""
    noisy: dict[str, SettlingCurves] = {
        job_id: NoisyCurves(curve.num_layers) for job_id, curve in STANDARD.curves.items()
    }
    work = replace(STANDARD, specs=tuple(ranged(spec) for spec in STANDARD.specs), curves=noisy)
    fixed = run(work, "icefrog", options={"batch": "fixed"})
    moved = run(work, "icefrog")
    assert {batch_of(report) for report in reports(fixed)} == {None}
    assert {batch_of(report) for report in reports(moved)} > {"256", "1024"}
    assert mean_jct_s(moved) < mean_jct_s(fixed)
    unranged = run(STANDARD, "icefrog", options={"batch": "fixed"})
    assert mean_jct_s(fixed) == mean_jct_s(unranged)  # a range that nobody uses changes nothing


class QuietFront(SettlingCurves):
    """All but the last layers have hardly anything to learn."""

    def variance(self, progress: float, frozen_start: float | None = None, frozen_depth: float = 0.0) -> FloatArray:
        return np.where(np.arange(self.num_layers) < self.num_layers - 2, 1e-4, 1.0)


class NoisyCurves(SettlingCurves):
    """A large gradient noise scale."""

    def sqr_norm(self, progress: float) -> FloatArray:
        return np.full(self.num_layers, 1e-5)


def ranged(spec: JobSpec) -> JobSpec:
    return spec.model_copy(update={"batch": BatchRule(min=256, max=1024)})


def batch_of(report: ev.ProgressReported) -> str | None:
    found = re.search(r"batch (\d+)", report.reason)
    return found.group(1) if found else None


def test_pairs_share_gpus_in_overload() -> None:
    result = run(workload(24, span_s=600.0, max_gpus=4), "icefrog", nodes=1)
    shared = {
        record.job_id for record in result.records if isinstance(record, ev.Start | ev.Regrant) and record.grant.shared
    }
    assert len(shared) >= 4
    assert not any(isinstance(record, ev.JobCrashed) for record in result.records)
    alone = run(workload(24, span_s=600.0, max_gpus=4), "icefrog", nodes=1, options={"share": False})
    assert not any(isinstance(r, ev.Start | ev.Regrant) and r.grant.shared for r in alone.records)


def test_icefrog_beats_fifo_in_overload() -> None:
    """A sanity check with slack, not a tuned number."""
    work = workload(30, span_s=1800.0, max_gpus=4)
    assert mean_jct_s(run(work, "icefrog", nodes=1)) < 0.8 * mean_jct_s(run(work, "fifo", nodes=1))


@pytest.mark.parametrize("event_driven", [False, True])
def test_decisions_only_on_rounds_unless_events_are_wanted(event_driven: bool) -> None:
    result = run(workload(15), "fifo", event_driven=event_driven)
    off_grid = [r for r in result.records if isinstance(r, ev.PlanDecided)]
    ticks = {r.time_s for r in result.records if isinstance(r, ev.Tick)}
    assert any(record.time_s not in ticks for record in off_grid) == event_driven


def test_random_failures_fall_back_to_a_checkpoint() -> None:
    asks = {"backfill": "easy"}  # looks at progress, so that jobs report it
    result = run(workload(20), "fifo", world=WorldConfig(failures_per_gpu_h=0.3), options=asks)
    crashes = [record for record in result.records if isinstance(record, ev.JobCrashed)]
    assert crashes
    last: dict[str, float] = {}
    for record in result.records:
        if isinstance(record, ev.ProgressReported):
            last[record.job_id] = record.effective_samples
        elif isinstance(record, ev.JobCrashed):
            assert record.effective_samples == last.get(record.job_id, 0.0)


def test_a_pair_that_overflows_in_truth_loses_its_later_job() -> None:
    """Estimates that are far too low let pairs form that do not fit."""
    work = workload(24, span_s=600.0, max_gpus=4)
    occupancy = OccupancyParams(mem_bytes=(45e9, 0.0, 0.0, 0.0), util_pct=(30.0, 0.0, 0.0, 0.0))
    heavy = {name: profile.model_copy(update={"occupancy": occupancy}) for name, profile in work.profiles.items()}
    settings = SimSettings(world=WorldConfig(occupancy_noise=0.4), check=True)
    scenario = icefrog_scenario(work.specs, heavy, work.curves, cluster(1, 4), settings)
    result = simulate(scenario, "icefrog", settings=settings)
    crashes = [record for record in result.records if isinstance(record, ev.JobCrashed)]
    assert crashes
    assert {job.phase for job in result.state.jobs.values()} <= {"completed", "failed"}
    assert all("out of GPU memory" in record.reason for record in crashes)


def test_pairs_that_fit_by_freezing_fit_in_a_world_that_is_as_estimated() -> None:
    work = workload(40, span_s=3600.0, max_gpus=2)
    occupancy = OccupancyParams(mem_bytes=(1e9, 0.0, 70e9, 0.0), util_pct=(10.0, 0.0, 20.0, 0.0))
    heavy = {name: profile.model_copy(update={"occupancy": occupancy}) for name, profile in work.profiles.items()}
    settings = SimSettings(world=WorldConfig(noise=0.0, occupancy_noise=0.0, stats_noise=0.0), check=True)
    result = simulate(
        icefrog_scenario(work.specs, heavy, work.curves, cluster(1, 4), settings), "icefrog", None, settings
    )
    assert any(isinstance(record, ev.Regrant) and record.grant.shared for record in result.records)
    assert not any(isinstance(record, ev.JobCrashed) for record in result.records)


def test_a_job_larger_than_the_cluster_is_refused_and_blocks_nobody() -> None:
    work = workload(10)
    huge = work.specs[0].model_copy(
        update={"name": "huge", "gpus": (64,), "num_gpus": 64, "submit_s": 0.0, "share": False}
    )
    more = Workload(
        (huge, *work.specs),
        {**work.profiles, "huge": work.profiles["job000"]},
        {**work.curves, "huge": work.curves["job000"]},
    )
    for policy in policy_names():
        result = run(more, policy)
        assert result.state.jobs["huge"].phase == "failed"
        assert sum(job.phase == "completed" for job in result.state.jobs.values()) == 10


def test_a_request_that_no_rigid_policy_can_meet_stalls_with_the_job_named() -> None:
    work = workload(3)
    wide = work.specs[0].model_copy(update={"gpus": (1, 64), "num_gpus": 64, "duration_s": None, "share": False})
    result = run(Workload((wide, *work.specs[1:]), work.profiles, work.curves), "fifo")
    assert f"{wide.job_id} (asks for 64 GPUs)" in result.stalled
    assert sum(job.phase == "completed" for job in result.state.jobs.values()) == 2


def test_idle_gaps_cost_no_rounds() -> None:
    work = workload(2)
    late = work.specs[1].model_copy(update={"submit_s": 3.0e7})
    result = run(Workload((work.specs[0], late), work.profiles, work.curves), "icefrog")
    assert sum(isinstance(record, ev.Tick) for record in result.records) < 200
    assert {job.phase for job in result.state.jobs.values()} == {"completed"}


# -- determinism -------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys; sys.path.insert(0, {here!r})
from pathlib import Path
from worlds import workload
from icefrog.policies import policy_names
from icefrog.simulate import SimSettings, icefrog_scenario, simulate
from icefrog.testing.builders import cluster
w, settings = workload(30), SimSettings(seed=3)
scenario = icefrog_scenario(w.specs, w.profiles, w.curves, cluster(2, 4), settings)
for policy in policy_names():
    simulate(scenario, policy, None, settings, Path(sys.argv[1]))
"""


def test_same_seed_same_bytes_in_this_process_and_under_any_hash_seed(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    folders = [tmp_path / str(index) for index in range(2)]
    for folder, hash_seed in zip(folders, ("0", "1"), strict=True):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        subprocess.run([sys.executable, "-c", SCRIPT.format(here=here), str(folder)], check=True, env=env)
    for policy in policy_names():
        logs = [(folder / policy / "events.jsonl").read_bytes() for folder in folders]
        assert logs[0] == logs[1]
    work, settings = workload(30), SimSettings(seed=3)
    scenario = icefrog_scenario(work.specs, work.profiles, work.curves, cluster(2, 4), settings)
    result = simulate(scenario, "icefrog", None, settings, tmp_path / "again")
    assert result.events_path is not None
    assert result.events_path.read_bytes() == (folders[0] / "icefrog" / "events.jsonl").read_bytes()


def test_another_seed_is_another_world() -> None:
    work = workload(10)
    first, second = (run(work, "icefrog", seed=seed) for seed in (0, 1))
    assert mean_jct_s(first) != mean_jct_s(second)
