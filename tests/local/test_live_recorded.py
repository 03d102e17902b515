"""A live run of real processes, recorded and simulated from what was recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_rig import job_spec

from icefrog.eventlog import SqliteLog
from icefrog.executors.sim.recorded import record, recorded_scenario, recorded_settings
from icefrog.home import Home
from icefrog.live import submit_all, up
from icefrog.simulate import simulate
from icefrog.testing.builders import profile

ROUND_S = 5.0


@pytest.mark.slow
def test_the_simulation_of_a_live_run_is_near_it(tmp_path: Path) -> None:
    """Jobs that sleep: their pace is their own; the two slots make one of the four wait for two to end."""
    (tmp_path / "cost.json").write_text(profile(2, samples_per_epoch=100).model_dump_json(by_alias=True))
    home = Home(tmp_path / "home")
    told = {"profile": str(tmp_path / "cost.json"), "gpus": (1, 2)}
    lengths = {"a": (12, 1), "b": (6, 2), "c": (10, 1), "d": (4, 1)}
    submit_all(home, [job_spec(name, n, 0.5, num_gpus=gpus, **told) for name, (n, gpus) in lengths.items()])
    up(home, policy="fifo", slots=2, round_s=ROUND_S, until_idle=True)
    with SqliteLog(home.db) as log:
        run = record(log.read_all())
    settings = home.settings()
    assert settings is not None
    scenario = recorded_scenario(run, run, settings.cluster)
    result = simulate(scenario, "fifo", None, recorded_settings(run, ROUND_S, settings.restart_s))
    for job_id, job in run.jobs.items():
        finish_s = result.state.jobs[job_id].finish_s
        assert finish_s == pytest.approx(job.finish_s, rel=0.15), job_id
        assert job.needed_samples == 100 * lengths[job_id][0]
        assert job.seconds_per_sample(lengths[job_id][1], 0) == pytest.approx(0.005, rel=0.5)
