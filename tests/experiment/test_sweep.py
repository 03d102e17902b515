"""Cells are computed once, kept at once, and go on after any interruption."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from experiment_files import SMALL, deadly, fake, load
from experiment_files import result as cell_result

from icefrog.errors import UserError
from icefrog.experiment import cell_run
from icefrog.experiment.backends import Inline, Outcome, Outcomes, Processes, compute
from icefrog.experiment.cell_run import run_cell, without_clock
from icefrog.experiment.cells import Cell
from icefrog.experiment.digest import RESULT, program_digest, trace_digest
from icefrog.experiment.store import CellStore
from icefrog.experiment.sweep import plan, run_sweep


class Fake:
    """Computes without simulating; raises after ``stop_after`` cells."""

    slots = 1

    def __init__(self, stop_after: int | None = None, fails: Sequence[int] = ()) -> None:
        self.stop_after, self.fails = stop_after, fails
        self.computed: list[str] = []

    def run(self, cells: Sequence[Cell]) -> Outcomes:
        for index, cell in enumerate(cells):
            if index == self.stop_after:
                raise KeyboardInterrupt
            self.computed.append(cell.label())
            yield Outcome(index, None, "it broke") if index in self.fails else fake(index, cell, "")


def test_an_interrupted_sweep_goes_on_where_it_stopped(tmp_path: Path) -> None:
    planned = plan(list(load(tmp_path).cells()))
    store = CellStore(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        run_sweep(planned, store, Fake(stop_after=3))
    assert len(list(store.folder.iterdir())) == 3
    seen: list[tuple[int, int, str]] = []
    rest = Fake()
    sweep = run_sweep(planned, store, rest, lambda *state: seen.append(state))
    assert rest.computed == [planned[3].cell.label()]
    assert (len(sweep.results), sweep.reused) == (4, 3)
    assert seen == [(3, 4, ""), (4, 4, planned[3].cell.label())]
    nothing = Fake()
    assert run_sweep(planned, store, nothing).reused == 4
    assert nothing.computed == []


def test_equal_cells_are_computed_once(tmp_path: Path) -> None:
    twice = SMALL.replace("[fifo, srtf]", "[fifo, {name: again, policy: fifo}]")
    planned = plan(list(load(tmp_path, twice).cells()))
    backend = Fake()
    sweep = run_sweep(planned, CellStore(tmp_path / "out"), backend)
    assert (len(planned), len(backend.computed), len(sweep.results)) == (4, 2, 2)


def test_a_failed_cell_is_told_and_tried_again(tmp_path: Path) -> None:
    planned = plan(list(load(tmp_path).cells()))
    store = CellStore(tmp_path / "out")
    sweep = run_sweep(planned, store, Fake(fails=[1]))
    assert sweep.failed == {planned[1].key: "it broke"}
    again = Fake()
    assert not run_sweep(planned, store, again).failed
    assert again.computed == [planned[1].cell.label()]


@pytest.mark.parametrize(("after", "message"), [("changed", "was changed meanwhile"), (None, "cannot read the trace")])
def test_a_result_of_a_trace_that_is_changed_meanwhile_is_not_kept(
    tmp_path: Path, after: str | None, message: str
) -> None:
    """Its name is that of the trace as it was when the cell was planned."""
    trace = tmp_path / "jobs.csv"
    trace.write_text("as planned")
    small = SMALL.replace("synth:philly-120", str(trace))
    planned = plan(list(load(tmp_path, small).cells()))[:2]
    store = CellStore(tmp_path / "out")

    class Changing(Fake):
        def run(self, cells: Sequence[Cell]) -> Outcomes:
            for outcome in super().run(cells):
                if outcome.index == 1:
                    trace.unlink()
                    if after is not None:
                        trace.write_text(after)
                yield outcome

    sweep = run_sweep(planned, store, Changing())
    assert list(sweep.results) == [planned[0].key]
    assert message in sweep.failed[planned[1].key]
    assert store.get(planned[1].key) is None


def test_an_option_may_be_infinite(tmp_path: Path) -> None:
    text = SMALL.replace("[fifo, srtf]", "[{policy: icefrog, set: {max_wait_s: 'inf'}}, icefrog]")
    planned = plan(list(load(tmp_path, text).cells()))
    store = CellStore(tmp_path / "out")
    assert len(run_sweep(planned, store, Fake()).results) == 4
    assert json.loads(store.path(planned[0].key).read_text())["inputs"]["options"] == {"max_wait_s": "inf"}
    assert run_sweep(planned, store, Fake()).reused == 4


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"schema": 1}', '{"schema": 0, "summary": 1}', "\0"])
def test_a_damaged_result_is_computed_again(tmp_path: Path, damage: str) -> None:
    planned = plan(list(load(tmp_path).cells()))[:1]
    store = CellStore(tmp_path / "out")
    run_sweep(planned, store, Fake())
    store.path(planned[0].key).write_text(damage)
    backend = Fake()
    run_sweep(planned, store, backend)
    assert len(backend.computed) == 1
    assert json.loads(store.path(planned[0].key).read_text())["key"] == planned[0].key


def test_a_result_with_another_number_in_it_is_computed_again(tmp_path: Path) -> None:
    planned = plan(list(load(tmp_path).cells()))[:1]
    store = CellStore(tmp_path / "out")
    run_sweep(planned, store, Fake())
    path = store.path(planned[0].key)
    for written, damaged in (('"summary":', '"Summary":'), ('"seed":0', '"seed":8'), ('"}', '0"}')):
        text = path.read_text()
        assert written in text
        path.write_text(damaged.join(text.rsplit(written, 1)))
        assert store.get(planned[0].key) is None
        backend = Fake()
        run_sweep(planned, store, backend)
        assert len(backend.computed) == 1


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_result_that_is_no_number_fails_its_cell_alone(tmp_path: Path, number: float) -> None:
    planned = plan(list(load(tmp_path).cells()))
    store = CellStore(tmp_path / "out")

    class Broken(Fake):
        def run(self, cells: Sequence[Cell]) -> Outcomes:
            for outcome in super().run(cells):
                yield Outcome(1, cell_result([5.0], rho=[0.0, number])) if outcome.index == 1 else outcome

    sweep = run_sweep(planned, store, Broken())
    assert sweep.failed == {planned[1].key: f"a result that is no finite number: summary.rho[1] is {number}"}
    assert len(sweep.results) == len(list(store.folder.iterdir())) == 3


def test_a_change_of_what_runs_a_cell_is_another_program() -> None:
    """Of the modules of this package all that ``cell_run`` imports, and what those import."""
    package = Path(cell_run.__file__).parent
    found, left = set(), ["cell_run"]
    while left:
        found.add(name := left.pop())
        imports = re.findall(
            r"^ *from icefrog\.experiment\.(\w+) import", (package / f"{name}.py").read_text(), re.MULTILINE
        )
        left += [other for other in imports if other not in found]
    assert {f"experiment/{name}.py" for name in found} == set(RESULT)
    assert "experiment/spec.py" in RESULT


def test_a_result_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan(list(load(tmp_path).cells()))[:1]
    store = CellStore(tmp_path / "out")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left"):
        run_sweep(planned, store, Fake())
    assert store.get(planned[0].key) is None
    assert list(store.folder.iterdir()) == []


def test_processes_compute_what_one_process_does(tmp_path: Path) -> None:
    planned = plan(list(load(tmp_path).cells()))
    here = run_sweep(planned, CellStore(tmp_path / "here"), Inline())
    there = run_sweep(planned, CellStore(tmp_path / "there"), Processes(2))
    assert not here.failed
    assert not there.failed
    for key, result in here.results.items():
        assert {**without_clock(result), "cpu_s": 0} == {**without_clock(there.results[key]), "cpu_s": 0}


def test_a_worker_that_dies_costs_only_the_cell_that_kills_it(tmp_path: Path) -> None:
    planned = plan(list(load(tmp_path).cells()))
    sweep = run_sweep(planned, CellStore(tmp_path / "out"), Processes(2, deadly))
    assert [one.cell.label() for one in planned if one.key in sweep.failed] == ["fifo, philly, seed 1"]
    assert "died" in next(iter(sweep.failed.values()))
    assert len(sweep.results) == 3


def test_errors_of_a_cell_become_its_outcome(tmp_path: Path) -> None:
    cell = next(load(tmp_path, SMALL.replace("jobs: 6", "jobs: 600")).cells())
    outcome = compute(5, cell, program_digest())
    assert (outcome.index, outcome.result) == (5, None)
    assert "jobs: got 600" in outcome.error
    assert "another version" in compute(0, cell, "other program").error


def test_a_cell_is_the_simulation_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from icefrog.cli.main import run

    cell = list(load(tmp_path).cells())[3]
    argv = ["simulate", "--trace", "synth:philly-120", "--jobs", "6", "--cluster", "2x4", "--seed", "1"]
    assert run([*argv, "--policy", "srtf", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["runs"][0]
    ours = run_cell(cell)["summary"]
    assert {**ours, "wall_s": 0, "decision_s": 0} == {**row, "wall_s": 0, "decision_s": 0}


def test_digests_follow_contents(tmp_path: Path) -> None:
    file = tmp_path / "jobs.csv"
    file.write_text("a")
    first = trace_digest(str(file))
    assert trace_digest(str(file)) == first
    (tmp_path / "copy.csv").write_text("a")
    assert trace_digest(str(tmp_path / "copy.csv")) == first
    file.write_text("b")
    assert trace_digest(str(file)) != first
    assert trace_digest("synth:philly-120") == ""
    with pytest.raises(UserError, match="cannot read the trace"):
        trace_digest("$NO_SUCH_VARIABLE/jobs.csv")


@pytest.mark.slow
def test_ctrl_c_leaves_a_state_to_go_on_from(tmp_path: Path) -> None:
    path = tmp_path / "long.yaml"
    path.write_text(SMALL.replace("jobs: 6", "jobs: 60").replace("seeds: 2", "seeds: 200"))
    argv = [sys.executable, "-m", "icefrog", "experiment", str(path), "--out", str(tmp_path / "out"), "--workers", "2"]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    cells = tmp_path / "out" / "cells"
    while process.poll() is None and not (cells.is_dir() and len(list(cells.glob("*.json"))) >= 2):
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "goes on from there" in err
    assert "Traceback" not in err
    assert not list(cells.glob(".*.part"))
    assert _all_gone(process.pid)


def _all_gone(group: int) -> bool:
    """Whether nobody of a process group is left, after a while."""
    for _ in range(200):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False
