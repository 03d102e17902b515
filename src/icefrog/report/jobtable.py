"""The report's table of jobs: cells with what is shown and what is sorted by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from icefrog.report import text
from icefrog.report.record import JobRecord, RunRecord

Cell: TypeAlias = Any
"""Text, or ``[text, value to sort by]``, or ``[text, value, hint]``."""


def _always(run: RunRecord) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    cell: Callable[[JobRecord], Cell]
    shown: Callable[[RunRecord], bool] = _always
    style: str = ""  # "right" for numbers, "wide" for what may wrap


def job_table(run: RunRecord) -> dict[str, Any]:
    """``{"columns": [[title, style], ...], "rows": [[cell, ...], ...]}``, columns with nothing to show left out."""
    columns = [column for column in _COLUMNS if column.shown(run)]
    return {
        "columns": [[column.title, column.style] for column in columns],
        "rows": [[column.cell(job) for column in columns] for job in run.jobs],
    }


def _seconds(value: float | None) -> Cell:
    return [text.duration(value), value]


def _labels(job: JobRecord) -> Cell:
    return ", ".join(f"{key}={value}" for key, value in job.labels.items())


def _status(job: JobRecord) -> Cell:
    return [text.status_text(job.status), job.status, job.reason]


def _target(job: JobRecord) -> Cell:
    reached = text.target_reached(job)
    return [text.target_text(job), None if reached is None else int(reached)]


def _gpus(job: JobRecord) -> Cell:
    return _chain(text.gpus_over_time(job), text.gpus_over_time(job, None), max((n for _, n in job.gpus), default=0))


def _frozen(job: JobRecord) -> Cell:
    of = f" of {job.num_layers}" if job.num_layers and job.frozen else ""
    deepest = max((layers for _, layers in job.frozen), default=0)
    return _chain(text.frozen_over_time(job) + of, text.frozen_over_time(job, None) + of, deepest)


def _chain(short: str, full: str, value: float) -> Cell:
    return [short, value, full] if full != short else [short, value]


def _remarks(job: JobRecord) -> Cell:
    remarks = [message for _, message in sorted((*job.warnings, *job.deaths))]
    if not remarks:
        return ["", 0]
    more = f" (and {len(remarks) - 1} more)" if len(remarks) > 1 else ""
    return [remarks[-1] + more, len(remarks), "\n".join(remarks)]


def _any_target(run: RunRecord) -> bool:
    return any(job.target is not None for job in run.jobs)


_COLUMNS = (
    _Column("job", lambda job: job.job_id),
    _Column("workload", lambda job: job.workload, lambda run: any(job.workload for job in run.jobs)),
    _Column("labels", _labels, lambda run: any(job.labels for job in run.jobs), "wide"),
    _Column("status", _status),
    _Column("submitted", lambda job: _seconds(job.submit_s), style="right"),
    _Column("time to accuracy", lambda job: _seconds(text.time_to_accuracy(job)), _any_target, "right"),
    _Column("target reached", _target, _any_target, "wide"),
    _Column("completion time", lambda job: _seconds(job.jct_s), style="right"),
    _Column("queueing", lambda job: _seconds(job.queue_s), style="right"),
    _Column("GPUs over time", _gpus, style="wide"),
    _Column("frozen layers over time", _frozen, lambda run: any(n for job in run.jobs for _, n in job.frozen), "wide"),
    _Column("restarts", lambda job: [str(job.restarts), job.restarts], style="right"),
    _Column("GPU time", lambda job: _seconds(job.gpu_s), style="right"),
    _Column("remarks", _remarks, lambda run: any(job.warnings or job.deaths for job in run.jobs), "wide"),
)
