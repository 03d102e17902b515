"""From cells to an experiment's findings: one JSON document, behind the table, the report and ``experiment.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np

from icefrog.experiment.cells import Condition, Experiment, Variant
from icefrog.experiment.sensitivity import sensitivities
from icefrog.experiment.statistics import Comparison, Interval, compare, mean_interval
from icefrog.experiment.sweep import Planned, Result, Sweep

Document: TypeAlias = dict[str, Any]

MEASURES: Mapping[str, str] = {
    "avg_jct_s": "min",
    "p50_jct_s": "min",
    "p90_jct_s": "min",
    "p99_jct_s": "min",
    "avg_queue_s": "min",
    "p50_queue_s": "min",
    "p90_queue_s": "min",
    "p99_queue_s": "min",
    "worst_queue_s": "min",
    "max_queue_s": "min",
    "makespan_s": "min",
    "gpu_utilization": "",
    "gpu_utilization_in_service": "",
    "gpu_hours": "",
    "restarts": "",
    "restart_gpu_hours": "min",
    "crashes": "",
    "mean_frozen_fraction": "",
    "mean_rho": "min",
    "p99_rho": "min",
    "max_rho": "min",
    "unfair_fraction": "min",
    "jain_index": "max",
    "completed": "max",
    "unfinished": "min",
}
"""Keys of ``summary.json`` that are averaged over replicates, and which end is better, if one is."""
COMPARED = tuple(key for key, better in MEASURES.items() if better == "min")
"""Measures that get a ratio against the base."""
MAX_CDF_POINTS = 400


@dataclass(frozen=True, slots=True)
class Replicates:
    """The results of one variant under one condition, by replicate."""

    variant: Variant
    results: Mapping[tuple[str, int], Result]

    def values(self, key: str, replicates: Sequence[tuple[str, int]]) -> list[float]:
        """A measure of the summary by replicate; NaN where it has no value."""
        return [_number(self.results[replicate]["summary"].get(key)) for replicate in replicates]


def aggregate(experiment: Experiment, planned: Sequence[Planned], sweep: Sweep) -> Document:
    """The findings so far: cells that are missing or failed are left out, and told."""
    table: dict[tuple[int, str], dict[tuple[str, int], Result]] = {}
    places = {id(condition): i for i, condition in enumerate(experiment.conditions)}
    for one in planned:
        if (result := sweep.results.get(one.key)) is not None:
            place = places[id(one.cell.condition)], one.cell.variant.name
            table.setdefault(place, {})[one.cell.replicate] = result
    conditions = []
    for i, condition in enumerate(experiment.conditions):
        rows = [Replicates(v, table[i, v.name]) for v in experiment.variants if (i, v.name) in table]
        if rows:
            conditions.append(condition_findings(condition, rows, experiment.base))
    document = findings(experiment.name, experiment.about, experiment.base, planned, sweep, conditions)
    _add_sensitivities(document, experiment, table)
    return document


def _add_sensitivities(
    document: Document, experiment: Experiment, table: Mapping[tuple[int, str], Mapping[tuple[str, int], Result]]
) -> None:
    """``sensitivity`` of every row that lies along a knob."""
    jct_s = {
        place: {replicate: _number(result["summary"].get("avg_jct_s")) for replicate, result in results.items()}
        for place, results in table.items()
    }
    found = sensitivities(experiment.conditions, experiment.variants, jct_s)
    places = {condition.label: i for i, condition in enumerate(experiment.conditions)}
    for condition in document["conditions"]:
        for row in condition["rows"]:
            row["sensitivity"] = found.get((places[condition["label"]], row["variant"]), {})


def findings(
    name: str, about: str, base: str, planned: Sequence[Planned], sweep: Sweep, conditions: list[Document]
) -> Document:
    """The document around the findings of each condition."""
    keys = {one.key for one in planned}
    return {
        "schema": 1,
        "name": name,
        "about": about,
        "base": base,
        "traces": list(dict.fromkeys(one.cell.trace.label for one in planned)),
        "seeds": sorted({one.cell.seed for one in planned}),
        "cells": {"all": len(keys), "done": len(sweep.results), "failed": len(sweep.failed)},
        "cpu_s": sum(result.get("cpu_s") or 0.0 for result in sweep.results.values()),
        "failed": _failures(planned, sweep),
        "conditions": conditions,
    }


def _failures(planned: Sequence[Planned], sweep: Sweep) -> dict[str, str]:
    labels: dict[str, str] = {}
    for one in planned:
        if one.key in sweep.failed:
            labels.setdefault(one.cell.label(), sweep.failed[one.key])
    return labels


def condition_findings(condition: Condition, rows: Sequence[Replicates], base_name: str) -> Document:
    """The rows of one condition, each compared with the base."""
    base = next((row for row in rows if row.variant.name == base_name), None)
    return {
        "label": condition.label,
        "axes": dict(condition.axes),
        "cluster": condition.cluster.label(),
        "gpus": condition.cluster.num_gpus,
        "rows": [_row(row, base) for row in rows],
        "pairs": {row.variant.name: _over_all(row, rows) for row in rows},
    }


def _over_all(row: Replicates, rows: Sequence[Replicates]) -> Document:
    """Speed-up of one variant over each other one: mean(other) / mean(variant) of the mean completion time."""
    found = {}
    for other in rows:
        paired = sorted(row.results.keys() & other.results.keys())
        if other is row or not paired:
            continue
        ours, theirs = row.values("avg_jct_s", paired), other.values("avg_jct_s", paired)
        if not any(math.isnan(value) for value in (*ours, *theirs)):
            found[other.variant.name] = _comparison(compare(theirs, ours))
    return found


def _row(row: Replicates, base: Replicates | None) -> Document:
    replicates = sorted(row.results)
    document: Document = {
        "variant": row.variant.name,
        "series": row.variant.series or row.variant.name,
        "axis": None if row.variant.axis is None else list(row.variant.axis),
        "policy": row.variant.policy,
        "options": dict(row.variant.options),
        "replicates": len(replicates),
        "jobs": _total(row, "jobs"),
        "lost": {key: n for key in ("target_missed", "failed", "cancelled", "unfinished") if (n := _total(row, key))},
        "stalled": sum("stalled" in result["summary"] for result in row.results.values()),
        "measures": _measures(row, replicates),
        "cdf": _cdf(row),
        "groups": _groups(row, base),
    }
    if base is not None:
        paired = [replicate for replicate in replicates if replicate in base.results]
        if paired:
            document["versus_base"] = _versus(base, row, paired)
            document["by_trace"] = _by_trace(base, row, paired)
    return document


def _measures(row: Replicates, replicates: Sequence[tuple[str, int]]) -> Document:
    found = {}
    for key in MEASURES:
        values = row.values(key, replicates)
        if values and not any(math.isnan(value) for value in values):
            found[key] = {**_interval(mean_interval(values)), "values": values}
    return found


def _versus(base: Replicates, row: Replicates, paired: Sequence[tuple[str, int]]) -> Document:
    found = {}
    for key in COMPARED:
        ours, theirs = row.values(key, paired), base.values(key, paired)
        if not any(math.isnan(value) for value in (*ours, *theirs)):
            found[key] = _comparison(compare(theirs, ours))
    return found


def _by_trace(base: Replicates, row: Replicates, paired: Sequence[tuple[str, int]]) -> Document:
    """mean(base) / mean(variant) of the mean completion time, and replicates won, for each trace."""
    found = {}
    for trace in dict.fromkeys(trace for trace, _ in paired):
        of_trace = [replicate for replicate in paired if replicate[0] == trace]
        ours, theirs = row.values("avg_jct_s", of_trace), base.values("avg_jct_s", of_trace)
        if not any(math.isnan(value) for value in (*ours, *theirs)):
            outcome = compare(theirs, ours)
            found[trace] = {"ratio": _finite(outcome.ratio.value), "wins": outcome.wins, "losses": outcome.losses}
    return found


def _groups(row: Replicates, base: Replicates | None) -> Document:
    """Mean completion time by group of jobs (size class; restricted or free to freeze), over replicates, and its ratio."""
    found: Document = {}
    for label in ("class", "freezing"):
        groups = sorted({group for r in row.results.values() for group in r["jobs"].get(label, ()) if group})
        for group in groups:
            ours = {key: _group_mean(result, label, group) for key, result in sorted(row.results.items())}
            known = {key: value for key, value in ours.items() if value is not None}
            if not known:
                continue
            entry = {"jobs": sum(r["jobs"][label].count(group) for r in row.results.values())}
            entry |= _interval(mean_interval(list(known.values())))
            theirs = {
                key: value
                for key in known
                if base is not None and key in base.results
                if (value := _group_mean(base.results[key], label, group)) is not None
            }
            if theirs:
                entry["versus_base"] = _comparison(compare(list(theirs.values()), [known[key] for key in theirs]))
            found.setdefault(label, {})[group] = entry
    return found


def _group_mean(result: Result, label: str, group: str) -> float | None:
    jobs = result["jobs"]
    values = [
        jct for jct, name in zip(jobs["jct_s"], jobs.get(label, ()), strict=False) if name == group and jct is not None
    ]
    return float(np.mean(values)) if values else None


def _cdf(row: Replicates) -> list[float]:
    """Completion times of all replicates' jobs, ascending, in at most ``MAX_CDF_POINTS`` quantiles."""
    values = np.sort([jct for result in row.results.values() for jct in result["jobs"]["jct_s"] if jct is not None])
    if len(values) > MAX_CDF_POINTS:
        values = np.quantile(values, np.linspace(0, 1, MAX_CDF_POINTS))
    return [float(f"{value:.6g}") for value in values]


def _total(row: Replicates, key: str) -> int:
    return sum(int(result["summary"].get(key) or 0) for result in row.results.values())


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _interval(interval: Interval) -> Document:
    return {"mean": interval.value, "low": interval.low, "high": interval.high}


def _comparison(comparison: Comparison) -> Document:
    found = asdict(comparison)
    found["ratio"] = _finite(comparison.ratio.value)
    return {**found, "low": comparison.ratio.low, "high": comparison.ratio.high}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
