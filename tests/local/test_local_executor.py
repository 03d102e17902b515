"""The local executor against real processes: what it starts, what it reports, what it leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys

from local_rig import Rig, grant, job_spec

from icefrog import events as ev
from icefrog.executors.local import files
from icefrog.executors.local.attempts import JobFolder
from icefrog.runtime import protocol
from icefrog.spec import Target
from icefrog.state import Phase
from icefrog.types import GpuId


def test_a_job_runs_reports_and_finishes(rig: Rig) -> None:
    rig.submit(job_spec("a", 3, 0.05))
    rig.start("a", 0, 2)
    rig.until_phase("a", Phase.COMPLETED)
    job = rig.state.jobs["a"]
    assert rig.kinds("a") == ["start", "job_started", "job_finished"]
    assert [r.epoch for r in rig.log if isinstance(r, ev.ProgressReported)] == [1, 2, 3]
    assert (job.metric, job.effective_samples, job.total_samples) == (1.0, 300, 300)
    assert rig.executor.idle()
    rig.until(lambda: rig.processes() == [])
    log = (rig.home.jobs_dir / "a" / "attempt-1" / "log").read_text()
    assert sorted(line.partition(":")[0] for line in log.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


def test_ranks_get_the_environment_of_a_gang_and_the_grant(rig: Rig) -> None:
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    spec = job_spec(
        "a",
        command=(sys.executable, "-c", show, "{max_epochs}", "{num_gpus}", "{batch}", "{checkpoint}"),
        target=Target(value=0.9),
        env={"OMP_NUM_THREADS": "3", "MINE": "yes"},
    )
    rig.submit(spec)
    rig.start("a", 1, 3)
    rig.until_phase("a", Phase.COMPLETED)
    folder = rig.home.jobs_dir / "a" / "attempt-1"
    envs = sorted(map(json.loads, (folder / "log").read_text().splitlines()), key=lambda env: env["RANK"])
    assert [(env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) for env in envs] == [("0", "0", "2"), ("1", "1", "2")]
    env = envs[1]
    assert env["MASTER_ADDR"] == "127.0.0.1"
    assert env["MASTER_PORT"] == envs[0]["MASTER_PORT"]
    assert (env["CUDA_VISIBLE_DEVICES"], env["OMP_NUM_THREADS"], env["MINE"]) == ("1,3", "3", "yes")
    assert (env["ICEFROG_JOB_ID"], env["ICEFROG_ATTEMPT"], env["ICEFROG_ATTEMPT_DIR"]) == ("a", "1", str(folder))
    told = protocol.Grant.model_validate_json(env["ICEFROG_GRANT"])
    assert (told.num_gpus, told.global_batch, told.max_epochs, told.target) == (2, 8, 50, Target(value=0.9))
    argv = json.loads((folder / "launch.json").read_text())["argv"]
    assert argv[3:] == ["50", "2", "8", str(rig.home.jobs_dir / "a" / "checkpoint")]


def test_an_entry_point_is_called_in_the_folder_of_its_submission(rig: Rig, tmp_path) -> None:
    (tmp_path / "mine.py").write_text("def train():\n    print('called')\n")
    spec = job_spec("a", command=None, entry="mine:train", cwd=str(tmp_path))
    rig.submit(spec)
    rig.start("a", 0)
    rig.until_phase("a", Phase.COMPLETED)
    assert (rig.home.jobs_dir / "a" / "attempt-1" / "log").read_text() == "called\n"


def test_a_foreign_command_counts_as_done_and_says_what_is_not_known(rig: Rig) -> None:
    rig.submit(job_spec("a", command=("true",), target=Target(value=0.9)))
    rig.start("a", 0)
    rig.until_phase("a", Phase.COMPLETED)
    assert rig.kinds("a") == ["start", "job_started", "job_warned", "job_finished"]
    assert "target cannot be checked" in next(r.message for r in rig.log if isinstance(r, ev.JobWarned))


def test_a_silent_job_is_counted_as_started_after_a_while(rig: Rig) -> None:
    rig.silent_s = 0.1
    rig.controller_dies()
    rig.submit(job_spec("a", 10, 0.1, "silent"))
    rig.start("a", 0)
    rig.until_phase("a", Phase.RUNNING)
    rig.leave("a")
    rig.until_phase("a", Phase.PENDING)
    assert rig.kinds("a") == ["start", "job_started", "preempt", "job_stopped"]


def test_a_first_report_that_comes_late_is_not_lost(rig: Rig) -> None:
    rig.silent_s = 0.1
    rig.controller_dies()
    rig.submit(job_spec("a", 2, 0.05, "slow-start"))
    rig.start("a", 0)
    rig.until_phase("a", Phase.COMPLETED)
    first = next(r for r in rig.log if isinstance(r, ev.ProgressReported))
    assert (first.reason, first.epoch, first.total_samples) == ("first report", 0, 5000)


def test_exit_0_short_of_the_target_is_a_miss(rig: Rig) -> None:
    write = "import os, sys; open(os.environ['ICEFROG_ATTEMPT_DIR'] + '/reports.jsonl', 'w').write(sys.argv[1])"
    report = protocol.Started(
        time_s=1.0, layers=("a",), samples_per_epoch=1, epoch=0, effective_samples=0, resumed=False
    )
    progress = protocol.Progress(
        time_s=2.0, epoch=1, step=1, samples=1, effective_samples=1, remaining_samples=None, metric=0.5, frozen_layers=0,
        psi=1, throughput=1, step_s=1, effective_progress=1, variance=None, sqr_norm=None, mem_bytes=1, util_pct=None,
        reason="", profile=None,
    )  # fmt: skip
    lines = (protocol.encode(report) + protocol.encode(progress)).decode() + "gibberish\n"
    rig.submit(job_spec("a", command=(sys.executable, "-c", write, lines), target=Target(value=0.9)))
    rig.start("a", 0)
    rig.until_phase("a", Phase.TARGET_MISSED)
    warnings = [r.message for r in rig.log if isinstance(r, ev.JobWarned)]
    assert "cannot be read: gibberish" in warnings[0]


def test_a_job_that_cannot_start_says_why(rig: Rig) -> None:
    rig.submit(job_spec("a", command=("no-such-program-anywhere",)))
    rig.start("a", 0)
    rig.until_phase("a", Phase.PENDING)
    assert "no-such-program-anywhere" in rig.reason("a")
    rig.submit(job_spec("b", command=("true",), cwd="/no/such/folder"))
    rig.start("b", 0)
    rig.until_phase("b", Phase.PENDING)
    assert "/no/such/folder" in rig.reason("b")


def test_a_folder_that_cannot_be_written_is_a_crash_of_the_job_and_not_of_the_controller(rig: Rig) -> None:
    rig.submit(job_spec("a", 1, 0.0, checkpoint="/proc/no/checkpoints"))
    rig.start("a", 0)
    rig.until_phase("a", Phase.PENDING)
    assert "/proc/no" in rig.reason("a")


def test_a_supervisor_that_cannot_run_is_a_crash_after_some_tries(rig: Rig, monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    rig.submit(job_spec("a", 1, 0.0))
    rig.start("a", 0)
    rig.until_phase("a", Phase.PENDING)
    assert "no supervisor could be started" in rig.reason("a")


def test_a_record_that_a_power_failure_emptied_is_a_crash(rig: Rig) -> None:
    rig.submit(job_spec("a", 50, 0.1))
    rig.start("a", 0)
    rig.until_phase("a", Phase.RUNNING)
    files.kill(rig.processes())
    (rig.home.jobs_dir / "a" / "attempt-1" / "exit.json").write_text("")
    rig.until_phase("a", Phase.PENDING)
    assert "supervisor was killed" in rig.reason("a")


def test_a_rank_that_dies_takes_the_gang_with_it_and_its_last_words_are_the_reason(rig: Rig) -> None:
    code = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('out of memory')\ntime.sleep(600)"
    rig.submit(job_spec("a", command=(sys.executable, "-c", code)))
    rig.start("a", 0, 1)
    rig.until_phase("a", Phase.PENDING)
    assert rig.reason("a") == "attempt 1 died: rank 1 exited with 1: out of memory"
    rig.until(lambda: rig.processes() == [])


def test_resize_goes_on_from_the_checkpoint_when_the_gpus_are_free(rig: Rig) -> None:
    rig.submit(job_spec("a", 20, 0.1))
    rig.submit(job_spec("b", 2, 0.05))
    rig.start("a", 0, 1)
    rig.until(lambda: rig.state.jobs["a"].epoch >= 2)
    rig.resize("a", 2)
    rig.start("b", 0, 1)  # has to wait until the first has left
    rig.until_phase("a", Phase.RUNNING)
    rig.until_phase("b", Phase.COMPLETED)
    log = (rig.home.jobs_dir / "a" / "attempt-2" / "log").read_text()
    assert int(log.split("epoch ")[1].split()[0]) >= 2
    assert rig.kinds("a")[:5] == ["start", "job_started", "resize", "job_stopped", "job_started"]


def test_sharers_wait_for_nobody_but_an_exclusive_job_does(rig: Rig) -> None:
    for name in ("a", "b", "c"):
        rig.submit(job_spec(name, 30, 0.1))
    rig.start("a", 0, shared=True)
    rig.start("b", 0, shared=True)
    rig.until_phase("a", Phase.RUNNING)
    rig.until_phase("b", Phase.RUNNING)
    rig.leave("a")
    rig.leave("b")
    rig.start("c", 0)
    rig.look()
    assert not (rig.home.jobs_dir / "c").exists()  # two are still on it
    rig.until_phase("c", Phase.RUNNING)


def test_new_bounds_reach_a_running_job(rig: Rig) -> None:
    rig.submit(job_spec("a", 50, 0.1))
    rig.start("a", 0)
    rig.until_phase("a", Phase.RUNNING)
    rig.command(ev.Regrant(time_s=rig.clock.now_s(), job_id="a", attempt=1, grant=grant(shared=True)))
    told = JobFolder(rig.home.jobs_dir / "a").attempt(1).read_grant()
    assert told is not None
    assert told.shared


# -- stopping at bad moments ----------------------------------------------------------------------------------------------


def test_leaving_before_anything_was_started(rig: Rig) -> None:
    rig.submit(job_spec("a", 5, 0.1))
    rig.start("a", 0)
    rig.leave("a")
    rig.until_phase("a", Phase.PENDING)
    assert rig.kinds("a") == ["start", "preempt", "job_stopped"]
    assert not (rig.home.jobs_dir / "a").exists()


def test_cancelling_while_starting(rig: Rig) -> None:
    rig.submit(job_spec("a", 5, 0.1, "slow-start"))
    rig.start("a", 0)
    rig.look()
    rig.cancel("a")
    rig.until_phase("a", Phase.CANCELLED)
    rig.until(lambda: rig.processes() == [])


def test_cancelling_while_resizing(rig: Rig) -> None:
    rig.submit(job_spec("a", 50, 0.1))
    rig.start("a", 0)
    rig.until_phase("a", Phase.RUNNING)
    rig.resize("a", 1, 2)
    rig.look()
    rig.cancel("a")
    rig.until_phase("a", Phase.CANCELLED)
    rig.until(lambda: rig.processes() == [])
    assert not (rig.home.jobs_dir / "a" / "attempt-2").exists()


def test_resized_twice_before_it_came_up(rig: Rig) -> None:
    rig.submit(job_spec("a", 2, 0.05, "slow-start"))
    rig.start("a", 0)
    rig.pids("a", 1)
    rig.resize("a", 1)
    rig.look()
    rig.resize("a", 2, 3)
    rig.until_phase("a", Phase.COMPLETED)
    assert rig.kinds("a") == ["start", "resize", "resize", "job_started", "job_finished"]
    assert not (rig.home.jobs_dir / "a" / "attempt-2").exists()


def test_a_job_that_does_not_leave_is_killed_after_its_grace(rig: Rig) -> None:
    rig.submit(job_spec("a", 500, 0.05, "stubborn", "child", stop_grace_s=0.5))
    rig.start("a", 0)
    rig.until(lambda: rig.state.jobs["a"].epoch >= 3)
    rig.leave("a")
    rig.until_phase("a", Phase.PENDING)
    assert "did not leave within 0.5 s" in rig.reason("a")
    assert rig.state.jobs["a"].effective_samples >= 300  # of its last checkpoint
    rig.until(lambda: rig.processes() == [])


def test_hurry_does_not_wait_for_the_grace(rig: Rig) -> None:
    rig.submit(job_spec("a", 500, 0.05, "stubborn", stop_grace_s=1000))
    rig.start("a", 0)
    rig.until_phase("a", Phase.RUNNING)
    rig.leave("a")
    rig.executor.hurry()
    rig.until_phase("a", Phase.PENDING)


def test_a_foreign_command_is_asked_with_a_signal(rig: Rig) -> None:
    rig.submit(job_spec("a", command=("sh", "-c", "sleep 600"), stop_grace_s=1000))
    rig.start("a", 0)
    rig.pids("a", 1)
    rig.leave("a")
    rig.until_phase("a", Phase.PENDING)
    rig.until(lambda: rig.processes() == [])


# -- dying at bad moments ---------------------------------------------------------------------------------------------------


def test_a_killed_rank_is_one_crash_and_the_job_goes_on_from_its_checkpoint(rig: Rig) -> None:
    rig.submit(job_spec("a", 16, 0.1))
    rig.start("a", 0, 1)
    _, ranks = rig.pids("a", 1)
    rig.until(lambda: rig.state.jobs["a"].epoch >= 2)
    os.kill(ranks[1], signal.SIGKILL)
    rig.until_phase("a", Phase.PENDING)
    assert "rank 1 was killed by signal 9" in rig.reason("a")
    rig.start("a", 0, 1)
    rig.until_phase("a", Phase.COMPLETED)
    assert rig.kinds("a") == ["start", "job_started", "job_crashed", "start", "job_started", "job_finished"]
    assert "epoch 0" not in (rig.home.jobs_dir / "a" / "attempt-2" / "log").read_text()


def test_a_killed_supervisor_leaves_nothing_behind_and_is_one_crash(rig: Rig) -> None:
    rig.submit(job_spec("a", 16, 0.1, "child"))
    rig.start("a", 0, 1)
    supervisor, _ = rig.pids("a", 1)
    rig.until(lambda: rig.state.jobs["a"].epoch >= 2)
    os.kill(supervisor, signal.SIGKILL)
    rig.until_phase("a", Phase.PENDING)
    assert rig.reason("a") == "attempt 1 died: its supervisor was killed"
    rig.until(lambda: rig.processes() == [])
    rig.start("a", 0)
    rig.until_phase("a", Phase.COMPLETED)


def test_a_new_controller_takes_over_what_runs_and_loses_no_report(rig: Rig) -> None:
    rig.submit(job_spec("a", 12, 0.05))
    rig.start("a", 0, 1)
    rig.until(lambda: rig.state.jobs["a"].epoch >= 2)
    for _ in range(3):
        rig.controller_dies()
        rig.look()
    rig.until_phase("a", Phase.COMPLETED)
    assert [r.epoch for r in rig.log if isinstance(r, ev.ProgressReported)] == list(range(1, 13))
    assert rig.kinds("a") == ["start", "job_started", "job_finished"]


def test_a_command_that_was_logged_but_never_carried_out(rig: Rig) -> None:
    rig.submit(job_spec("a", 3, 0.05))
    start = ev.Start(time_s=rig.clock.now_s(), job_id="a", attempt=1, gpus=(GpuId(0, 0),), grant=grant())
    rig.command(start, submit=False)
    rig.controller_dies()
    rig.until_phase("a", Phase.RUNNING)
    resize = ev.Resize(time_s=rig.clock.now_s(), job_id="a", attempt=2, gpus=(GpuId(0, 1),), grant=grant())
    rig.command(resize, submit=False)
    rig.controller_dies()
    rig.until_phase("a", Phase.COMPLETED)
    assert rig.state.jobs["a"].num_restarts in (0, 1)  # 0 if it was done before it was asked


def test_what_ended_while_no_controller_ran_is_told_later(rig: Rig) -> None:
    rig.submit(job_spec("a", 2, 0.05))
    rig.start("a", 0)
    rig.look()
    exit_file = rig.home.jobs_dir / "a" / "attempt-1" / "exit.json"
    while not exit_file.exists():
        rig.clock.wait_until(rig.clock.now_s() + 1)
    rig.controller_dies()
    rig.until_phase("a", Phase.COMPLETED)
    assert rig.kinds("a") == ["start", "job_started", "job_finished"]


def test_an_attempt_that_was_written_down_but_not_begun_is_begun_once(rig: Rig) -> None:
    rig.submit(job_spec("a", 3, 0.05))
    rig.start("a", 0)
    rig.look()
    for _ in range(4):  # each new controller finds no supervisor yet and starts one, too
        rig.controller_dies()
        rig.executor.poll(0.0)
    rig.until_phase("a", Phase.COMPLETED)
    completions = (rig.home.jobs_dir / "a" / "checkpoint" / "completions").read_text()
    assert completions == "1\n"


def test_a_result_of_an_attempt_that_was_given_up_unseen_still_counts(rig: Rig) -> None:
    rig.submit(job_spec("a", 1, 0.0))
    rig.start("a", 0)
    rig.look()
    while not (rig.home.jobs_dir / "a" / "attempt-1" / "exit.json").exists():
        rig.clock.wait_until(rig.clock.now_s() + 1)
    rig.resize("a", 1)  # before anybody saw that it is done
    rig.until_phase("a", Phase.COMPLETED)
    assert rig.kinds("a") == ["start", "resize", "job_finished"]


def test_an_attempt_whose_folder_is_gone_is_a_crash(rig: Rig) -> None:
    rig.submit(job_spec("a", 3, 0.3))
    rig.start("a", 0)
    rig.until_phase("a", Phase.RUNNING)
    files.kill(rig.processes())
    shutil.rmtree(rig.home.jobs_dir / "a")
    rig.until_phase("a", Phase.PENDING)
    assert rig.kinds("a") == ["start", "job_started", "job_crashed"]
