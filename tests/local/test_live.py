"""The live library: one controller a home, submissions, questions, stopping and going on."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from local_rig import job_processes, job_spec
from rich.console import Console

from icefrog import live
from icefrog.cli.main import root as cli
from icefrog.driver import RealClock
from icefrog.errors import UserError
from icefrog.executors.local import files
from icefrog.liveview import LineView, TableView, jobs_table
from icefrog.spec import ClusterSpec, JobSpec, NodeSpec


def left_over(home: live.Home) -> list[int]:
    """Processes of any job of the home."""
    return [pid for job in home.jobs_dir.glob("*") for pid in job_processes(job)]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[live.Home]:
    made = live.Home(tmp_path / "home")
    try:
        yield made
        assert left_over(made) == []
        assert not (made.path / "violations").exists()
    finally:
        files.kill(left_over(made))


def run_up(home: live.Home, **options: object) -> live.UpResult:
    return live.up(home, policy="fifo", slots=2, round_s=1.0, poll_s=0.02, until_idle=True, **options)  # type: ignore[arg-type]


def up_process(home: live.Home) -> subprocess.Popen[str]:
    """A controller in a process of its own, that runs until it is stopped."""
    return subprocess.Popen([sys.executable, "-c", up_code(home)], stdout=subprocess.PIPE, text=True)


def up_code(home: live.Home) -> str:
    code = f"""
        from icefrog import live
        from icefrog.liveview import live_view
        print(live.up(live.Home.find({str(home.path)!r}), policy="fifo", slots=2, round_s=1.0, poll_s=0.02,
            view=live_view()))
    """
    return textwrap.dedent(code)


def wait_for(condition: object) -> None:
    clock = RealClock(0.05)
    deadline_s = clock.now_s() + 30
    while not condition():  # type: ignore[operator]
        assert clock.now_s() < deadline_s
        clock.wait_until(deadline_s)


def phase(home: live.Home, job_id: str) -> str:
    return next(row.phase for row in live.job_rows(home) if row.job_id == job_id)


def test_jobs_submitted_before_the_controller_runs_are_done_when_it_has(home: live.Home) -> None:
    for name in ("a", "b"):
        live.submit(home, job_spec(name, 2, 0.05, gpus=(1,)))
    assert [row.phase for row in live.job_rows(home)] == ["pending", "pending"]
    assert "no controller is running" in "\n".join(live.explain(home, "a"))
    view = io.StringIO()
    result = run_up(home, view=LineView(Console(file=view, width=200)))
    assert result == live.UpResult("idle", (), False)
    assert [(row.phase, row.metric, row.progress) for row in live.job_rows(home)] == [("completed", 1.0, 1.0)] * 2
    assert "a: done, 1" in view.getvalue()
    assert "rank 0 of 1" in live.log_paths(home, "a")[0].read_text()
    assert "".join(live.follow_log(home, "a")) == live.log_paths(home, "a")[0].read_text()


def test_a_name_is_used_once(home: live.Home) -> None:
    live.submit(home, job_spec("a", 1, 0.0, gpus=(1,)))
    with pytest.raises(UserError, match="a job named a was submitted before") as caught:
        live.submit(home, job_spec("a", 1, 0.0))
    assert "--name" in caught.value.hint
    run_up(home)
    with pytest.raises(UserError, match="submitted before"):
        live.submit(home, job_spec("a", 1, 0.0))


def test_several_jobs_are_handed_in_together_or_not_at_all(home: live.Home) -> None:
    live.submit(home, job_spec("b", 1, 0.0))
    for names in (("a", "b"), ("a", "a")):
        with pytest.raises(UserError, match=r"submitted before|given twice"):
            live.submit_all(home, [job_spec(name, 1, 0.0) for name in names])
        with pytest.raises(UserError, match=r"submitted before|given twice"):
            live.submittable(home, [job_spec(name, 1, 0.0) for name in names])
    assert [row.job_id for row in live.job_rows(home)] == ["b"]
    live.submit_all(home, [job_spec("c", 1, 0.0), job_spec("a", 1, 0.0)])
    assert [row.job_id for row in live.job_rows(home)] == ["b", "c", "a"]


def test_what_cannot_run_is_refused_at_submission_and_by_the_controller(home: live.Home) -> None:
    live.submit(home, job_spec("early", 1, 0.0, gpus=(4,)))  # nobody knows the cluster yet
    run_up(home)
    assert phase(home, "early") == "failed"
    assert "needs at least 4 GPUs, the cluster has 2" in "\n".join(live.explain(home, "early"))
    with pytest.raises(UserError, match="needs at least 4 GPUs, the cluster has 2"):
        live.submit(home, job_spec("late", 1, 0.0, gpus=(4,)))
    with pytest.raises(UserError, match="only a simulation"):
        live.submit(home, JobSpec.model_validate(
            {"name": "w", "workload": "x", "gpus": (1,), "batch": {"global": 1}, "max_epochs": 1}
        ))  # fmt: skip


def test_cancelling_before_the_controller_runs_and_when_it_is_too_late(home: live.Home) -> None:
    live.submit(home, job_spec("a", 1, 0.0))
    live.cancel(home, "a")
    run_up(home)
    assert phase(home, "a") == "cancelled"
    assert not (home.jobs_dir / "a").exists()
    with pytest.raises(UserError, match="is cancelled already"):
        live.cancel(home, "a")
    with pytest.raises(UserError, match="no job named 'b'"):
        live.cancel(home, "b")
    with pytest.raises(UserError, match="no job named b"):
        live.explain(home, "b")


def test_a_job_that_always_dies_is_given_up_with_its_last_words(home: live.Home) -> None:
    live.submit(home, job_spec("a", command=("sh", "-c", "echo no such data >&2; exit 7"), gpus=(1,)))
    run_up(home)
    (row,) = live.job_rows(home)
    assert row.phase == "failed"
    assert row.crashes >= 3
    assert row.reason.startswith(f"died {row.crashes} times")
    assert row.reason.endswith("the last: rank 0 exited with 7: no such data")


def test_one_controller_a_home_and_down_stops_it(home: live.Home) -> None:
    live.submit(home, job_spec("a", 400, 0.05, gpus=(2,)))
    live.submit(home, job_spec("b", 2, 0.05, gpus=(1,)))
    process = up_process(home)
    wait_for(lambda: phase(home, "a") == "running")
    with pytest.raises(UserError, match=f"process {process.pid}"):
        run_up(home)
    text = "\n".join(live.explain(home, "b"))
    assert "0 of 2 are free" in text
    assert "a holds 2 (running)" in text
    assert live.down(home)
    out, _ = process.communicate(timeout=30)
    assert "go on from their checkpoints" in out
    assert "left_running=False" in out
    assert left_over(home) == []
    assert {phase(home, "a"), phase(home, "b")} == {"pending"}
    assert "the controller was stopped" in "\n".join(live.explain(home, "a"))
    assert not live.down(home)


def test_the_lock_may_be_held_for_a_moment_by_what_a_dead_controller_started(home: live.Home) -> None:
    run_up(home)
    lock = files.try_lock(home.lock_path)
    assert lock is not None
    heir = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(0.5)"], pass_fds=(lock,))
    os.close(lock)
    assert files.is_locked(home.lock_path)
    assert run_up(home).why == "idle"
    heir.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_controller_s_jobs_go_on_from_their_checkpoints(home: live.Home, number: signal.Signals) -> None:
    live.submit(home, job_spec("a", 30, 0.05, gpus=(1,)))
    process = up_process(home)
    wait_for(lambda: live.job_rows(home)[0].epoch >= 3)
    os.kill(process.pid, number)
    process.communicate(timeout=30)
    stopped_at = live.job_rows(home)[0].effective_samples
    assert stopped_at >= 300
    run_up(home)
    (row,) = live.job_rows(home)
    assert (row.phase, row.restarts, row.crashes) == ("completed", 1, 0)
    first_line = live.log_paths(home, "a")[1].read_text()
    assert f"epoch {stopped_at / 100:.0f} on" in first_line


def test_ctrl_c_at_a_terminal_reaches_the_controller_and_not_the_jobs(home: live.Home) -> None:
    live.submit(home, job_spec("a", 400, 0.05, gpus=(1,), target={"value": 0.9}))
    controller, terminal = pty.fork()
    if controller == 0:
        os.execv(sys.executable, [sys.executable, "-c", up_code(home)])
    screen = b""
    while phase(home, "a") != "running" or b"running" not in screen:
        screen += os.read(terminal, 1 << 16)
    os.write(terminal, b"\x03")
    with contextlib.suppress(OSError):  # the terminal is closed with its last process
        while data := os.read(terminal, 1 << 16):
            screen += data
    assert os.waitpid(controller, 0)[1] == 0
    (row,) = live.job_rows(home)
    assert (row.phase, row.crashes) == ("pending", 0)
    assert b"go on from their checkpoints" in screen


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_table_fits_the_terminal(home: live.Home, width: int) -> None:
    live.submit(home, job_spec("a-rather-long-name", 2, 0.05, target={"value": 0.9}))
    out = io.StringIO()
    Console(file=out, width=width).print(jobs_table(live.job_rows(home)))
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert max(len(line.rstrip()) for line in lines) <= width
    assert lines[1].startswith("a-rather-long-name  pending")


def test_jobs_are_stopped_when_nobody_reads_the_output_any_more(home: live.Home) -> None:
    live.submit(home, job_spec("a", 4000, 0.05, gpus=(1,)))
    process = up_process(home)
    wait_for(lambda: phase(home, "a") == "running")
    assert process.stdout is not None
    process.stdout.close()
    live.cancel(home, "a")  # something to print
    process.wait(timeout=30)
    assert phase(home, "a") in ("cancelled", "pending")


def test_a_second_signal_ends_stubborn_jobs_at_once(home: live.Home) -> None:
    live.submit(home, job_spec("a", 4000, 0.05, "stubborn", gpus=(1,), stop_grace_s=1000))
    process = up_process(home)
    wait_for(lambda: phase(home, "a") == "running")
    os.kill(process.pid, signal.SIGINT)
    wait_for(lambda: phase(home, "a") == "preempting")
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=30)
    assert phase(home, "a") == "pending"


def test_a_damaged_home_is_an_error_with_a_hint(home: live.Home) -> None:
    live.submit(home, job_spec("a", 1, 0.0))
    home.settings_path.write_text('{"schema": 1}')
    with pytest.raises(UserError, match=r"cluster\.json: cluster: Field required"):
        run_up(home)
    home.settings_path.write_text("{")
    with pytest.raises(UserError, match=r"cluster\.json"):
        live.job_rows(home)
    home.settings_path.unlink()
    home.db.unlink()
    for beside in home.path.glob("events.db-*"):
        beside.unlink()
    home.jobs_dir.mkdir()
    (home.jobs_dir / "a").mkdir()
    with pytest.raises(UserError, match=r"events\.db beside it is gone"):
        run_up(home)


def test_the_settings_of_a_home_are_remembered(home: live.Home) -> None:
    run_up(home)
    live.up(home, round_s=3.0, until_idle=True)
    settings = home.settings()
    assert settings is not None
    assert (settings.policy, settings.round_s, settings.cluster.num_gpus) == ("fifo", 3.0, 2)
    with pytest.raises(UserError, match="no policy is called"):
        live.up(home, policy="fifos", until_idle=True)
    assert home.settings() == settings  # a wrong option changes nothing


def test_the_table_shows_where_each_job_stands(home: live.Home) -> None:
    out = io.StringIO()
    console = Console(file=out, width=220, force_terminal=True)
    live.submit(home, job_spec("a", 2, 0.05, gpus=(1,), target={"value": 0.9}))
    run_up(home, view=TableView(console))
    text = out.getvalue()
    assert "accuracy >= 0.9" in text
    assert "completed" in text
    assert "0/2 GPUs granted" in text


def test_the_replayed_state_is_the_controller_s(home: live.Home, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    keep = live.Controller

    def remember(*args: object) -> object:
        seen["controller"] = made = keep(*args)  # type: ignore[arg-type]
        return made

    monkeypatch.setattr(live, "Controller", remember)
    live.submit(home, job_spec("a", 5, 0.02, gpus=(1,)))
    live.submit(home, job_spec("b", 5, 0.02, gpus=(2,)))
    run_up(home)
    with home.open_log() as log:
        replayed = home.replay(log, ClusterSpec(nodes=(NodeSpec(gpus=2),)))
        kinds = {record.kind for record in log.read_all()}
    assert vars(replayed)["jobs"] == vars(seen["controller"].state)["jobs"]
    assert {"plan_decided", "start", "progress_reported"} <= kinds


def test_jobs_that_end_badly_are_told_by_the_result_and_the_exit_status(home: live.Home) -> None:
    live.submit(home, job_spec("bad", command=("no-such-program",), gpus=(1,)))
    live.submit(home, job_spec("good", 1, 0.0, gpus=(1,)))
    live.submit(home, job_spec("short", 1, 0.0, gpus=(1,), target={"value": 2.0}))
    args = ["up", "--home", str(home.path), "--policy", "fifo", "--slots", "2", "--round", "1", "--until-idle"]
    done = CliRunner().invoke(cli, args, standalone_mode=False)
    assert done.return_value == 1
    assert "bad, short" in done.output
    assert "is up" not in "".join(line for line in done.output.splitlines() if "bad:" in line)
    again = CliRunner().invoke(cli, args, standalone_mode=False)  # of that run nothing failed
    assert again.return_value == 0
    assert run_up(home).failed == ()


def test_how_a_job_ended_is_its_last_reason(home: live.Home) -> None:
    live.submit(home, job_spec("a", 1, 0.0, gpus=(1,)))
    live.submit(home, job_spec("b", 1, 0.0, gpus=(1,)))
    live.cancel(home, "b")
    run_up(home)
    assert [row.reason for row in live.job_rows(home)] == ["completed", "cancelled"]
    assert "  why: cancelled" in live.explain(home, "b")


def test_hints_can_be_pasted_whatever_the_path_is(tmp_path: Path) -> None:
    path = tmp_path / "h\u00f6m\u00e9 with {space} and 'quotes'"
    file = tmp_path / "job.yaml"
    file.write_text("name: a\ncommand: ['true']\ngpus: [1]\nbatch: {global: 8}\nmax_epochs: 1\n")
    done = CliRunner().invoke(cli, ["submit", str(file), "--home", str(path)], standalone_mode=False)
    hint = done.output.partition("start it with: ")[2]
    assert shlex.split(hint)[1:] == ["up", "--home", str(path)]


def test_more_passes_than_max_epochs_are_no_contradiction(home: live.Home) -> None:
    live.submit(home, job_spec("a", 3, 0.0, gpus=(1,), max_epochs=2))
    run_up(home)
    text = "\n".join(live.explain(home, "a"))
    assert "300 effective samples; P0, where it ends at the latest, is 300" in text
    assert "epoch 3, 1;" in text
    out = io.StringIO()
    Console(file=out, width=200).print(jobs_table(live.job_rows(home)))
    assert "3/2" not in out.getvalue()


def test_control_characters_are_not_shown(home: live.Home) -> None:
    live.submit(home, job_spec("a", command=("sh", "-c", r"printf '\033[31mred\007\n' >&2; exit 5"), gpus=(1,)))
    view = io.StringIO()
    run_up(home, view=LineView(Console(file=view, width=200)))
    shown = view.getvalue() + "\n".join(live.explain(home, "a"))
    assert "exited with 5: red" in shown
    assert not [char for char in shown if ord(char) < 32 and char != "\n"]
