"""Experiment files: what they expand to, and what is said of wrong ones."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from experiment_files import SMALL, load

from icefrog.errors import UserError
from icefrog.estimate.boundary import Guards
from icefrog.experiment.cell_run import sim_settings
from icefrog.experiment.cells import Cell, expand
from icefrog.experiment.spec import default_settings, read_experiment, world_settings

SHIPPED = sorted((Path(__file__).resolve().parents[2] / "experiments").glob("*.yaml"))


def test_a_small_one(tmp_path: Path) -> None:
    what = load(tmp_path)
    assert (what.name, what.base, what.seeds) == ("small", "fifo", (0, 1))
    cells = list(what.cells())
    assert [cell.label() for cell in cells] == [
        *("fifo, philly, seed 0", "srtf, philly, seed 0", "fifo, philly, seed 1", "srtf, philly, seed 1"),
    ]
    assert {cell.replicate for cell in cells} == {("philly", 0), ("philly", 1)}


def test_lists_multiply(tmp_path: Path) -> None:
    what = load(
        tmp_path,
        """
traces: [synth:philly-120]
cluster: [2x4, 4x4]
load: [1, 2]
scale: [1, 5]
seeds: [3, 7]
world: {noise: [0, 0.5], restart_s: 30}
workload: {restrict_freezing: [0, 0.5]}
policies:
  - fifo
  - {policy: icefrog, set: {rho: [0, 0.5, 1], share: false}}
  - {name: other, policy: icefrog, set: {share: [true, false], rho: [0, 1]}}
base: other[share=yes,rho=0]
""",
    )
    assert [v.name for v in what.variants] == [
        *("fifo", "icefrog[share=no][rho=0]", "icefrog[share=no][rho=0.5]", "icefrog[share=no][rho=1]"),
        *("other[share=yes,rho=0]", "other[share=yes,rho=1]", "other[share=no,rho=0]", "other[share=no,rho=1]"),
    ]
    assert what.variants[2].options == {"rho": 0.5, "share": False}
    assert (what.variants[2].series, what.variants[2].axis) == ("icefrog[share=no]", ("rho", 0.5))
    assert what.variants[4].axis is None  # two options were listed: no single quantity
    assert len(what.conditions) == 2 * 2 * 2 * 2 * 2
    last = what.conditions[-1]
    assert last.label == "cluster=4x4, scale=5, load=2, noise=0.5, restrict_freezing=0.5"
    assert (last.cluster.label(), last.load, dict(last.world)) == ("20x4", 10.0, {"noise": 0.5, "restart_s": 30.0})
    assert len(list(what.cells())) == 32 * 2 * 8


def test_every_shipped_experiment_can_be_run() -> None:
    assert len(SHIPPED) >= 12
    for path in SHIPPED:
        what = expand(read_experiment(path))
        assert what.about, path
        assert len(what.traces) * len(what.seeds) >= (3 if path.stem == "scale" else 8), path
        assert path.read_text().startswith("# "), path


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("cluster: 2x4", "cluster: 2by4", 3, "'2by4' is neither NODESxGPUS"),
        ("cluster: 2x4", "", 2, "cluster: is missing"),
        ("seeds: 2", "seeds: -1", 4, "seeds"),
        ("seeds: 2", "seeds: [1, 1]", 4, "an entry is given twice"),
        ("seeds: 2", "sed: 2", 4, "did you mean seeds?"),
        ("seeds: 2", "load: [1, 0]", 4, "load.1"),
        ("seeds: 2", "load: nan", 4, "load"),
        ("seeds: 2", "scale: 1.5", 4, "scale"),
        ("seeds: 2", "world: {nois: 1}", 4, "did you mean noise?"),
        ("seeds: 2", "world: {noise: [0, x]}", 4, "world.noise.1"),
        ("seeds: 2", "world:\n  noise: 0\n  round_s: -5", 6, "world.round_s"),
        ("seeds: 2", "base: icefrog", 4, "no variant is called 'icefrog'"),
        ("[fifo, srtf]", "[fifo, srft]", 5, "no policy is called 'srft'"),
        ("[fifo, srtf]", "\n  - fifo\n  - {policy: icefrog, set: {roh: 1}}", 7, "has no option 'roh'"),
        ("[fifo, srtf]", "\n  - fifo\n  - {policy: icefrog, set: {rho: 2}}", 7, "icefrog.rho"),
        ("[fifo, srtf]", "[fifo, fifo]", 5, "a second variant is called 'fifo'"),
        ("[fifo, srtf]", "[]", 5, "policies"),
        ("jobs: 6", "jobs: 0", 2, "traces.0.jobs"),
        ("jobs: 6", "day_hours: [7, 3]", 2, "the first before the second"),
        ("jobs: 6", "start: yesterday", 2, "traces.0.start"),
        ("traces: {source: synth:philly-120, name: philly, jobs: 6}", "traces: [a.csv, b/a.csv]", 2, "a second trace"),
    ],
)
def test_wrong_files_are_refused_with_the_line(tmp_path: Path, old: str, new: str, line: int, says: str) -> None:
    assert old in SMALL
    with pytest.raises(UserError) as caught:
        load(tmp_path, SMALL.replace(old, new))
    assert f"small.yaml:{line}" in caught.value.message
    assert says in f"{caught.value.message} {caught.value.hint}"


def test_settings_of_the_world_are_numbers(tmp_path: Path) -> None:
    for name in world_settings():
        text = (
            f"{SMALL}world: {{{name}: 2}}" if name == "node_mtbf_h" else f"{SMALL}world: {{{name}: 2, node_mtbf_h: 5}}"
        )
        settings = sim_settings(next(load(tmp_path, text).cells()))
        assert settings.world is not None
        assert {**vars_of(settings.world), **vars_of(settings.outages), **vars_of(settings)}[name] == 2
        assert settings.world.guards == Guards()
    with pytest.raises(UserError, match="unknown setting"):
        load(tmp_path, f"{SMALL}world: {{guards: 1}}")


def vars_of(settings: Any) -> dict[str, Any]:
    return {field.name: getattr(settings, field.name) for field in fields(settings)}


@pytest.mark.parametrize("text", ["", "- a", "traces: [", "traces: &a [*a]\ncluster: 2x4\npolicies: fifo"])
def test_what_is_no_experiment_at_all(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError):
        load(tmp_path, text)


def test_a_key_names_everything_that_decides_a_result_and_nothing_else(tmp_path: Path) -> None:
    def key(text: str = SMALL, program: str = "p", trace: str = "t", which: int = 0) -> str:
        cell: Cell = list(load(tmp_path, text).cells())[which]
        return cell.key(program, trace)

    assert key() == key(SMALL.replace("name: philly", "name: other"))
    assert key(which=1) == key(SMALL.replace("[fifo, srtf]", "[fifo, {name: oracle, policy: srtf}]"), which=1)
    changes = [
        *(SMALL.replace("jobs: 6", text) for text in ("jobs: 7", "jobs: 6, hours: 2", "jobs: 6, day_hours: [3, 7]")),
        *(SMALL.replace("2x4", text) for text in ("2x5", "2x4:a100-80gb")),
        *(f"{SMALL}{text}" for text in ("load: 2", "scale: 2", "workload: {restrict_freezing: 0.5}")),
        *(f"{SMALL}world: {{{name}: 7}}" for name in world_settings()),
        SMALL.replace("synth:philly-120", "jobs.csv"),
        SMALL.replace("seeds: 2", "seeds: [9]"),
        SMALL.replace("[fifo, srtf]", "[srtf]"),
        SMALL.replace("[fifo, srtf]", "[{policy: fifo, set: {backfill: easy}}]"),
    ]
    keys = [key(), key(program="other"), key(trace="other"), *(key(text) for text in changes)]
    assert len(set(keys)) == len(keys)


def test_a_default_that_is_spelt_out_is_the_same_cell(tmp_path: Path) -> None:
    def key(text: str) -> str:
        return next(load(tmp_path, text).cells()).key("p", "t")

    world = ", ".join(f"{name}: {value}" for name, value in default_settings().items())
    assert key(f"{SMALL}world: {{{world}}}") == key(SMALL)
    frog = SMALL.replace("[fifo, srtf]", "[{policy: icefrog, set: {batch: fixed%s}}]")
    assert key(frog % ", rho: 0.5, share: true, penalty: tuner") == key(frog % "")
    assert key(frog % ", rho: 1") == key(frog % ", rho: 1.0") != key(frog % "")
