"""Jobs that meddle with their own folder, or say what cannot be: at most a crash of theirs; others, and the log, go on."""

from __future__ import annotations

import json
import os

import pytest
from local_rig import Rig, job_spec

from icefrog import events as ev
from icefrog.executors.local.attempts import JobFolder, Life
from icefrog.executors.local.reports import Tail
from icefrog.executors.local.text import plain
from icefrog.runtime import protocol
from icefrog.spec import Target
from icefrog.state import FINAL, Phase
from icefrog.testing import builders as b

STARTED = {"kind": "started", "time_s": 1.0, "layers": ["a"], "samples_per_epoch": 10, "epoch": 0}
STARTED |= {"effective_samples": 0, "resumed": False}
PROGRESS = {"kind": "progress", "time_s": 2.0, "epoch": 1, "step": 1, "samples": 1, "effective_samples": 10, "psi": 1}
PROGRESS |= {"frozen_layers": 0, "throughput": 1, "step_s": 1, "effective_progress": 1, "mem_bytes": 1, "reason": ""}
PROGRESS |= dict.fromkeys(("remaining_samples", "metric", "variance", "sqr_norm", "util_pct", "profile"))
FINISHED = {"kind": "finished", "time_s": 3.0, "outcome": "completed", "metric": 0.5, "effective_samples": 5}

SPOILERS = {
    "reports are a folder": "mkdir reports.jsonl",
    "reports are a pipe": "mkfifo reports.jsonl",
    "reports are a loop": "ln -s reports.jsonl reports.jsonl",
    "exit is a folder": "mkdir exit.json",
    "exit is a loop": "ln -s exit.json exit.json",
    "exit is forged": "echo '{\"exit_codes\": 1}' > exit.json",
    "pid is empty": "echo '{}' > supervisor.pid",
    "pid is a list": "echo '[1]' > supervisor.pid",
    "pid is a folder": "rm supervisor.pid; mkdir supervisor.pid",
    "pid is a pipe": "rm supervisor.pid; mkfifo supervisor.pid",
    "grant is empty": "echo '{}' > grant.json",
    "grant is a folder": "rm grant.json; mkdir grant.json",
    "launch is binary": "head -c 100 /dev/urandom > launch.json",
    "launch is of wrong types": 'echo \'{"gpus": 3, "shared": []}\' > launch.json',
    "ranks are of wrong types": "echo '{\"time_s\": {}}' > ranks.json",
    "log is a pipe": "rm log; mkfifo log; exit 3",
    "all is gone": 'rm -rf "$PWD"',
}


@pytest.mark.parametrize("what", SPOILERS)
def test_a_spoilt_folder_is_at_most_a_crash_of_that_attempt(rig: Rig, what: str) -> None:
    code = f'cd "$ICEFROG_ATTEMPT_DIR"; sleep 0.1; {SPOILERS[what]}; sleep 0.3'
    rig.silent_s = 0.1
    rig.controller_dies()
    rig.submit(job_spec("a", command=("sh", "-c", code)))
    rig.submit(job_spec("b", 12, 0.05))
    rig.start("a", 0)
    rig.start("b", 1)
    rig.until(lambda: rig.state.jobs["b"].epoch >= 4)
    rig.controller_dies()  # a later controller has to cope with the folder, too
    job = rig.state.jobs["a"]
    if job.phase is Phase.RUNNING:
        grant = job.grant.model_copy(update={"max_frozen_layers": 0})
        rig.command(ev.Regrant(time_s=rig.clock.now_s(), job_id="a", attempt=1, grant=grant))
    rig.until_phase("b", Phase.COMPLETED)
    rig.until(lambda: rig.state.jobs["a"].phase in FINAL | {Phase.PENDING})
    if rig.state.jobs["a"].phase is Phase.PENDING:
        assert "died: " in rig.reason("a")
    rig.until(lambda: rig.processes() == [])  # the last ones may be on their way out


@pytest.mark.parametrize("code", ['rm -rf "$ICEFROG_ATTEMPT_DIR"', 'ln -s stop "$ICEFROG_ATTEMPT_DIR/stop"'])
def test_a_job_that_cannot_be_asked_to_leave_is_ended(rig: Rig, code: str) -> None:
    rig.silent_s = 0.1
    rig.controller_dies()
    rig.submit(job_spec("a", command=("sh", "-c", f"sleep 0.5; {code}; sleep 600")))
    rig.start("a", 0)
    rig.until_phase("a", Phase.RUNNING)
    folder = rig.home.jobs_dir / "a" / "attempt-1"
    rig.until(lambda: not folder.exists() or (folder / "stop").is_symlink())
    rig.cancel("a")
    rig.until_phase("a", Phase.CANCELLED)
    assert rig.reason("a") == "cancelled"
    rig.until(lambda: rig.processes() == [])  # the last ones may be on their way out


def tell(*reports: dict[str, object], then: str = "exit 0") -> tuple[str, ...]:
    """A command that writes these reports."""
    lines = "".join(json.dumps(report) + "\n" for report in reports)
    return ("sh", "-c", f'printf %s "$1" > "$ICEFROG_ATTEMPT_DIR/reports.jsonl"; {then}', "sh", lines)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (STARTED, "effective_samples", float("inf")),
        (STARTED, "effective_samples", -5),
        (STARTED, "samples_per_epoch", 10**30),
        (STARTED, "epoch", -1),
        (PROGRESS, "effective_samples", float("nan")),
        (PROGRESS, "throughput", float("inf")),
        (PROGRESS, "frozen_layers", -1),
        (PROGRESS, "variance", [1.0, float("nan")]),
    ],
)
def test_numbers_that_cannot_be_are_a_warning_and_never_in_the_log(rig: Rig, kind, field: str, value: object) -> None:
    rig.submit(job_spec("a", command=tell(STARTED, {**kind, field: value}, PROGRESS)))
    rig.start("a", 0)
    rig.until_phase("a", Phase.COMPLETED)
    warning = next(r.message for r in rig.log if isinstance(r, ev.JobWarned))
    assert kind["kind"] in warning
    assert [ev.decode(ev.encode(record)) for record in rig.log] == rig.log


@pytest.mark.parametrize("time_s", [-9.0, 1e18, float("inf"), float("nan")])
def test_a_job_s_clock_does_not_move_ours(rig: Rig, time_s: float) -> None:
    rig.submit(job_spec("a", command=tell({**STARTED, "time_s": time_s}, PROGRESS)))
    rig.start("a", 0)
    rig.until_phase("a", Phase.COMPLETED)
    times = [record.time_s for record in rig.log if getattr(record, "job_id", "") == "a"]
    assert times == sorted(times)
    assert times[-1] <= rig.clock.now_s()


def test_lines_are_told_apart_by_newlines_alone_and_one_without_end_is_passed_over(tmp_path) -> None:
    tail = Tail(tmp_path / "reports")
    good = protocol.encode(protocol.Warned(time_s=1.0, message="m"))
    tail.path.write_bytes(b"a\rb\x0c\x1b[31mc\n" + good + b"half")
    assert [report if isinstance(report, str) else report.kind for report, _ in tail.read()] == ["a b c", "warning"]
    tail.path.write_bytes(b"x" * (1 << 24))
    tail.offset = 0
    assert [offset for _, offset in tail.read()] == [1 << 24]


def test_control_characters_of_a_job_reach_neither_reasons_nor_warnings(rig: Rig) -> None:
    last = r"printf '\033[31mred\007\033]0;title\007 \000\r\n' >&2; exit 5"
    rig.submit(job_spec("a", command=("sh", "-c", last)))
    rig.start("a", 0)
    rig.until_phase("a", Phase.PENDING)
    assert rig.reason("a") == "attempt 1 died: rank 0 exited with 5: red"
    assert plain("a\x1b[2Jb\x1b(Bc\n\td\x9b1me\u202ef") == "abc def"


@pytest.mark.parametrize(
    ("target", "phase", "notes"),
    [
        (None, Phase.COMPLETED, ["rank 0 exited with 7 after"]),
        (0.9, Phase.TARGET_MISSED, ["rank 0 exited with 7 after", "misses its target 0.9"]),
        (0.4, Phase.COMPLETED, ["rank 0 exited with 7 after"]),
    ],
)
def test_a_result_is_judged_by_the_target_and_a_failure_after_it_is_told(rig: Rig, target, phase, notes) -> None:
    wanted = None if target is None else Target(value=target)
    rig.submit(job_spec("a", command=tell(STARTED, FINISHED, then="exit 7"), target=wanted))
    rig.start("a", 0)
    rig.until_phase("a", phase)
    told = [r.message for r in rig.log if isinstance(r, ev.JobWarned)]
    assert len(told) == len(notes)
    assert all(note in text for note, text in zip(notes, told, strict=True))


def test_samples_beyond_the_end_do_not_move_it(rig: Rig) -> None:
    beyond = {**PROGRESS, "effective_samples": 723, "remaining_samples": 0}
    rig.submit(job_spec("a", command=tell(STARTED, PROGRESS | {"remaining_samples": 490}, beyond)))
    rig.start("a", 0)
    rig.until_phase("a", Phase.COMPLETED)
    assert (rig.state.jobs["a"].effective_samples, rig.state.jobs["a"].total_samples) == (723, 500)


@pytest.mark.parametrize("command", [("no-such-program-anywhere",), ("./no/such/program", "x"), ("/etc/passwd",)])
def test_what_never_ran_was_never_up(rig: Rig, command: tuple[str, ...]) -> None:
    rig.submit(job_spec("a", command=command))
    rig.start("a", 0)
    rig.until_phase("a", Phase.PENDING)
    assert rig.kinds("a") == ["start", "job_crashed"]
    assert f"cannot start {command[0]}" in rig.reason("a")
    assert str(job_spec("a").cwd) in rig.reason("a")


def test_a_resized_job_whose_new_attempt_cannot_start_waits_again(rig: Rig) -> None:
    rig.submit(job_spec("a", 50, 0.1))
    rig.start("a", 0)
    rig.until_phase("a", Phase.RUNNING)
    (rig.home.jobs_dir / "a" / "attempt-2").touch()
    rig.resize("a", 1)
    rig.until_phase("a", Phase.PENDING)
    assert rig.kinds("a") == ["start", "job_started", "resize", "job_stopped", "job_crashed"]


def test_a_silent_job_has_held_its_gpus_since_its_ranks_were_there(rig: Rig) -> None:
    rig.silent_s = 0.5
    rig.controller_dies()
    rig.submit(job_spec("a", command=("sleep", "600")))
    rig.start("a", 0)
    rig.until_phase("a", Phase.RUNNING)
    held = rig.state.jobs["a"].holding
    assert held is not None
    assert held.since_s == JobFolder(rig.home.jobs_dir / "a").attempt(1).up_since_s()
    assert rig.clock.now_s() - held.since_s >= 0.5


def test_a_supervisor_that_begins_between_two_looks_is_not_taken_for_dead(rig: Rig, monkeypatch) -> None:
    """`life` looks at several files one after the other; the supervisor may write them in between."""
    attempt = JobFolder(rig.home.jobs_dir / "a").attempt(1)
    attempt.create(job_spec("a", 20, 0.05), b.gpus(1), b.grant(1), {})
    real, spawned = os.path.lexists, []

    def late(path):
        if not spawned:  # it comes up exactly here
            spawned.append(attempt.spawn())
            rig.until(lambda: real(attempt.path / "supervisor.pid"))
        return real(path)

    monkeypatch.setattr(os.path, "lexists", late)
    assert attempt.life() is Life.RUNNING
    rig.until(lambda: attempt.life() is Life.OVER)
    spawned[0].wait()
