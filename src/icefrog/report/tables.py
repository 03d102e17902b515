"""The files for programs: ``jobs.csv`` and ``summary.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from icefrog.report.metrics import job_row
from icefrog.report.record import RunRecord
from icefrog.spec import ClusterSpec

SCHEMA_VERSION = 1

JOB_COLUMNS: dict[str, type[pl.DataType]] = {
    "job_id": pl.String,
    "submit_s": pl.Float64,
    "start_s": pl.Float64,
    "finish_s": pl.Float64,
    "jct_s": pl.Float64,
    "queue_s": pl.Float64,
    "gpu_s": pl.Float64,
    "restarts": pl.Int64,
    "status": pl.String,
    "workload": pl.String,
    "crashes": pl.Int64,
    "shared_s": pl.Float64,
    "max_frozen_layers": pl.Int64,
    "num_layers": pl.Int64,
    "time_to_target_s": pl.Float64,
    "metric": pl.Float64,
}
"""Columns of ``jobs.csv`` in order; the jobs' labels follow."""


def jobs_frame(run: RunRecord) -> pl.DataFrame:
    """One row a job, in order of submission: ``JOB_COLUMNS``, then one column a label (sorted).

    A label that is called like a column of ours gets ``label.`` before its name.
    """
    labels = sorted({key for job in run.jobs for key in job.labels})
    names = {key: f"label.{key}" if key in JOB_COLUMNS else key for key in labels}
    rows = [job_row(job) | {names[key]: job.labels.get(key) for key in labels} for job in run.jobs]
    return pl.DataFrame(rows, schema={**JOB_COLUMNS, **dict.fromkeys(names.values(), pl.String)})


def write_jobs_csv(run: RunRecord, path: Path) -> None:
    """Write ``jobs.csv``. The same run gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    jobs_frame(run).write_csv(path)


def cluster_summary(cluster: ClusterSpec) -> dict[str, Any]:
    """The ``cluster`` of ``summary.json``, from which :func:`icefrog.report.load_dir` restores the specification."""
    return {"label": cluster.label(), "gpus": cluster.num_gpus, **cluster.model_dump(mode="json")}


def summary_document(
    trace: Mapping[str, Any], cluster: ClusterSpec, runs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """``summary.json``: what was run (``trace``: any JSON), where, and one :func:`summarise` a policy."""
    return {
        "schema": SCHEMA_VERSION,
        "trace": dict(trace),
        "cluster": cluster_summary(cluster),
        "runs": [dict(run) for run in runs],
    }


def write_summary(path: Path, document: Mapping[str, Any]) -> None:
    """Write ``summary.json``; keys keep their order. Raises ``ValueError`` on a number that JSON cannot hold."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(summary_json(document), encoding="utf-8")


def summary_json(document: Mapping[str, Any]) -> str:
    """The text of ``summary.json``."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
