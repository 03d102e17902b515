"""The published completion times of the Pollux artifact. Run by ``make test-data``."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from icefrog.executors.sim.pollux.scenario import CLUSTER, pollux_scenario, pollux_settings
from icefrog.simulate import simulate
from icefrog.specfile import parse_cluster
from icefrog.traces import read_trace

pytestmark = [pytest.mark.data, pytest.mark.published]

WORKLOADS = [f"workload-{number}" for number in range(1, 7)]


@cache
def published(data_dir: Path) -> Any:
    return json.loads((data_dir / "pollux" / "published_jct.json").read_text())


def jct_s(data_dir: Path, workload: str, policy: str) -> dict[str, float]:
    settings = pollux_settings()
    trace = read_trace(str(data_dir / "pollux" / "workloads" / f"{workload}.csv"))
    scenario, _ = pollux_scenario(trace, parse_cluster(CLUSTER), data_dir, settings)
    result = simulate(scenario, policy, settings=settings)
    return {job.job_id: job.finish_s - job.submit_s for job in result.state.jobs.values() if job.finish_s is not None}


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("policy", ["tiresias", "optimus"])
def test_every_job_to_the_second(data_dir: Path, workload: str, policy: str) -> None:
    assert jct_s(data_dir, workload, policy) == published(data_dir)[policy][workload]["jct_s"]


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS)
def test_pollux_mean_within_three_percent_or_better(data_dir: Path, workload: str) -> None:
    """The reference is randomised; its authors state +-5 %."""
    mine = jct_s(data_dir, workload, "pollux")
    assert len(mine) == len(published(data_dir)["pollux"][workload]["jct_s"])
    assert sum(mine.values()) / len(mine) <= 1.03 * published(data_dir)["pollux"][workload]["avg_jct_s"]
