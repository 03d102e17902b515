"""Statistics of a trace: in JSON, in a terminal, on a page."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from logs import HELIOS, write_log

from icefrog.cli.main import run
from icefrog.traces import ReadReport, Trace, TraceJob, describe, describe_text, read_trace, synth_names, write_text
from icefrog.traces.describe import groups, hours_of_day, per_hour, quantiles
from icefrog.traces.drawing import bar, gpu_range
from icefrog.traces.page import render


def trace_of(*jobs: TraceJob, start: datetime | None = None) -> Trace:
    return Trace(jobs, ReadReport(len(jobs), len(jobs)), "test", start)


SMALL = trace_of(
    TraceJob("a", 0.0, 1, 60.0, "ann", "v1", state="completed", queue_s=5.0),
    TraceJob("b", 1800.0, 8, 3600.0, "bob", "v1", state="failed"),
    TraceJob("c", 7500.0, 1, 7200.0, "ann", "v2", state="completed", gpu_demand=0.5, deadline_s=9000.0),
    start=datetime(2024, 1, 1, 22, 30),
)


def test_quantiles_and_hours_by_hand() -> None:
    facts = describe(SMALL)
    assert facts["submissions_per_hour"]["p50"] == 1.0  # 2, 0, 1
    assert facts["submissions_per_hour"]["p100"] == 2.0
    assert facts["duration_s"]["p25"] == pytest.approx((60 + 3600) / 2)
    assert facts["gpu_hours"] == pytest.approx(1 / 60 + 8 + 1)  # the third asks for half a GPU
    assert facts["queue_s"] == quantiles(np.array([5.0]))
    assert facts["jobs_by_hour_of_day"][22:] == [1, 1]  # 22:30, 23:00, and 00:35 of the next day
    assert facts["jobs_by_hour_of_day"][0] == 1
    assert facts["jobs_by_duration"]["1-10 min"] == 1
    assert (facts["users"], facts["vcs"], facts["with_deadline"]) == (2, 2, 1)
    assert facts["by"]["vc"]["v1"] == {"jobs": 2, "gpu_hours": pytest.approx(8 + 1 / 60), "p50_duration_s": 1830.0}
    assert list(facts["by"]["vc"]) == ["v1", "v2"]
    assert set(facts["by"]) == {"vc", "state"}  # the log tells nothing of GPU types, kinds or applications
    json.dumps(facts, allow_nan=False)


def test_of_nothing_there_is_nothing() -> None:
    assert quantiles(np.zeros(0)) == {}
    assert len(per_hour(np.zeros(0))) == 0
    assert hours_of_day(np.array([1.0]), None) is None
    assert describe(trace_of())["jobs"] == 0


def test_many_groups_are_summed_up() -> None:
    jobs = [TraceJob(f"j{i}", 0.0, 1, 3600.0 * (i + 1), vc=f"v{i}") for i in range(30)]
    found = groups(jobs, lambda job: job.vc)
    assert len(found) == 21
    assert found["(others)"]["jobs"] == 10
    assert sum(group["gpu_hours"] for group in found.values()) == pytest.approx(sum(range(1, 31)))


def test_bars_show_what_is_not_nothing() -> None:
    assert bar(1.0, 10) == "█" * 10
    assert bar(0.5, 10) == "█" * 5
    assert bar(0.0, 10) == ""
    assert bar(1e-9, 10) == "▏"
    assert [gpu_range(power) for power in range(5)] == ["1", "2", "3-4", "5-8", "9-16"]


def test_many_gpu_counts_are_drawn_in_powers_of_two() -> None:
    text = describe_text(trace_of(*(TraceJob(f"j{n}", 0.0, n, 60.0) for n in range(1, 17))))
    assert "5-8" in text
    assert "9-16" in text


def test_text_names_rows_quantiles_and_groups(tmp_path: Path) -> None:
    text = describe_text(read_trace(write_log(tmp_path, "helios")))
    for part in (
        "8 rows read, 2 kept",
        "dropped 1: unreadable gpu_num (first: line 7, 'one')",
        "jobs by GPUs",
        "submissions by hour of the day",
        "GPU hours by VC",
        "GPU hours by state",
        "node_fail",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 110


def test_labels_of_a_log_cannot_do_anything_to_a_terminal_or_a_page(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(HELIOS.replace("vcA", "\x1b[31m[red]</script><b>x"))
    trace = read_trace(path)
    assert "\x1b" not in describe_text(trace)
    assert "[red]</script><b>x" in describe_text(trace)
    page = render(trace)
    assert "</script><b>" not in page
    assert "&lt;/script&gt;&lt;b&gt;x" in page


def test_page_needs_no_network_and_is_the_same_each_time(tmp_path: Path) -> None:
    page = render(SMALL)
    assert page == render(SMALL)
    for part in ("IceFrog trace", "By VC", "By state", "submissions an hour", 'data-figure="hours"'):
        assert part in page
    head = page.split("<script>")[0]
    assert "http://" not in head
    assert "https://" not in head
    data = json.loads(page.split('<script id="data" type="application/json">')[1].split("</script>")[0])
    assert set(data) == {"submissions", "hours", "duration", "gpu_hours", "gpus"}
    assert data["submissions"]["data"][0]["y"] == [2, 0, 1]
    by_weight = data["gpu_hours"]["data"][1]
    assert by_weight["y"][-1] == 100.0


def test_a_trace_of_one_job_can_be_drawn() -> None:
    one = trace_of(TraceJob("a", 5.0, 3, 0.5))
    assert "1 jobs" in describe_text(one)
    assert "3-4" in render(one)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_log(tmp_path, "slurm", packed=True)
    page, own = tmp_path / "new" / "page.html", tmp_path / "own.csv"
    assert run(["trace", "describe", str(log), "--out", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "14 rows read, 4 kept" in shown
    assert f"page: {page}" in shown
    assert "<!doctype html>" in page.read_text()
    assert run(["trace", "describe", str(log), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["rows"]["read"] == facts["rows"]["kept"] + sum(facts["rows"]["dropped"].values())
    assert run(["trace", "convert", str(log), str(own)]) == 0
    assert read_trace(own).jobs == read_trace(log).jobs
    capsys.readouterr()
    assert run(["trace", "convert", str(log), "-"]) == 0
    assert capsys.readouterr().out == write_text(read_trace(log))
    assert run(["trace", "formats"]) == 0
    shown = capsys.readouterr().out
    assert "slurm" in shown
    assert all(f"synth:{name}" in shown for name in synth_names())
    assert run(["trace", "describe", str(log), "--out", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err
