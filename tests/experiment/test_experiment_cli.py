"""``icefrog experiment`` and ``icefrog whatif``, end to end on a few jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from experiment_files import SMALL

from icefrog.cli.main import run
from icefrog.cli.threads import one_blas_thread

SIMULATE = ["simulate", "--policy", "fifo", "--trace", "no.csv", "--cluster", "2x4"]
WHATIF = ["whatif", "--trace", "synth:philly-120", "--cluster", "2x4", "--jobs", "8", "--seeds", "2", "--workers", "1"]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def test_an_experiment(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["experiment", str(file), "--dry-run"]) == 0
    assert "4 cells, 0 finished, 4 to do" in capsys.readouterr().out
    assert not Path("runs").exists()
    assert run(["experiment", str(file), "--workers", "1"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""  # no terminal, no progress
    assert "small: 4 of 4 cells\n" in captured.out
    assert {path.name for path in Path("runs/small").iterdir()} == {
        *("cells", "cells.csv", "experiment.json", "report.html"),
    }
    assert run(["experiment", str(file), "--workers", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["variant"] for row in document["conditions"][0]["rows"]] == ["fifo", "srtf"]
    assert run(["experiment", str(file), "--dry-run"]) == 0
    assert "4 cells, 4 finished, 0 to do" in capsys.readouterr().out
    assert run(["experiment", str(file), "--workers", "1"]) == 0
    assert "4 of 4 cells, 4 of them finished before" in capsys.readouterr().out


def test_a_dry_run_tells_a_damaged_cell_from_a_finished_one(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["experiment", str(file), "--workers", "1"]) == 0
    damaged = sorted(Path("runs/small/cells").iterdir())[0]
    damaged.write_text(damaged.read_text().replace('"seed":0', '"seed":8').replace('"seed":1', '"seed":8'))
    capsys.readouterr()
    assert run(["experiment", str(file), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert f"todo  {damaged.stem}" in out
    assert "4 cells, 3 finished, 1 to do" in out


@pytest.mark.parametrize("command", [["experiment", "no.yaml"], SIMULATE])
def test_numerical_libraries_are_loaded_with_one_thread(tmp_path: Path, command: list[str]) -> None:
    """In a process of its own: they look at the environment when they are loaded, and never again."""
    (tmp_path / "watch.py").write_text(WATCH)
    unset = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
    argv = [sys.executable, "watch.py", *command]
    process = subprocess.run(argv, cwd=tmp_path, env=unset, capture_output=True, text=True, check=False)
    assert process.returncode == 2, process.stderr
    assert process.stdout == "numpy with 1 and 1\n"


def test_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    one_blas_thread()
    assert (os.environ["OMP_NUM_THREADS"], os.environ.get("OPENBLAS_NUM_THREADS")) == ("3", None)


WATCH = """
import os, sys
from importlib.abc import MetaPathFinder

class Watch(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "numpy":
            print("numpy with", os.environ.get("OMP_NUM_THREADS"), "and", os.environ.get("OPENBLAS_NUM_THREADS"))

sys.meta_path.insert(0, Watch())
from icefrog.cli.main import main
main(sys.argv[1:])
"""


def test_a_part_of_an_experiment(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = ["--only", "variant=srtf", "--only", "seed=1"]
    assert run(["experiment", str(file), "--dry-run", *only]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("srtf, philly, seed 1")
    assert run(["experiment", str(file), "--dry-run", "--only", "variant=srtf,fifo"]) == 0
    assert "4 cells" in capsys.readouterr().out


def test_failed_cells_exit_with_1(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(SMALL.replace("jobs: 6", "jobs: 600"))
    assert run(["experiment", str(file), "--workers", "1"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("failed: fifo, philly, seed 0 and 3 more: jobs: got 600")
    assert "small: 0 of 4 cells" in captured.out


@pytest.mark.parametrize(
    "more",
    [
        ["--only", "variant"],
        ["--only", "variant=lifo"],
        ["--only", "load=2"],
        ["--workers", "0"],
        ["--out", "/dev/null/x", "--workers", "1"],
    ],
)
def test_wrong_arguments(file: Path, capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    assert run(["experiment", str(file), *more]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["error", "hint"]


def test_wrong_files(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["experiment", "none.yaml"]) == 2
    file.write_text(SMALL.replace("synth:philly-120", "$NOWHERE/jobs.csv"))
    assert run(["experiment", str(file), "--dry-run"]) == 2
    assert "cannot read the trace $NOWHERE/jobs.csv" in capsys.readouterr().err


def test_ray_is_asked_for_by_name(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(["experiment", str(file), "--ray", "auto"]) == 2
    err = capsys.readouterr().err
    assert "Ray is not installed" in err
    assert 'pip install "icefrog[ray]"' in err


def test_data_names_the_folder_of_traces(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ICEFROG_DATA", "/nowhere")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "jobs.csv").write_text("job_id,submit_s,num_gpus,duration_s\na,0,1,600\nb,5,2,600\n")
    file.write_text(SMALL.replace("{source: synth:philly-120, name: philly, jobs: 6}", "$ICEFROG_DATA/jobs.csv"))
    assert run(["experiment", str(file), "--workers", "1", "--data", str(tmp_path / "data")]) == 0
    assert "4 of 4 cells" in capsys.readouterr().out


def test_whatif(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["--change", "gpus+8", "--change", "policy=srtf", "--change", "gpus-4,load=2", "--change", "freeze=half"]
    assert run([*WHATIF, "--policy", "fifo", *changes, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (condition,) = document["conditions"]
    rows = {row["variant"]: row for row in condition["rows"]}
    assert list(rows) == ["as it is", "gpus+8", "policy=srtf", "gpus-4, load=2", "freeze=half"]
    assert {row["jobs"] for row in rows.values()} == {16}  # the same jobs everywhere
    assert rows["gpus+8"]["versus_base"]["avg_jct_s"]["ratio"] >= 1
    assert rows["gpus-4, load=2"]["versus_base"]["avg_jct_s"]["ratio"] <= 1
    assert rows["freeze=half"]["versus_base"]["avg_jct_s"]["ratio"] == 1  # fifo freezes nothing
    assert rows["freeze=half"]["groups"]["freezing"].keys() == {"free", "restricted"}
    assert run([*WHATIF, "--policy", "fifo", "--change", "gpus+8"]) == 0
    out = capsys.readouterr().out
    assert "4 of 4 cells, 4 of them finished before" in out
    assert "as it is" in out


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--change", "gpus+3"],
        ["--change", "gpus+8", "--change", "gpus+8"],
        ["--change", "gpus+8", "--policy", "fido"],
        ["--change", "gpus+8", "--policy", "icefrog", "--set", "icefrog.rho=7"],
        ["--change", "gpus+8", "--seeds", "0"],
    ],
)
def test_wrong_whatifs(file: Path, capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    assert run([*WHATIF, *more]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
