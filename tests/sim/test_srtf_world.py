"""What srtf is told of jobs that run: the truth now, not that of their last start."""

from __future__ import annotations

import pytest
from worlds import SettlingCurves

from icefrog.executors.sim import WorldConfig
from icefrog.simulate import SimSettings, icefrog_scenario, simulate
from icefrog.testing.builders import cluster, job_spec, profile


@pytest.mark.parametrize(("submit_s", "order"), [(900.0, ["long", "short"]), (100.0, ["short", "long"])])
def test_a_job_that_is_nearly_done_is_not_preempted(submit_s: float, order: list[str]) -> None:
    """Of 1,000 s, 100 are left when a job of 500 s comes; or 900 are."""
    given = {"command": None, "workload": "synthetic", "gpus": (1,), "batch": {"global": 64}}
    specs = (
        job_spec("long", **given, duration_s=1000.0),
        job_spec("short", **given, duration_s=500.0, submit_s=submit_s),
    )
    exact = WorldConfig(noise=0.0, occupancy_noise=0.0, stats_noise=0.0)
    settings = SimSettings(world=exact)
    profiles = {spec.job_id: profile(samples_per_epoch=10_000) for spec in specs}
    curves = {spec.job_id: SettlingCurves(4) for spec in specs}
    result = simulate(icefrog_scenario(specs, profiles, curves, cluster(1, 1), settings), "srtf", {}, settings)
    finished = {job_id: job.finish_s or 0.0 for job_id, job in result.state.jobs.items()}
    assert sorted(finished, key=lambda job_id: finished[job_id]) == order
    if order[0] == "long":
        assert finished == {"long": pytest.approx(1000.0), "short": pytest.approx(1500.0)}
