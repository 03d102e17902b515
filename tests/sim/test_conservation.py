"""The audit of an event log: every policy's run keeps the laws, and every law notices a log that breaks it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from worlds import workload

from icefrog import events as ev
from icefrog.executors.sim import WorldConfig
from icefrog.executors.sim.failures import Outages
from icefrog.policies import policy_names
from icefrog.report.metrics import job_row
from icefrog.report.record import fold
from icefrog.simulate import RunResult, SimSettings, icefrog_scenario, simulate
from icefrog.testing.builders import cluster
from icefrog.testing.conservation import Audit, audit

NODES = cluster(2, 4)
WORK = workload(25, span_s=7200.0)
Lines = list[dict[str, Any]]


@cache
def run(policy: str, **world: float) -> RunResult:
    settings = SimSettings(world=WorldConfig(**world))  # type: ignore[arg-type]
    scenario = icefrog_scenario(WORK.specs, WORK.profiles, WORK.curves, NODES, settings)
    return simulate(scenario, policy, {"batch": "fixed"} if policy == "icefrog" else None, settings)


def lines(result: RunResult) -> Lines:
    return [json.loads(ev.encode(record)) for record in result.records]


def audited(found: Lines) -> Audit:
    return audit(found, NODES.gpus_per_node, restart_s=60.0)


@pytest.mark.parametrize("policy", policy_names())
def test_what_is_held_waited_for_and_reported_adds_up(policy: str) -> None:
    result = run(policy)
    found = audited(lines(result))
    assert found.broken == []
    assert found.most_in_use <= NODES.num_gpus
    assert found.gpu_s == pytest.approx(found.in_use_gpu_s, rel=1e-9)
    told = {job.job_id: job_row(job) for job in fold(result.records, NODES).jobs}
    assert told.keys() == found.jobs.keys() == {spec.job_id for spec in WORK.specs}
    for job_id, job in found.jobs.items():
        row = told[job_id]
        assert row["gpu_s"] == pytest.approx(job.gpu_s, abs=1e-3)
        assert row["restarts"] == job.starts - 1
        assert row["queue_s"] + job.held_s == pytest.approx(row["jct_s"], abs=1e-3)
        assert job.work_gap_s is None or job.work_gap_s < 1e-3
        assert job.gap is None or job.gap < 1e-4
        # A job that freezes counts by what it has seen of its gradients, 5 % off each time it looks.
        freezes = row["max_frozen_layers"] > 0
        assert job.counted is None or job.counted == pytest.approx(job.promised, rel=0.05 if freezes else 1e-4)


def test_the_laws_are_not_kept_for_want_of_cases() -> None:
    """Jobs that ran as they were logged, restarted ones among them; sharers; reports that were held against a promise."""
    as_logged = [job for job in audited(lines(run("srtf"))).jobs.values() if job.work_gap_s is not None]
    assert len(as_logged) == len(WORK.specs)
    assert any(job.starts > 1 for job in as_logged)
    icefrog = audited(lines(run("icefrog")))
    assert icefrog.most_on_a_gpu == 2
    assert any(job.gap for job in icefrog.jobs.values())


def test_crashes_and_lost_nodes_keep_the_rules() -> None:
    crashing = audited(lines(run("fifo", failures_per_gpu_h=0.5)))
    assert crashing.broken == []
    assert any(job.starts > 1 for job in crashing.jobs.values())
    settings = SimSettings(outages=Outages(node_mtbf_h=1.0, node_repair_h=0.2))
    scenario = icefrog_scenario(WORK.specs, WORK.profiles, WORK.curves, NODES, settings)
    assert audited(lines(simulate(scenario, "lucid", None, settings))).broken == []


def first(found: Lines, kind: str) -> int:
    return next(index for index, line in enumerate(found) if line["kind"] == kind)


def twice(kind: str) -> Callable[[Lines], None]:
    def change(found: Lines) -> None:
        index = first(found, kind)
        found.insert(index, found[index])

    return change


def without(kind: str) -> Callable[[Lines], None]:
    def change(found: Lines) -> None:
        del found[first(found, kind)]

    return change


def crowded(found: Lines) -> None:
    for line in found:
        if line["kind"] == "start":
            line["gpus"] = [[0, device] for device in range(len(line["gpus"]))]


def fewer(found: Lines) -> None:
    line = next(line for line in found if line["kind"] == "start" and len(line["gpus"]) > 1)
    line["gpus"] = line["gpus"][1:]


def elsewhere(found: Lines) -> None:
    line = found[first(found, "start")]
    line["gpus"] = [[7, device] for _, device in line["gpus"]]


def on_a_lost_node(found: Lines) -> None:
    index = first(found, "start")
    found.insert(index, {"kind": "node_down", "time_s": found[index]["time_s"], "node": found[index]["gpus"][0][0]})


def kept_on_a_lost_node(found: Lines) -> None:
    index = first(found, "job_started")
    later = next(i for i, line in enumerate(found) if line["time_s"] > found[index]["time_s"])
    start = next(line for line in found if line["kind"] == "start" and line["job_id"] == found[index]["job_id"])
    found.insert(later, {"kind": "node_down", "time_s": found[later]["time_s"] - 1e-3, "node": start["gpus"][0][0]})


def spread_out(found: Lines) -> None:
    line = next(line for line in found if line["kind"] == "start" and 1 < len(line["gpus"]) <= 4)
    line["gpus"] = [[1 - line["gpus"][0][0], 3], *line["gpus"][1:]]


def of_another_attempt(kind: str) -> Callable[[Lines], None]:
    def change(found: Lines) -> None:
        found[first(found, kind)]["attempt"] += 1

    return change


def counting_back(found: Lines) -> None:
    reports = [line for line in found if line["kind"] == "progress_reported"]
    last = next(line for line in reversed(reports) if line["job_id"] == reports[0]["job_id"])
    last["effective_samples"] = reports[0]["effective_samples"] - 1.0


def back_in_time(found: Lines) -> None:
    found[-1]["time_s"] = 0.0


def test_a_partner_may_be_alone_before_the_other_has_left_but_not_for_a_second() -> None:
    found = lines(run("icefrog"))
    index, line = next(
        (i, one) for i, one in enumerate(found) if one["kind"] == "regrant" and not one["grant"]["shared"]
    )
    assert audited(found).broken == []
    early = {**line, "time_s": found[index]["time_s"] - 1e-3}
    earlier = [one for one in found[:index] if one["time_s"] < early["time_s"]]
    later = [one for one in found if one["time_s"] >= early["time_s"] and one is not line]
    assert any("is held by" in what for what in audited([*earlier, early, *later]).broken)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (twice("job_submitted"), "submitted twice"),
        (twice("job_finished"), "which has ended"),
        (without("job_submitted"), "is not known"),
        (without("start"), "without a command"),
        (twice("job_started"), "while it runs"),
        (without("job_started"), "holds no GPU"),
        (without("job_finished"), "never ends"),
        (crowded, "is held by"),
        (fewer, "granted"),
        (elsewhere, "not there"),
        (on_a_lost_node, "not there"),
        (back_in_time, "time goes back"),
        (kept_on_a_lost_node, "out of service"),
        (spread_out, "granted as 1 nodes"),
        (of_another_attempt("job_finished"), "leaves as attempt 2"),
        (of_another_attempt("progress_reported"), "reports for attempt"),
        (counting_back, "effective samples after"),
    ],
)
def test_a_log_that_breaks_a_law_is_noticed(change: Callable[[Lines], None], message: str) -> None:
    found = lines(run("optimus" if change is counting_back or "reports" in message else "fifo"))
    change(found)
    assert any(message in what for what in audited(found).broken)


def test_wrong_books_are_noticed() -> None:
    """A job that ends early has not done its work; one that counts other samples than it trained shows in the reports."""
    found = lines(run("srtf"))
    end = found[first(found, "job_finished")]
    end["time_s"] -= 5.0
    job = audited(sorted(found, key=lambda line: line["time_s"])).jobs[end["job_id"]]
    assert job.work_gap_s == pytest.approx(5.0)
    found = lines(run("optimus"))
    report = [line for line in found if line["kind"] == "progress_reported"][40]
    report["effective_samples"] *= 1.5
    assert (audited(found).jobs[report["job_id"]].gap or 0.0) > 1e-3


@pytest.mark.parametrize("resizing", [False, True])
def test_a_cancelled_job_ends_when_it_has_left(resizing: bool) -> None:
    found = lines(run("fifo"))
    index = first(found, "job_finished")
    end = found[index]
    start = next(line for line in found if line["kind"] == "start" and line["job_id"] == end["job_id"])
    resize = {**start, "kind": "resize", "time_s": end["time_s"], "attempt": 2}
    asked = {"kind": "cancel_requested", "time_s": end["time_s"], "job_id": end["job_id"]}
    asked_to = [resize, asked] if resizing else [asked]
    found[index : index + 1] = [*asked_to, {**asked, "kind": "stop"}, {**end, "kind": "job_stopped"}]
    job = audited(found).jobs[end["job_id"]]
    assert job.finish_s == end["time_s"]
    assert audited(found).broken == []
