"""The command line's contract: outputs, exit codes, and never a traceback on wrong input."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from icefrog.cli.main import run

PROBLEM = {
    "gpus": 4,
    "gpu_mem_bytes": 8e10,
    "jobs": [
        {"id": "A", "options": [{"gpus": 1, "tta_s": 6000}, {"gpus": 2, "tta_s": 3600}, {"gpus": 4, "tta_s": 3000}]},
        {"id": "B", "options": [{"gpus": 1, "tta_s": 4800}, {"gpus": 2, "tta_s": 3000}, {"gpus": 4, "tta_s": 2700}]},
    ],
}
SMALL = ["--trace", "synth:philly-120", "--cluster", "4x4", "--jobs", "12"]


def wrong(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command that must be refused; return its two lines."""
    assert run(argv) == 2, argv
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == ""
    assert len(lines) == 2, captured.err
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("hint: ")
    return captured.err


def test_solve_gives_the_specification_s_example(tmp_path, capsys):
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(PROBLEM))
    for method in ("exact", "milp"):
        assert run(["solve", str(path), "--method", method]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert {job: choice["gpus"] for job, choice in answer["assignment"].items()} == {"A": 2, "B": 2}
        assert answer["min_share"] == pytest.approx(3000 / 3600)
        assert answer["gap"] == 0.0
        assert answer["solve_s"] > 0


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"gpus": 4, "jobs": [{}]}', '{"gpus": NaN, "jobs": []}', "[" * 100_000, '"\\ud800"', "\xff"],
)
def test_solve_refuses_what_is_no_problem(tmp_path, capsys, text):
    path = tmp_path / "p.json"
    path.write_bytes(text.encode("latin-1"))
    wrong(capsys, "solve", str(path))


@pytest.mark.parametrize(
    "argv",
    [
        ["solve", "no-such-file.json"],
        ["solve", "."],
        ["frobnicate"],
        ["simulate"],
        ["simulate", *SMALL],
        ["simulate", *SMALL, "--policy", "fido"],
        ["simulate", *SMALL, "--policy", ","],
        ["simulate", *SMALL, "--policy", "fifo,fifo"],
        ["simulate", *SMALL, "--policy", "fifo", "--set", "rho=1"],
        ["simulate", *SMALL, "--policy", "fifo", "--set", "icefrog.rho=1"],
        ["simulate", *SMALL, "--policy", "icefrog", "--set", "icefrog.rho=2"],
        ["simulate", *SMALL, "--policy", "icefrog", "--set", "icefrog.roh=1"],
        ["simulate", *SMALL, "--policy", "fifo", "--load", "0"],
        ["simulate", *SMALL, "--policy", "fifo", "--load", "nan"],
        ["simulate", *SMALL, "--policy", "fifo", "--seed", "-1"],
        ["simulate", *SMALL, "--policy", "fifo", "--start", "yesterday"],
        ["simulate", *SMALL, "--policy", "fifo", "--start", "2017-10-03"],
        ["simulate", *SMALL, "--policy", "fifo", "--hours", "-3"],
        ["simulate", *SMALL, "--policy", "fifo", "--out", "/dev/null/x"],
        ["simulate", "--trace", "synth:nothing", "--cluster", "4x4", "--policy", "fifo"],
        ["simulate", "--trace", "no.csv", "--cluster", "4x4", "--policy", "fifo"],
        ["simulate", "--trace", "synth:philly-120", "--cluster", "4by4", "--policy", "fifo"],
        ["simulate", "--trace", "synth:philly-120", "--cluster", "4x4", "--policy", "fifo", "--jobs", "0"],
        *[
            ["simulate", *SMALL, "--policy", "fifo", option, value]
            for option, value in (
                ("--noise", "nan"),
                ("--round", "nan"),
                ("--round", "inf"),
                ("--restart", "nan"),
                ("--restart", "1e300"),
                ("--load", "1e-300"),
                ("--load", "inf"),
                ("--hours", "nan"),
                ("--hours", "0"),
            )
        ],
        ["up", "--round", "nan"],
        ["cancel", "\udcff"],
        ["trace", "describe", "no.csv"],
        ["trace", "synth", "nothing", "x.csv"],
        ["report", "no-such-folder"],
    ],
)
def test_wrong_arguments(capsys, argv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong(capsys, *argv)


@pytest.mark.parametrize("command", ["explain", "logs", "cancel"])
def test_live_commands_in_an_empty_home(capsys, tmp_path, command):
    wrong(capsys, command, "nobody", "--home", str(tmp_path / "home"))
    assert run(["jobs", "--home", str(tmp_path / "home")]) == 0
    assert capsys.readouterr().out == "no jobs\n"
    assert run(["down", "--home", str(tmp_path / "home")]) == 0
    assert not (tmp_path / "home").exists()  # asking creates nothing


@pytest.mark.parametrize("argv", [["up"], ["down"], ["jobs"], ["explain", "a"], ["logs", "a"], ["cancel", "a"]])
def test_a_home_that_is_no_folder(capsys, tmp_path, argv):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("file", "loop"):
        assert "is not a folder" in wrong(capsys, *argv, "--home", str(tmp_path / name))


def test_a_key_given_twice_is_no_problem_to_solve(capsys, tmp_path):
    path = tmp_path / "p.json"
    path.write_text('{"gpus": 4, "gpus": 8, "jobs": []}')
    assert "'gpus' is given twice" in wrong(capsys, "solve", str(path))


def test_a_wrong_trace_leaves_no_folder_behind(capsys, tmp_path):
    out = tmp_path / "out"
    wrong(capsys, "simulate", "--trace", "no.csv", "--cluster", "4x4", "--policy", "fifo", "--out", str(out))
    assert not out.exists()


def test_a_trace_with_a_column_twice(capsys, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("job_id,submit_s,submit_s,num_gpus,duration_s\na,0,0,1,10\n")
    assert "given twice" in wrong(capsys, "trace", "describe", str(path))


def test_damaged_simulations_are_not_reported(capsys, tmp_path):
    out = tmp_path / "one"
    assert run(["simulate", *SMALL, "--policy", "fifo", "--out", str(out)]) == 0
    capsys.readouterr()
    summary, events = out / "summary.json", out / "fifo" / "events.jsonl"
    good, log = summary.read_text(), events.read_text()
    spoilt = {
        "nested": (summary, "[" * 100_000),
        "nan": (summary, re.sub(r'"wall_s": [0-9.e-]+', '"wall_s": NaN', good)),
        "schema": (summary, good.replace('"schema": 1', '"schema": 99')),
        "smaller cluster": (summary, good.replace('"count": 4', '"count": 1')),
        "empty log": (events, ""),
        "nan time": (events, re.sub(r'"time_s":[0-9.]+', '"time_s":NaN', log, count=1)),
    }
    for what, (path, text) in spoilt.items():
        summary.write_text(good)
        events.write_text(log)
        assert path.read_text() != text, what
        path.write_text(text)
        wrong(capsys, "report", str(out))
        assert path.read_text() == text, what  # nothing was overwritten


def test_submit_hands_in_all_files_or_none(tmp_path, capsys):
    home = ["--home", str(tmp_path / "home")]
    good = tmp_path / "good.yaml"
    good.write_text("name: a\ncommand: [python, -c, pass]\ngpus: [1]\nbatch: {global: 8}\nmax_epochs: 1\n")
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: b\ncommand: [python]\ngpus: [0]\nbatch: {global: 8}\nmax_epochs: 1\n")
    assert "bad.yaml:3: gpus.0" in wrong(capsys, "submit", str(good), str(bad), *home)
    wrong(capsys, "submit", str(good), str(good), *home)
    run(["jobs", *home])
    assert "no jobs" in capsys.readouterr().out
    assert run(["submit", str(good), *home]) == 0
    assert "submitted a" in capsys.readouterr().out
    wrong(capsys, "submit", str(good), *home)
    assert run(["submit", str(good), "--name", "a2", *home]) == 0
    capsys.readouterr()
    assert run(["jobs", "--json", *home]) == 0
    assert [row["job_id"] for row in json.loads(capsys.readouterr().out)] == ["a", "a2"]
    assert run(["explain", "a", *home]) == 0
    assert "no controller is running" in capsys.readouterr().out


def test_simulate_writes_the_contract_s_files_and_the_same_bytes_again(tmp_path, capsys):
    for out in ("one", "two"):
        argv = ["simulate", *SMALL, "--policy", "fifo,icefrog", "--out", str(tmp_path / out), "--json"]
        assert run(argv) == 0
        document = json.loads(capsys.readouterr().out)
        assert [row["policy"] for row in document["runs"]] == ["fifo", "icefrog"]
        assert document["schema"] == 1
        assert all(row["completed"] == 12 for row in document["runs"])
    for policy in ("fifo", "icefrog"):
        for name in ("jobs.csv", "events.jsonl"):
            one, two = ((tmp_path / out / policy / name).read_bytes() for out in ("one", "two"))
            assert one == two, name
        header = (tmp_path / "one" / policy / "jobs.csv").read_text().splitlines()[0]
        assert header.startswith("job_id,submit_s,start_s,finish_s,jct_s,queue_s,gpu_s,restarts,status")
    summaries = [json.loads((tmp_path / out / "summary.json").read_text()) for out in ("one", "two")]
    for summary in summaries:
        for row in summary["runs"]:
            del row["wall_s"], row["decision_s"]
    assert summaries[0] == summaries[1]
    assert "<html" in (tmp_path / "one" / "report.html").read_text()
    assert run(["report", str(tmp_path / "one")]) == 0


def test_traces_can_be_generated_described_and_converted(tmp_path, capsys):
    csv = tmp_path / "t.csv"
    assert run(["trace", "synth", "philly-120", str(csv), "--seed", "3"]) == 0
    capsys.readouterr()
    assert run(["trace", "describe", str(csv), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["jobs"] == 120
    assert run(["trace", "describe", str(csv)]) == 0
    assert "120 rows read, 120 kept" in capsys.readouterr().out
    assert run(["trace", "convert", str(csv), str(tmp_path / "u.csv"), "--jobs", "10"]) == 0
    assert len((tmp_path / "u.csv").read_text().splitlines()) == 11
    before = csv.read_bytes()
    capsys.readouterr()
    assert run(["trace", "convert", str(csv), str(tmp_path / "." / "t.csv")]) == 2
    assert "is the log itself" in capsys.readouterr().err
    assert csv.read_bytes() == before


@pytest.mark.parametrize("command", ["policies", "workloads"])
def test_listings(capsys, command):
    assert run([command]) == 0
    text = capsys.readouterr().out
    assert {"policies": "icefrog", "workloads": "resnet18"}[command] in text.lower()
    assert run([command, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) >= 3


def test_the_listing_of_policies_says_what_each_option_may_be(capsys):
    run(["policies"])
    text = capsys.readouterr().out
    assert "--set themis.fairness=0.8  [0..1] " in text
    assert "--set themis.lease_s=1200.0  [> 0] " in text
    assert "--set fifo.backfill=none  [none | aggressive | easy] " in text
    run(["policies", "--json"])
    policies = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert all(option["description"] for row in policies for option in row["options"].values())


@pytest.mark.parametrize("argv", [[], ["trace"]])
def test_a_command_of_commands_by_itself_shows_them(capsys, argv):
    assert run(argv) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "Commands:\n" in captured.out


def test_help_needs_neither_torch_nor_a_policy():
    code = """
import sys
from icefrog.cli.main import run
run(["--help"])
heavy = {"torch", "plotly", "scipy.optimize", "polars", "rustworkx"}
sys.exit(", ".join(heavy & set(sys.modules)) or 0)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "simulate" in result.stdout


def test_the_core_never_imports_torch():
    modules = [
        "icefrog.replay",
        "icefrog.live",
        "icefrog.liveview",
        "icefrog.cli.simulation",
        "icefrog.runtime.protocol",
    ]
    code = f"import sys, importlib; [importlib.import_module(m) for m in {modules}]; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_closed_pipe_ends_quietly():
    command = f"{sys.executable} -m icefrog policies | head -n 0"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert result.stderr == ""
