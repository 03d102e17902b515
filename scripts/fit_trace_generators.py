"""Fits the generators ``philly-week``, ``chronus-mix1``, ``chronus-mix2``, ``pollux-160`` and ``sia-960``, and the
iterations of Pollux' applications; writes src/icefrog/traces/fitted/*.json. Only fitted numbers are written.

    python scripts/fit_trace_generators.py [FOLDER with philly/, chronus/, pollux/, sia-workloads/]

(``philly-120`` has a script of its own, fit_philly_generator.py.)
"""

from __future__ import annotations

import csv
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from icefrog.traces import Trace, TraceJob, read_trace, window

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "src/icefrog/traces/fitted"
APPLICATIONS = ("bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3")
RARE = 200  # shapes seen less often share a table of durations
AT = [*np.linspace(0, 0.95, 20).round(4), 0.965, 0.98, 0.99, 0.995, 0.998, 0.999, 1.0]
RATIO_AT = list(np.linspace(0, 1, 11).round(4))
PHILLY_FROM, PHILLY_WEEKS = datetime(2017, 9, 25), 12
DURATION_EDGES_S = (1800.0, 3600.0, 6 * 3600.0)
PHILLY = "Microsoft Philly (Jeon et al., USENIX ATC 2019, CC-BY 4.0)"
CHRONUS = "CHRONUS (Gao et al., SoCC 2021, MIT), itself derived from Philly"
POLLUX = "the Pollux artifact (Qiao et al., OSDI 2021; AdaptDL, Apache 2.0)"
SIA = "the Sia artifact (Jayaram Subramanya et al., SOSP 2023; AdaptDL, Apache 2.0)"


def fit_philly_week(trace: Trace) -> dict[str, Any]:
    """A week of Philly: density by hour of the week, bursts, GPUs by virtual cluster, durations of each."""
    steady = window(trace, PHILLY_FROM, PHILLY_WEEKS * 168.0)
    hourly = _per_bin([job.submit_s for job in steady.jobs], 3600.0, PHILLY_WEEKS * 168)
    mean = hourly.reshape(PHILLY_WEEKS, 168).mean(axis=0)
    expected = np.tile(mean, PHILLY_WEEKS)
    burst_shape = float((expected**2).sum() / ((hourly - expected) ** 2 - expected).sum())
    shapes = Counter((job.vc, job.num_gpus) for job in steady.jobs)
    common_gpus = Counter(job.num_gpus for job in steady.jobs)
    table_of = {
        (vc, n): f"{vc} {n}" if seen >= RARE else (f"any {n}" if common_gpus[n] >= RARE else "rare")
        for (vc, n), seen in shapes.items()
    }
    return {
        "schema": 1,
        "about": f"a week of Philly's 2,490 GPUs: {len(steady) // PHILLY_WEEKS:,} jobs, bursts, virtual clusters",
        "source": f"fitted to {PHILLY} by scripts/fit_trace_generators.py: "
        f"{PHILLY_WEEKS} weeks from {PHILLY_FROM:%Y-%m-%d}",
        "fitted_jobs": len(steady),
        "jobs_at_load_1": round(len(steady) / PHILLY_WEEKS),
        "hours": 168,
        "arrival_weight": _shares(mean),
        "burst_shape": round(burst_shape, 4),
        "gpu_counts": [
            {"weight": _share(seen, len(steady)), "num_gpus": n, "vc": vc, "table": table_of[vc, n]}
            for (vc, n), seen in sorted(shapes.items())
        ],
        "log_duration": _tables(steady.jobs, lambda job: table_of[job.vc, job.num_gpus]),
    }


def fit_chronus(trace: Trace, mix: int) -> dict[str, Any]:
    """A day of CHRONUS jobs with deadlines."""
    jobs = trace.jobs
    hourly = _per_bin([job.submit_s % 86400.0 for job in jobs], 3600.0, 24)
    counts = Counter(job.num_gpus for job in jobs)
    table_of = {n: str(n) if seen >= RARE else "rare" for n, seen in counts.items()}
    due = [job for job in jobs if job.deadline_s is not None]
    length = np.searchsorted(DURATION_EDGES_S, [job.duration_s for job in due], side="right")
    ratio = np.array([(job.deadline_s or 0.0) / job.duration_s for job in due])
    soft = [tuple(at - job.rewards[0][0] for at, _ in job.rewards[1:]) for job in due if len(job.rewards) > 1]
    steps = [(step, seen) for step, seen in Counter(soft).most_common() if seen >= 20]
    kinds = Counter(job.kind for job in jobs)
    return {
        "schema": 1,
        "about": f"a day of CHRONUS' MIX{mix}: {len(jobs) // 14:,} Philly-like jobs with deadlines and rewards",
        "source": f"fitted to {CHRONUS} by scripts/fit_trace_generators.py",
        "fitted_jobs": len(jobs),
        "jobs_at_load_1": round(len(jobs) / 14),
        "hours": 24,
        "arrival_weight": _shares(hourly),
        "gpu_counts": [
            {"weight": _share(seen, len(jobs)), "num_gpus": n, "table": table_of[n]}
            for n, seen in sorted(counts.items())
        ],
        "log_duration": _tables(jobs, lambda job: table_of[job.num_gpus]),
        "deadlines": {
            "kinds": {kind: _share(seen, len(jobs)) for kind, seen in sorted(kinds.items())},
            "applications": sorted({job.application for job in jobs}),
            "vcs": sorted({job.vc for job in jobs}),
            "edges_s": list(DURATION_EDGES_S),
            "at": [float(a) for a in RATIO_AT],
            "ratio": [
                [round(float(v), 4) for v in np.quantile(ratio[length == k], RATIO_AT)]
                for k in range(len(DURATION_EDGES_S) + 1)
            ],
            "soft_steps": [{"weight": _share(seen, len(soft)), "after_s": list(step)} for step, seen in steps],
            "soft_worth": [worth for _, worth in next((j.rewards for j in due if len(j.rewards) > 1), ())],
            "strict_worth": next(job.rewards[0][1] for job in due if job.kind == "strict"),
        },
    }


def fit_workloads(traces: Sequence[Trace], about: str, source: str, hours: int, bins: int) -> dict[str, Any]:
    """Submissions over the span, and how often each application is given which replicas and batch."""
    jobs = [job for trace in traces for job in trace.jobs]
    shapes = Counter((job.application, job.num_gpus, job.batch_size) for job in jobs)
    return {
        "schema": 1,
        "about": about,
        "source": f"fitted to the workloads of {source} by scripts/fit_trace_generators.py",
        "fitted_jobs": len(jobs),
        "jobs_at_load_1": round(len(jobs) / len(traces)),
        "hours": hours,
        "arrival_weight": _shares(_per_bin([job.submit_s for job in jobs], hours * 3600.0 / bins, bins)),
        "gpu_counts": [
            {"weight": _share(seen, len(jobs)), "num_gpus": n, "application": name, "batch_size": batch}
            for (name, n, batch), seen in sorted(shapes.items(), key=str)
        ],
        "log_duration": {},
    }


def fit_iterations(folder: Path) -> dict[str, Any]:
    """Iterations of a whole training run of each application at each measured batch."""
    table: dict[str, dict[str, int]] = {}
    for name in APPLICATIONS:
        paths = {int(p.stem.split("-")[1]): p for p in (folder / name).glob("validation-*.csv")}
        table[name] = {str(batch): _last_iteration(paths[batch]) for batch in sorted(paths)}
    return {
        "schema": 1,
        "source": f"read off the validation files of {POLLUX} by scripts/fit_trace_generators.py: "
        "iterations after the last epoch, by global batch",
        "applications": table,
    }


def _last_iteration(path: Path) -> int:
    with path.open(newline="") as file:
        return int(float(list(csv.DictReader(file))[-1]["iteration"]))


def _tables(jobs: Sequence[TraceJob], table_of: Any) -> dict[str, Any]:
    members: dict[str, list[float]] = {}
    for job in jobs:
        members.setdefault(table_of(job), []).append(np.log(job.duration_s))
    return {
        name: {"at": [float(a) for a in AT], "ln_s": [round(float(v), 4) for v in np.quantile(values, AT)]}
        for name, values in sorted(members.items())
    }


def _per_bin(submit_s: Sequence[float], width_s: float, bins: int) -> np.ndarray:
    return np.histogram(submit_s, bins=bins, range=(0.0, bins * width_s))[0].astype(float)


def _shares(counts: np.ndarray) -> list[float]:
    return [round(float(c) / float(counts.sum()), 6) for c in counts]


def _share(seen: int, total: int) -> float:
    return round(seen / total, 7)


def fit_all(data: Path) -> dict[str, dict[str, Any]]:
    """File name (without .json) and content of every fitted file."""
    chronus = {mix: read_trace(data / f"chronus/trace_job_Philly_MIX{mix}.csv.gz") for mix in (1, 2)}
    pollux = [read_trace(data / f"pollux/workloads/workload-{i}.csv") for i in range(1, 7)]
    sia = [read_trace(data / f"sia-workloads/newtrace-{i}.csv") for i in range(1, 6)]
    return {
        "pollux_iterations": fit_iterations(data / "pollux"),
        "philly_week": fit_philly_week(read_trace(data / "philly/jobs.csv.gz")),
        "chronus_mix1": fit_chronus(chronus[1], 1),
        "chronus_mix2": fit_chronus(chronus[2], 2),
        "pollux_160": fit_workloads(
            pollux, "8 hours of Pollux' workloads: 160 jobs of six applications", POLLUX, 8, 16
        ),
        "sia_960": fit_workloads(sia, "48 hours of Sia's new traces: 960 jobs of five applications", SIA, 48, 48),
    }


def main() -> None:
    data = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(os.environ.get("ICEFROG_DATA", ROOT.parent / "shared/data"))
    for name, fitted in fit_all(data).items():
        (OUTPUT / f"{name}.json").write_text(json.dumps(fitted, indent=1) + "\n")
        print(f"wrote {OUTPUT.relative_to(ROOT)}/{name}.json")


if __name__ == "__main__":
    main()
