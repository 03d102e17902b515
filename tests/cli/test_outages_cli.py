"""Nodes that leave service and clusters of several GPU types, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from icefrog.cli.main import run

SMALL = ["simulate", "--trace", "synth:philly-120", "--jobs", "8", "--policy", "fifo", "--json"]


def simulated(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    assert run([*SMALL, *argv]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert run([*SMALL, *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line.split(":")[0] for line in captured.err.splitlines()] == ["error", "hint"]
    return captured.err


def test_failing_nodes_are_counted_and_told(capsys, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    document = simulated(capsys, "--cluster", "4x4", "--node-mtbf", "10", "--node-repair", "2", "--out", out)
    row = document["runs"][0]
    assert row["node_outages"] > 0
    assert row["gpu_utilization_in_service"] > row["gpu_utilization"]
    assert (document["trace"]["node_mtbf_h"], document["trace"]["node_repair_h"]) == (10.0, 2.0)
    assert run(["report", out]) == 0  # from the log alone
    again = json.loads((tmp_path / "out" / "summary.json").read_text())["runs"][0]
    assert {key: again[key] for key in ("node_outages", "gpu_utilization_in_service")} == {
        key: row[key] for key in ("node_outages", "gpu_utilization_in_service")
    }
    assert "in service" in (tmp_path / "out" / "report.html").read_text()


def test_a_capacity_file_is_followed(capsys, tmp_path: Path) -> None:
    path = tmp_path / "vcs.csv"
    path.write_text("date,vcA,total\n2020-04-01,16,32\n2020-04-02,8,32\n2020-04-03,16,32\n")
    document = simulated(capsys, "--cluster", "4x4", "--capacity", f"{path}:vcA")
    assert document["trace"]["capacity"] == "vcs.csv:vcA"
    assert document["runs"][0]["node_outages"] in (0, 2)
    assert "no column 'vcB'" in refused(capsys, "--cluster", "4x4", "--capacity", f"{path}:vcB")
    assert "the cluster has 16" in refused(capsys, "--cluster", "4x4", "--capacity", str(path))
    assert "No such file" in refused(capsys, "--cluster", "4x4", "--capacity", str(tmp_path / "none.csv"))


def test_outages_that_make_no_sense_are_refused(capsys) -> None:
    assert "nodes do not fail" in refused(capsys, "--cluster", "4x4", "--node-repair", "3")
    for wrong in ("0", "-1", "nan", "inf"):
        assert run([*SMALL, "--cluster", "4x4", "--node-mtbf", wrong]) == 2
        capsys.readouterr()


def test_a_cluster_of_two_gpu_types(capsys) -> None:
    document = simulated(capsys, "--cluster", "2x4:a100+2x4:rtx")
    assert document["cluster"]["label"] == "2x4:a100+2x4:rtx"
    assert document["runs"][0]["completed"] == 8
    assert "'h100-80gb'" in refused(capsys, "--cluster", "2x4:h100-80gb+2x4:rtx")


def test_the_pollux_world_has_one_gpu_type(capsys) -> None:
    err = refused(capsys, "--world", "pollux", "--cluster", "2x4:a100+2x4:t4")
    assert "one GPU type, not a100, t4" in err
