"""Jobs of the Pollux world by hand, on an invented application."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from invented import FOUR_NODES, step_s, trace, write

from icefrog import events as ev
from icefrog.errors import UserError
from icefrog.executors.sim.pollux.job import run_lengths
from icefrog.executors.sim.pollux.scenario import pollux_scenario, pollux_settings
from icefrog.policies import policy_names
from icefrog.simulate import RunResult, simulate
from icefrog.testing.builders import cluster
from icefrog.types import GpuId


def run(folder: Path, *jobs: tuple[float, int, int], policy: str = "tiresias", **options: object) -> RunResult:
    settings = pollux_settings()
    scenario, _ = pollux_scenario(trace(*jobs), FOUR_NODES, write(folder), settings)
    return simulate(scenario, policy, options, settings)


def finish_s(result: RunResult) -> list[float | None]:
    return [job.finish_s for job in result.state.jobs.values()]


def test_a_job_by_hand(tmp_path: Path) -> None:
    """Batch 8 on one GPU: gain 1, 0.08 s a step, so 100 steps an epoch take 8 s each, after the restart's 30 s.

    Submitted at 0 it is first seen at 60 s, after the first step of the world.
    """
    assert finish_s(run(tmp_path, (0.0, 1, 8))) == [60.0 + 30.0 + 8.0 + 8.0]


def test_a_larger_batch_gains_by_the_noise_of_the_gradient(tmp_path: Path) -> None:
    """Batch 16 on two GPUs: scale 2; gain (var + sqr) / (var / 2 + sqr) with var 1, then 2. Epochs end on whole seconds."""
    step, _ = step_s(1, 2, 8)
    first = round(100.0 * step / (2.0 / 1.5))
    second = round(100.0 * step / (3.0 / 2.0))
    # spread: on two nodes of four GPUs each the job still takes both from the first
    assert finish_s(run(tmp_path, (130.0, 2, 16))) == [180.0 + 30.0 + first + second]


def test_an_epoch_that_spans_steps_is_counted_step_by_step(tmp_path: Path) -> None:
    """32 samples on one GPU: 16 twice, 0.32 s; scale 4, gains 2 / 1.25 and 3 / 1.5. Steps end at multiples of 60 s."""
    goodputs = [2.0 / 1.25 / 0.32, 3.0 / 1.5 / 0.32]
    now_s, progress = 90.0, 0.0
    for threshold, goodput in zip((100.0, 200.0), goodputs, strict=True):
        while progress + goodput * (60.0 - now_s % 60.0) < threshold:
            progress += goodput * (60.0 - now_s % 60.0)
            now_s += 60.0 - now_s % 60.0
        now_s += round((threshold - progress) / goodput)
        progress = threshold
    assert finish_s(run(tmp_path, (1.0, 1, 32))) == [now_s]


def test_the_options_of_finished_jobs_are_forgotten(tmp_path: Path) -> None:
    settings = pollux_settings()
    jobs = trace(*((300.0 * number, 1, 8) for number in range(40)))
    scenario, _ = pollux_scenario(jobs, FOUR_NODES, write(tmp_path), settings)
    sources: list[Any] = []

    def watched(active: Collection[str]) -> Any:
        sources.append(scenario.candidates(active))
        return sources[-1]

    assert not simulate(replace(scenario, candidates=watched), "optimus", settings=settings).stalled
    assert 0 < len(sources[0]._known) < 20


def test_a_preempted_job_waits_and_pays_the_restart_again(tmp_path: Path) -> None:
    """16 GPUs, three jobs of 8. At 180 s the first two have run 960 GPU-seconds, reach the second queue together, and of
    them the later one makes way for the third, which still stands in the first."""
    result = run(tmp_path, (0.0, 8, 32), (50.0, 8, 32), (55.0, 8, 32), thresholds_gpu_h=(500 / 3600,))
    first, second, third = result.state.jobs.values()
    assert (first.num_restarts, second.num_restarts, third.num_restarts) == (0, 1, 0)
    assert third.first_start_s == 180.0
    assert first.finish_s is not None
    assert second.finish_s is not None
    ran_s = first.finish_s - 60.0 - 30.0
    back_s = 240.0  # the first round after the first job's end
    assert second.finish_s == back_s + 30.0 + ran_s - 90.0


def test_a_batch_beyond_the_measured_ones_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not measured with a global batch of 64"):
        run(tmp_path, (0.0, 16, 64))


def test_reports_come_with_the_rounds_in_which_epochs_ended(tmp_path: Path) -> None:
    result = run(tmp_path, (0.0, 1, 32))
    reports = [record for record in result.records if isinstance(record, ev.ProgressReported)]
    assert [(report.time_s, report.epoch, report.effective_samples) for report in reports] == [(120.0, 1, _AT_120_S)]


_AT_120_S = 8 * (100.0 + 10.0 * 3.0 / 1.5 / 0.32)
"""The first epoch ends 20 s after the restart, at 110 s; 10 s of the second follow."""


@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_runs_here(tmp_path: Path, policy: str) -> None:
    result = run(tmp_path, (0.0, 1, 8), (10.0, 2, 16), (20.0, 4, 32), (70.0, 8, 32), policy=policy)
    assert not result.stalled
    assert None not in finish_s(result)


@pytest.mark.parametrize("policy", ["tiresias", "optimus", "pollux"])
def test_the_same_run_twice_gives_the_same_log(tmp_path: Path, policy: str) -> None:
    jobs = [(0.0, 1, 8), (10.0, 2, 16), (20.0, 4, 32), (70.0, 8, 32), (80.0, 1, 16)]
    assert run(tmp_path / "a", *jobs, policy=policy).records == run(tmp_path / "b", *jobs, policy=policy).records


def test_ranks_in_the_order_in_which_nodes_were_taken() -> None:
    assert run_lengths([GpuId(3, 0), GpuId(3, 1), GpuId(0, 2), GpuId(1, 0), GpuId(1, 1)]) == (2, 1, 2)


def test_larger_nodes_than_measured_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nodes of up to 4"):
        pollux_scenario(trace((0.0, 5, 8)), cluster(2, 8), write(tmp_path))


def test_a_request_that_was_not_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="bert-0"):
        pollux_scenario(trace((0.0, 16, 16)), FOUR_NODES, write(tmp_path))
