"""Controllers, supervisors and ranks that are killed at bad moments: no job is lost, and none runs twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from local_rig import JOB, Rig, job_processes, job_spec

from icefrog import events as ev
from icefrog import live
from icefrog.executors.local import files
from icefrog.spec import ClusterSpec, NodeSpec
from icefrog.state import ClusterState, Phase

MORTAL = JOB.with_name("mortal_controllers.py")
EPOCHS = 40


def survive(path: Path, *mode: object) -> tuple[int, live.Home]:
    """Three jobs under controllers that die; how many did."""
    home = live.Home(path)
    live.submit_all(home, [job_spec(name, EPOCHS, 0.05, gpus=(1, 2)) for name in ("a", "b", "c")])
    command = [sys.executable, str(MORTAL), str(path), *map(str, mode)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stderr
        assert [pid for job in home.jobs_dir.glob("*") for pid in job_processes(job)] == []
    finally:
        files.kill([pid for job in home.jobs_dir.glob("*") for pid in job_processes(job)])
    return int(done.stdout), home


def check(home: live.Home) -> Counter[str]:
    """Every job was done once, was never run twice at a time, and the log adds up; how often each kind is in it."""
    assert not (home.path / "violations").exists(), (home.path / "violations").read_text()
    state = ClusterState(ClusterSpec(nodes=(NodeSpec(gpus=3),)))
    with home.open_log() as log:
        records = log.read_all()
    for record in records:
        state.apply(record)
        state.check()
    assert {job.phase for job in state.jobs.values()} == {Phase.COMPLETED}
    for name in ("a", "b", "c"):
        mine = [record for record in records if getattr(record, "job_id", None) == name]
        assert [r.kind for r in mine].count("job_submitted") == 1
        assert [r.kind for r in mine].count("job_finished") == 1
        completions = (home.jobs_dir / name / "checkpoint" / "completions").read_text()
        assert len(completions.splitlines()) == 1
        told = [(r.attempt, r.epoch) for r in mine if isinstance(r, ev.ProgressReported)]
        assert len(set(told)) == len(told), "a report was counted twice"
    return Counter(record.kind for record in records)


def test_controllers_killed_at_random_moments(tmp_path: Path) -> None:
    deaths, home = survive(tmp_path / "home", "random", 0, 18)
    kinds = check(home)
    assert deaths >= 15
    assert kinds["job_crashed"] == 0
    assert kinds["resize"] + kinds["preempt"] > 0


def test_controllers_that_die_before_and_after_everything_they_do(tmp_path: Path) -> None:
    deaths, home = survive(tmp_path / "home", "steps")
    kinds = check(home)
    assert deaths >= 15
    assert kinds["job_crashed"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_controllers_killed_at_many_more_random_moments(tmp_path: Path, seed: int) -> None:
    _, home = survive(tmp_path / "home", "random", seed, 60)
    assert check(home)["job_crashed"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_controllers_supervisors_and_ranks_killed_in_any_order(rig: Rig, seed: int) -> None:
    rng = random.Random(seed)
    rig.submit(job_spec("a", 60, 0.05, "child"))
    rig.start("a", 0, 1)
    for _ in range(12):
        for _ in range(rng.randrange(1, 20)):
            rig.look()
            rig.clock.wait_until(rig.clock.now_s() + 1)
        job = rig.state.jobs["a"]
        if job.finished:
            break
        if job.phase is Phase.PENDING:
            rig.start("a", *rng.sample(range(4), rng.choice((1, 2))))
            continue
        what = rng.choice(("controller", "supervisor", "rank", "resize", "leave"))
        if what == "controller":
            rig.controller_dies()
        elif what == "resize" and job.phase in (Phase.STARTING, Phase.RUNNING):
            rig.resize("a", *rng.sample(range(4), rng.choice((1, 2))))
        elif what == "leave" and job.phase in (Phase.STARTING, Phase.RUNNING):
            rig.leave("a")
        elif what in ("supervisor", "rank"):
            folder = rig.home.jobs_dir / "a" / f"attempt-{job.attempt}"
            supervisor, ranks = files.read_json(folder / "supervisor.pid"), files.read_json(folder / "ranks.json")
            if supervisor is not None and ranks is not None:
                victim = supervisor["pid"] if what == "supervisor" else rng.choice(ranks["pids"])
                if victim in rig.processes():
                    os.kill(victim, signal.SIGKILL)
    while not rig.state.jobs["a"].finished:
        if rig.state.jobs["a"].phase is Phase.PENDING:
            rig.start("a", 0)
        rig.until(lambda: rig.state.jobs["a"].finished or rig.state.jobs["a"].phase is Phase.PENDING)
    assert rig.state.jobs["a"].phase is Phase.COMPLETED
    assert rig.kinds("a").count("job_finished") == 1
    rig.until(lambda: rig.processes() == [])
