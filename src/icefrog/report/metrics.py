"""Numbers of a run: per job for ``jobs.csv``, per run for ``summary.json``.

The rule for every mean and percentile: it is over the non-empty cells of its column in ``jobs.csv``. A job that failed
or was cancelled has a ``finish_s`` but no completion time and no queueing time: a policy must not look better for
losing jobs. Such jobs are counted, and their GPU-seconds are part of the utilisation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, get_args

import numpy as np

from icefrog.report.fairness import fairness_summary
from icefrog.report.record import JobRecord, RunRecord, Status, StepSeries, area_until

STATUSES: tuple[Status, ...] = get_args(Status)


def job_row(job: JobRecord) -> dict[str, Any]:
    """The contract's columns of ``jobs.csv``, then ours; None is an empty cell."""
    ran_to_end = job.jct_s is not None
    ended = job.status != "unfinished"
    return {
        "job_id": job.job_id,
        "submit_s": job.submit_s,
        "start_s": job.start_s,
        "finish_s": job.finish_s,
        "jct_s": job.jct_s,
        "queue_s": job.queue_s if ran_to_end else None,
        "gpu_s": job.gpu_s,
        "restarts": job.restarts,
        "status": job.status,
        "workload": job.workload or None,
        "crashes": job.crashes,
        "shared_s": job.shared_s,
        "max_frozen_layers": int(max((layers for _, layers in job.frozen), default=0.0)),
        "num_layers": job.num_layers,
        "time_to_target_s": job.time_to_target_s if ended else None,
        "metric": job.metric[-1][1] if ended and job.metric else None,
    }


def summarise(
    run: RunRecord,
    *,
    policy: str | None = None,
    seed: int = 0,
    wall_s: float | None = None,
    decision_s: Mapping[str, float] | None = None,
    restart_s: float = 0.0,
) -> dict[str, Any]:
    """One entry of ``runs`` in ``summary.json``.

    ``wall_s`` (seconds the run took to compute) and ``decision_s`` (``{"mean", "max"}``, seconds a decision) depend on
    the machine, so the caller measures them; everything else is a function of the log. A mean over no job is None.
    ``restart_s``: what a simulated restart costs, GPUs held (:func:`icefrog.report.fairness.restart_gpu_s`).
    """
    jct_s = [job.jct_s for job in run.jobs if job.jct_s is not None]
    queue_s = [job.queue_s for job in run.jobs if job.jct_s is not None]
    count = {status: sum(job.status == status for job in run.jobs) for status in STATUSES}
    busy_s = busy_gpu_s(run)
    makespan_s = run.end_s - run.start_s
    return {
        "policy": policy or run.policy,
        "seed": seed,
        "jobs": len(run.jobs),
        "completed": count["completed"],
        "avg_jct_s": mean(jct_s),
        "p50_jct_s": percentile(jct_s, 50),
        "p99_jct_s": percentile(jct_s, 99),
        "makespan_s": makespan_s,
        "avg_queue_s": mean(queue_s),
        "restarts": sum(job.restarts for job in run.jobs),
        "gpu_utilization": busy_s / (run.cluster.num_gpus * makespan_s) if makespan_s > 0 else 0.0,
        "decision_s": dict(decision_s) if decision_s is not None else None,
        "wall_s": wall_s,
        "target_missed": count["target_missed"],
        "failed": count["failed"],
        "cancelled": count["cancelled"],
        "unfinished": count["unfinished"],
        "p90_jct_s": percentile(jct_s, 90),
        "gpu_hours": busy_s / 3600,
        "crashes": sum(job.crashes for job in run.jobs),
        "shared_s": sum(job.shared_s for job in run.jobs),
        "mean_frozen_fraction": mean_frozen_fraction(run),
        "effective_samples": sum(job.effective_samples for job in run.jobs),
        "decisions": run.decisions,
        "p50_queue_s": percentile(queue_s, 50),
        "p90_queue_s": percentile(queue_s, 90),
        "p99_queue_s": percentile(queue_s, 99),
        "gpu_utilization_in_service": _utilization_in_service(run),
        "node_outages": run.node_outages,
        **fairness_summary(run, restart_s),
    }


def busy_gpu_s(run: RunRecord) -> float:
    """GPU-seconds held by all jobs, those that never finished included."""
    return sum(job.gpu_s for job in run.jobs)


def _utilization_in_service(run: RunRecord) -> float:
    """Busy GPU-seconds over those of the GPUs in service; ``gpu_utilization`` counts nodes that were out, too."""
    in_service_s = integral(run.capacity, run.end_s)
    return busy_gpu_s(run) / in_service_s if in_service_s > 0 else 0.0


def mean_frozen_fraction(run: RunRecord) -> float | None:
    """Share of the layers that is frozen, averaged over GPU-seconds where it is known; None if it is nowhere."""
    frozen_gpu_s = gpu_s = 0.0
    for job in run.jobs:
        for part in job.segments(run.end_s):
            fraction = job.frozen_fraction(part.frozen_layers)
            if fraction is not None:
                held_gpu_s = part.gpus * (part.end_s - part.start_s)
                gpu_s += held_gpu_s
                frozen_gpu_s += held_gpu_s * fraction
    return frozen_gpu_s / gpu_s if gpu_s > 0 else None


def mean(values: Sequence[float]) -> float | None:
    """The mean, or None of nothing."""
    return float(np.mean(values)) if values else None


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The percentile, interpolated linearly between the two nearest ranks, or None of nothing."""
    return float(np.percentile(values, percent)) if values else None


def integral(series: StepSeries, end_s: float) -> float:
    """Value x seconds from the first step to ``end_s``."""
    closed = [*(step for step in series if step[0] < end_s), (end_s, 0.0)]
    return sum(value * (after - time_s) for (time_s, value), (after, _) in pairwise(closed))


def resample(series: StepSeries, start_s: float, end_s: float, buckets: int) -> StepSeries:
    """Time-weighted means over ``buckets`` equal intervals: what a plot shows of a series with too many steps.

    The integral from ``start_s`` to ``end_s`` is kept. A series with no more than ``buckets`` steps is returned as it is.
    """
    if len(series) <= buckets or end_s <= start_s:
        return series
    edges = np.linspace(start_s, end_s, buckets + 1)
    area = area_until(np.array([t for t, _ in series]), np.array([v for _, v in series]), edges)
    return tuple(zip(edges[:-1].tolist(), (np.diff(area) / np.diff(edges)).tolist(), strict=True))


def focus_end_s(run: RunRecord) -> float:
    """Where a plot over time should first end: when 95 % of the jobs are finished if the rest is a long tail, else the end.

    A few jobs that run for weeks would otherwise press everything that happened into the first pixels.
    """
    finishes = sorted(job.finish_s for job in run.jobs if job.finish_s is not None)
    if len(finishes) < max(20, 0.95 * len(run.jobs)):
        return run.end_s
    focus_s = 1.15 * (finishes[int(0.95 * (len(run.jobs) - 1))] - run.start_s)
    return run.start_s + focus_s if focus_s * 2.5 < run.end_s - run.start_s else run.end_s
