"""Running one cell: the only part of an experiment that decides numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from icefrog.executors.sim.failures import Outages
from icefrog.executors.sim.truth import WorldConfig
from icefrog.experiment.cells import Cell
from icefrog.experiment.spec import OUTAGE_SETTINGS, RUN_SETTINGS
from icefrog.replay import FreezeLimit, TraceChoice, Workload, prepare, run_policy
from icefrog.report import RunRecord
from icefrog.report.fairness import finish_time_rho
from icefrog.simulate import Progress, SimSettings, icefrog_scenario
from icefrog.spec import ClusterSpec

GROUP_LABELS = ("class", "freezing")
"""Labels of jobs by which results are broken down."""


def run_cell(cell: Cell, progress: Callable[[Progress], None] | None = None) -> dict[str, Any]:
    """Simulate; return ``{"summary": ..., "jobs": {column: [...]}, "trace": ...}`` as JSON.

    ``summary`` is the entry of ``summary.json``, ``jobs`` what statistics over jobs need, in order of submission.

    Raises:
        UserError: the trace cannot be read, or no job fits the cluster.
    """
    here = cell.condition
    limit = FreezeLimit(here.restrict_freezing, here.restricted_max_fraction) if here.restrict_freezing else None
    entry = cell.trace
    choice = TraceChoice(
        source=entry.path,
        format=entry.format,
        load=here.load,
        start=entry.start,
        hours=entry.hours,
        num_jobs=entry.jobs,
        seed=cell.seed,
        day_hours=entry.day_hours,
        pace=here.pace,
    )
    workload = _prepared(choice, here.cluster.model_dump_json(), limit)
    settings = sim_settings(cell)
    scenario = icefrog_scenario(workload.specs, workload.profiles, workload.curves, here.cluster, settings)
    run, summary = run_policy(scenario, cell.variant.policy, cell.variant.options, settings, progress=progress)
    return {"summary": summary, "jobs": job_columns(run), "trace": dict(workload.trace)}


def sim_settings(cell: Cell) -> SimSettings:
    """The settings of the simulation; what the cell does not set stays at its default."""
    chosen = cell.condition.world
    # A count stays a whole number, although files give numbers.
    world: dict[str, Any] = {
        key: type(getattr(WorldConfig(), key))(value)
        for key, value in chosen.items()
        if key not in (*RUN_SETTINGS, *OUTAGE_SETTINGS)
    }
    run: dict[str, Any] = {key: value for key, value in chosen.items() if key in RUN_SETTINGS}
    mtbf_h, repair_h = chosen.get("node_mtbf_h", 0.0), chosen.get("node_repair_h", Outages().node_repair_h)
    outages = Outages(node_mtbf_h=mtbf_h, node_repair_h=repair_h) if mtbf_h > 0 else Outages()
    return replace(SimSettings(seed=cell.seed, world=replace(WorldConfig(), **world), outages=outages), **run)


@functools.lru_cache(maxsize=2)
def _prepared(choice: TraceChoice, cluster: str, limit: FreezeLimit | None) -> Workload:
    """The variants of a condition run the same jobs, one after the other: they are made once."""
    return prepare(choice, ClusterSpec.model_validate_json(cluster), limit)


def job_columns(run: RunRecord) -> dict[str, list[Any]]:
    """One list a column, an entry a job in order of submission; None where a job has no such value."""
    columns: dict[str, list[Any]] = {
        "job_id": [job.job_id for job in run.jobs],
        "status": [job.status for job in run.jobs],
        "jct_s": [_short(job.jct_s) for job in run.jobs],
        "queue_s": [None if job.jct_s is None else _short(job.queue_s) for job in run.jobs],
        "rho": [_short(value) for value in finish_time_rho(run)],
    }
    for label in GROUP_LABELS:
        values = [job.labels.get(label) for job in run.jobs]
        if any(value is not None for value in values):
            columns[label] = values
    return columns


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.9g}")


def without_clock(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result without what the machine's speed decides."""
    return {**result, "summary": {**result["summary"], "wall_s": None, "decision_s": None}}
