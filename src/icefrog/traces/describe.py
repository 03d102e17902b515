"""Statistics of a trace, as JSON values. What draws them: ``drawing`` in a terminal, ``page`` in a browser."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

import numpy as np

from icefrog.profile import FloatArray
from icefrog.traces.trace import Trace, TraceJob
from icefrog.workloads.classes import CLASSES, gpu_time_class

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
MAX_GROUPS = 20
"""Groups beyond the largest of these many are summed up as one."""
OTHERS = "(others)"
DURATION_EDGES_S = (0.0, 60.0, 600.0, 3600.0, 6 * 3600.0, 86400.0, 7 * 86400.0, float("inf"))
DURATION_NAMES = ("< 1 min", "1-10 min", "10-60 min", "1-6 h", "6-24 h", "1-7 d", "> 7 d")
_GROUPS: dict[str, Callable[[TraceJob], str]] = {
    "vc": lambda job: job.vc,
    "state": lambda job: job.state,
    "gpu_type": lambda job: job.gpu_type,
    "kind": lambda job: job.kind,
    "application": lambda job: job.application,
}


def describe(trace: Trace) -> dict[str, Any]:
    """JSON values: counts, span, quantiles, jobs and GPU hours by group, rows dropped by reason.

    Quantiles interpolate linearly; keys ``p0``..``p100``. Groups (``by``) are those of which the log tells more than
    nothing, the ones with most GPU hours first.
    """
    jobs = trace.jobs
    duration_s = np.array([job.duration_s for job in jobs])
    gpus = np.array([float(job.num_gpus) for job in jobs])
    gpu_h = np.array([job.gpu_s for job in jobs]) / 3600.0
    submit_s = np.array([job.submit_s for job in jobs])
    queue_s = np.array([job.queue_s for job in jobs if job.queue_s is not None])
    classes = Counter(gpu_time_class(job.gpu_s) for job in jobs)
    return {
        "source": trace.source,
        "jobs": len(jobs),
        "start": None if trace.start is None else trace.start.isoformat(sep=" "),
        "zone": trace.zone or None,
        "span_s": float(submit_s[-1] - submit_s[0]) if jobs else 0.0,
        "gpu_hours": float(gpu_h.sum()),
        "submissions_per_hour": quantiles(per_hour(submit_s)),
        "duration_s": quantiles(duration_s),
        "num_gpus": quantiles(gpus),
        "gpu_hours_per_job": quantiles(gpu_h),
        "queue_s": quantiles(queue_s),
        "jobs_by_duration": dict(zip(DURATION_NAMES, duration_counts(duration_s), strict=True)),
        "jobs_by_gpus": {str(k): v for k, v in sorted(Counter(job.num_gpus for job in jobs).items())},
        "jobs_by_class": {kind: classes.get(kind, 0) for kind in CLASSES},
        "jobs_by_hour_of_day": hours_of_day(submit_s, trace.start),
        "by": {name: found for name, key in _GROUPS.items() if (found := groups(jobs, key))},
        "users": len({job.user for job in jobs if job.user}),
        "vcs": len({job.vc for job in jobs if job.vc}),
        "with_deadline": sum(job.deadline_s is not None for job in jobs),
        "rows": {
            "read": trace.report.read,
            "kept": trace.report.kept,
            "dropped": dict(trace.report.dropped),
            "examples": dict(trace.report.examples),
        },
    }


def quantiles(values: FloatArray) -> dict[str, float]:
    """The points of ``QUANTILES``, interpolated linearly; empty for nothing."""
    if not len(values):
        return {}
    points = np.quantile(values, QUANTILES)
    return {f"p{q * 100:g}": float(value) for q, value in zip(QUANTILES, points, strict=True)}


def per_hour(submit_s: FloatArray) -> FloatArray:
    """Submissions in each whole hour from the first submission on (the last hour may be cut off); a span beyond 100
    years is no log: empty.
    """
    if not len(submit_s):
        return np.zeros(0)
    hours = (submit_s - submit_s[0]) // 3600.0
    last = float(hours[-1])
    return np.zeros(0) if last > 876_600 else np.bincount(hours.astype(np.int64)).astype(np.float64)


def duration_counts(duration_s: FloatArray) -> list[int]:
    """Jobs in each range of ``DURATION_NAMES``."""
    return [int(count) for count in np.histogram(duration_s, bins=DURATION_EDGES_S)[0]]


def hours_of_day(submit_s: FloatArray, start: datetime | None) -> list[int] | None:
    """Jobs submitted in each of the 24 hours of the day, local time; None for relative times."""
    if start is None or not len(submit_s):
        return None
    midnight = start.replace(hour=0, minute=0, second=0, microsecond=0)
    at = np.fmod(submit_s + (start - midnight).total_seconds(), 86400.0) // 3600.0
    return [int(count) for count in np.bincount(at.astype(np.int64), minlength=24)]


def groups(jobs: Sequence[TraceJob], key: Callable[[TraceJob], str]) -> dict[str, dict[str, float]]:
    """Jobs, GPU hours and median duration by group, most GPU hours first; empty where the log tells nothing."""
    members: dict[str, list[TraceJob]] = {}
    for job in jobs:
        members.setdefault(key(job), []).append(job)
    if set(members) <= {""}:
        return {}
    ranked = sorted(members.items(), key=lambda item: -sum(job.gpu_s for job in item[1]))
    shown = {name or "(none)": _group(group) for name, group in ranked[:MAX_GROUPS]}
    rest = [job for _, group in ranked[MAX_GROUPS:] for job in group]
    return {**shown, OTHERS: _group(rest)} if rest else shown


def _group(jobs: Iterable[TraceJob]) -> dict[str, float]:
    jobs = list(jobs)
    return {
        "jobs": len(jobs),
        "gpu_hours": sum(job.gpu_s for job in jobs) / 3600.0,
        "p50_duration_s": float(np.median([job.duration_s for job in jobs])),
    }
