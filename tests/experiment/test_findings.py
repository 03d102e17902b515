"""Findings worked out by hand from made-up results; tables and pages that show them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from experiment_files import SMALL, load, result
from rich.console import Console

from icefrog.experiment.aggregate import aggregate
from icefrog.experiment.curves import curves
from icefrog.experiment.figures import sensitivity
from icefrog.experiment.files import cells_frame, document_json, write_files
from icefrog.experiment.page import render_page
from icefrog.experiment.sweep import Planned, Sweep
from icefrog.experiment.table import render

JCT_S = {
    ("fifo", 0): [100.0, 300.0],
    ("fifo", 1): [50.0, 150.0],
    ("srtf", 0): [50.0, 150.0],
    ("srtf", 1): [60.0, 140.0],
}


def findings(folder: Path, text: str = SMALL, results: dict[tuple[str, int], Any] | None = None) -> dict[str, Any]:
    what = load(folder, text)
    made = {key: result(list(value)) for key, value in JCT_S.items()} if results is None else results
    planned = [Planned(cell, f"{i}") for i, cell in enumerate(what.cells())]
    there = {one.key: made[which] for one in planned if (which := (one.cell.variant.name, one.cell.seed)) in made}
    return aggregate(what, planned, Sweep(there, {}, 0))


def test_by_hand(tmp_path: Path) -> None:
    document = findings(tmp_path)
    (condition,) = document["conditions"]
    fifo, srtf = condition["rows"]
    jct = fifo["measures"]["avg_jct_s"]
    half = 12.7062047364 * math.sqrt(5000) / math.sqrt(2)  # t(1, 97.5 %) x deviation of (200, 100) / sqrt(2)
    assert (jct["mean"], jct["values"]) == (150.0, [200.0, 100.0])
    assert (jct["low"], jct["high"]) == pytest.approx((150 - half, 150 + half))
    versus = srtf["versus_base"]["avg_jct_s"]
    assert versus["ratio"] == pytest.approx(150 / 100)
    assert (versus["wins"], versus["losses"], versus["ties"], versus["pairs"], versus["low"]) == (1, 0, 1, 2, None)
    assert srtf["by_trace"] == {"philly": {"ratio": pytest.approx(1.5), "wins": 1, "losses": 0}}
    assert condition["pairs"]["fifo"]["srtf"]["ratio"] == pytest.approx(100 / 150)
    # The small jobs (the first of each pair): fifo 100 and 50, srtf 50 and 60.
    small = srtf["groups"]["class"]["small"]
    assert (small["mean"], small["versus_base"]["ratio"], small["versus_base"]["wins"]) == (
        55.0,
        pytest.approx(75 / 55),
        1,
    )
    assert srtf["cdf"] == [50, 60, 140, 150]
    assert document["cells"] == {"all": 4, "done": 4, "failed": 0}
    assert document["cpu_s"] == 2.0


def test_missing_cells_are_left_out_and_pairs_stay_pairs(tmp_path: Path) -> None:
    made = {key: result(list(JCT_S[key])) for key in (("fifo", 0), ("fifo", 1), ("srtf", 1))}
    document = findings(tmp_path, results=made)
    fifo, srtf = document["conditions"][0]["rows"]
    assert (fifo["replicates"], srtf["replicates"]) == (2, 1)
    assert srtf["versus_base"]["avg_jct_s"]["ratio"] == pytest.approx(100 / 100)  # seed 1 against seed 1
    assert document["cells"] == {"all": 4, "done": 3, "failed": 0}
    only_srtf = findings(tmp_path, results={("srtf", 0): made["srtf", 1]})
    assert "versus_base" not in only_srtf["conditions"][0]["rows"][0]


def test_lost_jobs_are_told(tmp_path: Path) -> None:
    made: dict[tuple[str, int], Any] = {key: result([*value, None]) for key, value in JCT_S.items()}
    made["srtf", 0]["summary"]["stalled"] = "nobody can run"
    document = findings(tmp_path, results=made)
    text = shown(document)
    assert "fifo: 2 unfinished of 6 jobs." in text
    assert "srtf: 1 of 2 runs stalled." in text
    assert "2 unfinished of 6 jobs" in render_page(document)


def shown(document: dict[str, Any]) -> str:
    console = Console(width=220, record=True)
    with console.capture() as captured:
        console.print(render(document))
    return captured.get()


def test_the_table(tmp_path: Path) -> None:
    text = shown(findings(tmp_path))
    line = next(line for line in text.splitlines() if "srtf" in line)
    cells = [cell.strip() for cell in line.split("│")[1:-1]]
    assert cells[:6] == ["srtf", "1 min 40 s", "1 min 40 s … 1 min 40 s", "1.50×", "", "1 of 2"]
    assert "condition" not in text


def test_files_are_for_programs(tmp_path: Path) -> None:
    what = load(tmp_path)
    planned = [Planned(cell, f"{i}") for i, cell in enumerate(what.cells())]
    sweep = Sweep({one.key: result(list(JCT_S[one.cell.variant.name, one.cell.seed])) for one in planned}, {}, 0)
    document = aggregate(what, planned, sweep)
    write_files(tmp_path, document, planned, sweep)
    assert json.loads((tmp_path / "experiment.json").read_text()) == json.loads(document_json(document))
    frame = cells_frame(planned, sweep)
    assert frame.height == 4
    assert frame["variant"].to_list() == ["fifo", "srtf", "fifo", "srtf"]
    assert frame["avg_jct_s"].to_list() == [200, 100, 100, 100]
    page = (tmp_path / "report.html").read_text()
    assert page == render_page(document)
    assert not {"<script src", '<link rel="stylesheet'} & set(page.split("\n"))
    assert 'src="http' not in page.split("plotly.js")[0]


LOADS = SMALL + "load: [1, 2]\n"
OPTIONS = SMALL.replace("[fifo, srtf]", "\n  - fifo\n  - {policy: icefrog, set: {rho: [0, 0.5, 1]}}")


def test_curves_over_a_setting(tmp_path: Path) -> None:
    document = findings(tmp_path, LOADS)
    found = curves(document)
    assert found is not None
    assert found.axis == "load"
    assert [(line.name, [x for x, _ in line.points], line.flat) for line in found.lines] == [
        ("fifo", [1.0, 2.0], False),
        ("srtf", [1.0, 2.0], False),
    ]
    page = render_page(document)
    assert 'data-curve="ratio"' in page
    assert 'data-curve="avg_jct_s"' in page


def test_curves_over_an_option(tmp_path: Path) -> None:
    names = ("fifo", "icefrog[rho=0]", "icefrog[rho=0.5]", "icefrog[rho=1]")
    document = findings(tmp_path, OPTIONS, {(name, seed): result([10.0, 20.0]) for name in names for seed in (0, 1)})
    found = curves(document)
    assert found is not None
    assert found.axis == "rho"
    assert [(line.name, [x for x, _ in line.points], line.flat) for line in found.lines] == [
        ("fifo", [0.0, 1.0], True),
        ("icefrog", [0.0, 0.5, 1.0], False),
    ]
    assert 'data-curve="ratio"' in render_page(document)


def made(*jct_s: float) -> dict[int, Any]:
    return {seed: result([value]) for seed, value in enumerate(jct_s)}


def test_a_setting_of_the_world_is_compared_with_its_default(tmp_path: Path) -> None:
    """Noise 0.05 is the default. Of fifo's replicates at 0.5 one is missing: pairs stay pairs."""
    text = SMALL.replace("seeds: 2", "seeds: 3") + "world: {noise: [0, 0.05, 0.5]}\n"
    what = load(tmp_path, text)
    jct_s = {"noise=0": made(80, 120, 100), "noise=0.05": made(100, 150, 110), "noise=0.5": made(150, 200)}
    cells = [Planned(cell, f"{i}") for i, cell in enumerate(what.cells())]
    there = {
        one.key: jct_s[one.cell.condition.label][one.cell.seed]
        for one in cells
        if one.cell.variant.name == "fifo" and one.cell.seed in jct_s[one.cell.condition.label]
    }
    document = aggregate(what, cells, Sweep(there, {}, 0))
    outcomes = [condition["rows"][0]["sensitivity"]["noise"] for condition in document["conditions"]]
    assert [one["at"] for one in outcomes] == [0.05] * 3
    assert [one["pairs"] for one in outcomes] == [3, 3, 2]
    assert [one["ratio"] for one in outcomes] == pytest.approx([300 / 360, 1.0, 350 / 250])
    assert outcomes[0]["low"] < 300 / 360 < outcomes[0]["high"] < 1.0  # all three end sooner
    assert outcomes[2]["low"] is None  # two replicates
    found = curves(document)
    assert found is not None
    drawn = sensitivity(found)
    assert drawn is not None
    (line,) = drawn["data"]
    assert (line["name"], line["x"]) == ("fifo", [0.0, 0.05, 0.5])
    assert line["y"] == pytest.approx([300 / 360, 1.0, 350 / 250])
    assert line["error_y"]["array"][0] == pytest.approx(outcomes[0]["high"] - 300 / 360)
    assert drawn["layout"]["yaxis"]["title"]["text"] == "mean JCT / mean JCT at noise=0.05"
    assert 'data-curve="sensitivity"' in render_page(document)


def test_a_listed_option_is_compared_with_its_default_and_other_jobs_with_nothing(tmp_path: Path) -> None:
    names = ("fifo", "icefrog[rho=0]", "icefrog[rho=0.5]", "icefrog[rho=1]")
    numbers = dict(zip(names, (70.0, 40.0, 20.0, 30.0), strict=True))
    results = {(name, seed): result([numbers[name]]) for name in names for seed in (0, 1)}
    (condition,) = findings(tmp_path, OPTIONS, results)["conditions"]
    assert [row["sensitivity"].get("rho", {}).get("ratio") for row in condition["rows"]] == [None, 2.0, 1.0, 1.5]
    assert condition["rows"][1]["sensitivity"]["rho"]["at"] == 0.5
    found = curves(findings(tmp_path, LOADS))
    assert found is not None
    assert sensitivity(found) is None  # another load is other jobs


def test_nothing_varied_makes_no_curve(tmp_path: Path) -> None:
    assert curves(findings(tmp_path)) is None


def test_an_experiment_without_a_finished_cell(tmp_path: Path) -> None:
    document = findings(tmp_path, results={})
    assert "No cell is finished yet" in render_page(document)
    assert shown(document)


def test_what_people_name_cannot_break_the_page(tmp_path: Path) -> None:
    text = SMALL.replace("[fifo, srtf]", "[{name: '</script><b>', policy: fifo}, srtf]") + "about: '<i>&'\n"
    page = render_page(
        findings(tmp_path, text, {("</script><b>", 0): result([1.0, 2.0]), ("srtf", 0): result([1.0, 2.0])})
    )
    assert "</script><b>" not in page
    assert "<i>&" not in page
