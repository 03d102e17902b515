"""Statistics of a trace: a dictionary for machines, a few lines with a histogram for people."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from icefrog.profile import FloatArray
from icefrog.traces.trace import Trace
from icefrog.workloads.classes import CLASSES, gpu_time_class

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
_BAR = 40
_EDGES_S = (0.0, 60.0, 600.0, 3600.0, 6 * 3600.0, 86400.0, 7 * 86400.0, float("inf"))
_EDGE_NAMES = ("< 1 min", "1-10 min", "10-60 min", "1-6 h", "6-24 h", "1-7 d", "> 7 d")


def describe(trace: Trace) -> dict[str, Any]:
    """JSON values: counts, span, quantiles of duration, GPUs and GPU hours, jobs by class, rows dropped.

    Quantiles interpolate linearly; keys ``p0``..``p100``.
    """
    duration_s = np.array([job.duration_s for job in trace.jobs])
    gpus = np.array([float(job.num_gpus) for job in trace.jobs])
    gpu_h = duration_s * gpus / 3600.0
    submit_s = [job.submit_s for job in trace.jobs]
    classes = Counter(gpu_time_class(job.gpu_s) for job in trace.jobs)
    return {
        "source": trace.source,
        "jobs": len(trace.jobs),
        "start": None if trace.start is None else trace.start.isoformat(sep=" "),
        "span_s": submit_s[-1] - submit_s[0] if submit_s else 0.0,
        "gpu_hours": float(gpu_h.sum()),
        "duration_s": _quantiles(duration_s),
        "num_gpus": _quantiles(gpus),
        "gpu_hours_per_job": _quantiles(gpu_h),
        "jobs_by_gpus": {str(k): v for k, v in sorted(Counter(job.num_gpus for job in trace.jobs).items())},
        "jobs_by_class": {kind: classes.get(kind, 0) for kind in CLASSES},
        "users": len({job.user for job in trace.jobs if job.user}),
        "vcs": len({job.vc for job in trace.jobs if job.vc}),
        "rows": {
            "read": trace.report.read,
            "kept": trace.report.kept,
            "dropped": dict(trace.report.dropped),
        },
    }


def describe_text(trace: Trace) -> str:
    """The same in lines of text, with a histogram of durations."""
    facts = describe(trace)
    start = f", from {facts['start']}" if facts["start"] else ""
    lines = [
        f"{facts['source']}",
        f"{facts['jobs']:,} jobs in {facts['span_s'] / 3600:.1f} h{start}; {facts['gpu_hours']:,.0f} GPU hours",
        trace.report.text(),
        "",
        f"{'':14}" + "".join(f"{name:>10}" for name in facts["duration_s"]),
    ]
    for label, key, digits in (
        ("duration, s", "duration_s", 0),
        ("GPUs", "num_gpus", 1),
        ("GPU hours", "gpu_hours_per_job", 2),
    ):
        lines.append(f"{label:14}" + "".join(f"{value:10,.{digits}f}" for value in facts[key].values()))
    lines += ["", *_histogram(np.array([job.duration_s for job in trace.jobs])), ""]
    lines.append("by GPUs:  " + ", ".join(f"{k}: {v:,}" for k, v in facts["jobs_by_gpus"].items()))
    lines.append("by class: " + ", ".join(f"{k}: {v:,}" for k, v in facts["jobs_by_class"].items()))
    return "\n".join(lines)


def _quantiles(values: FloatArray) -> dict[str, float]:
    if not len(values):
        return {}
    points = np.quantile(values, QUANTILES)
    return {f"p{q * 100:g}": float(value) for q, value in zip(QUANTILES, points, strict=True)}


def _histogram(duration_s: FloatArray) -> list[str]:
    counts = np.histogram(duration_s, bins=_EDGES_S)[0]
    most = max(int(counts.max(initial=0)), 1)
    return [
        f"{name:>10} {int(count):>7,} {'#' * round(_BAR * int(count) / most)}".rstrip()
        for name, count in zip(_EDGE_NAMES, counts, strict=True)
    ]
