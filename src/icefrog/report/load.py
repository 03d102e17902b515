"""Where the logs lie: the folder of a simulation, one policy's folder in it, or the home of a live controller."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from icefrog.errors import UserError
from icefrog.eventlog import read_log
from icefrog.report.html import write_report
from icefrog.report.metrics import summarise
from icefrog.report.record import RunRecord, fold
from icefrog.report.tables import SCHEMA_VERSION, summary_document, write_jobs_csv, write_summary
from icefrog.spec import ClusterSpec
from icefrog.state import IllegalTransitionError

SUMMARY, EVENTS, LIVE_EVENTS, CLUSTER = "summary.json", "events.jsonl", "events.db", "cluster.json"
_HINT = "give the --out folder of `icefrog simulate`, or the home folder of a controller"


@dataclass(frozen=True, slots=True)
class LoadedRuns:
    """The runs of a folder by policy, and their ``summary.json`` document worked out anew."""

    runs: Mapping[str, RunRecord]
    summary: Mapping[str, Any]
    folders: Mapping[str, Path]
    """Where each run's ``jobs.csv`` belongs."""
    whole: bool
    """Whether ``summary`` is the folder's own; not if it is one policy of several."""


def load_dir(path: Path) -> LoadedRuns:
    """Find and fold the logs of ``path``.

    Raises:
        UserError: there is nothing to report in the folder, or what is there is damaged.
    """
    if not path.is_dir():
        raise UserError(f"there is no folder {path}", _HINT)
    if (path / CLUSTER).is_file():
        return _live(path)
    if (path / EVENTS).is_file() and (path.parent / SUMMARY).is_file():
        return _simulation(path.parent, only=path.name)
    if (path / SUMMARY).is_file():
        return _simulation(path)
    raise UserError(f"{path} holds neither {SUMMARY} nor {CLUSTER}", _HINT)


def report_dir(path: Path) -> Path:
    """Write ``report.html``, ``summary.json`` and ``jobs.csv`` from the logs of ``path``; returns the page's path.

    Raises:
        UserError: there is nothing to report, or the folder cannot be written to.
    """
    loaded = load_dir(path)
    page = path / "report.html"
    try:
        if loaded.whole:
            write_summary(path / SUMMARY, loaded.summary)
        for policy, run in loaded.runs.items():
            write_jobs_csv(run, loaded.folders[policy] / "jobs.csv")
        write_report(page, loaded.runs, loaded.summary)
    except OSError as error:
        raise UserError(f"cannot write the report to {path}: {error.strerror}", "check the folder's rights") from error
    return page


def _live(path: Path) -> LoadedRuns:
    log = next((path / name for name in (LIVE_EVENTS, EVENTS) if (path / name).is_file()), None)
    if log is None:
        raise UserError(f"{path} has no event log yet ({LIVE_EVENTS})", "start the controller: icefrog up")
    settings = _json(path / CLUSTER)
    cluster = _cluster(settings.get("cluster", settings), path / CLUSTER)
    run = _fold(log, cluster, live=True)
    policy = run.policy or str(settings.get("policy", "none"))
    trace = {"source": "Live cluster"}
    if run.live:
        trace["first submission"] = datetime.fromtimestamp(run.origin_s, UTC).isoformat(" ", "seconds")
    summary = summary_document(trace, cluster, [summarise(run, policy=policy)])
    return LoadedRuns({policy: run}, summary, {policy: path}, whole=True)


def _simulation(path: Path, only: str | None = None) -> LoadedRuns:
    document = _json(path / SUMMARY)
    if document.get("schema", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise UserError(
            f"{path / SUMMARY}: schema {document['schema']!r} is not {SCHEMA_VERSION}", "run the simulation again"
        )
    cluster = _cluster(document.get("cluster"), path / SUMMARY)
    runs: dict[str, RunRecord] = {}
    rows: list[dict[str, Any]] = []
    for old in _runs(document, path / SUMMARY):
        policy = old["policy"]
        if only not in (None, policy):
            continue
        run = _fold(path / policy / EVENTS, cluster, live=False)
        if old.get("jobs") and not run.jobs:
            raise UserError(f"{path / policy / EVENTS} is empty", "restore it from a copy, or run the simulation again")
        row = summarise(  # with what the log does not know
            run,
            policy=policy,
            seed=old.get("seed", 0),
            wall_s=old.get("wall_s"),
            decision_s=old.get("decision_s"),
            restart_s=_seconds(old, "restart_s", path / SUMMARY),
        )
        rows.append({**row, **{key: value for key, value in old.items() if key not in row}})
        runs[policy] = run
    if only is not None and not runs:
        raise UserError(f"{path / SUMMARY} lists no run of {only}", "run the simulation again")
    summary = {**document, **summary_document(document.get("trace") or {}, cluster, rows)}
    summary["cluster"] = {**document["cluster"], **summary["cluster"]}
    return LoadedRuns(runs, summary, {policy: path / policy for policy in runs}, whole=only is None)


def _runs(document: Mapping[str, Any], where: Path) -> list[dict[str, Any]]:
    runs = document.get("runs")
    names = [run.get("policy") for run in runs if isinstance(run, dict)] if isinstance(runs, list) else []
    # A policy names a folder below this one, nothing else.
    if not isinstance(runs, list) or not all(isinstance(n, str) and n and Path(n).name == n for n in names):
        raise UserError(f"{where}: 'runs' is not a list of runs with a policy each", "run the simulation again")
    if len(set(names)) != len(runs):
        raise UserError(f"{where}: a policy is listed twice", "run the simulation again, each policy once")
    return runs


def _seconds(run: Mapping[str, Any], key: str, where: Path) -> float:
    value = run.get(key, 0.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise UserError(f"{where}: {key} is {value!r}, not a number of seconds", "run the simulation again")
    return float(value)


def _fold(log: Path, cluster: ClusterSpec, *, live: bool) -> RunRecord:
    records = read_log(log)
    try:
        return fold(records, cluster, live=live)
    except IllegalTransitionError as error:
        raise UserError(f"{log} is not a log that can be replayed: {error}", "restore it from a copy") from error


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"cannot read {path}: {error}", "restore it from a copy, or run the simulation again"
        ) from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object", "restore it from a copy, or run the simulation again")
    return value


def _cluster(value: Any, where: Path) -> ClusterSpec:
    """From a bare specification, or from ``summary.json``, which adds a label and a sum."""
    nodes = value.get("nodes") if isinstance(value, dict) else None
    try:
        return ClusterSpec.model_validate({"nodes": nodes})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where_in = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"{where}: the cluster cannot be read ({where_in}: {first['msg']})", "restore the file from a copy"
        ) from error
