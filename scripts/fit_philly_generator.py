"""Fits the generator behind ``synth:philly-120`` and writes src/icefrog/traces/fitted/philly_120.json.

Input: the Philly job table (timestamp,duration,num_gpus,gpu_time,cluster). Only fitted numbers are written: arrival
density by quarter of an hour, probability of each GPU count, quantiles of ln(duration) for each GPU count.

    python scripts/fit_philly_generator.py [JOBS.csv.gz]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from icefrog.traces import Trace, pool_days, read_trace

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "src/icefrog/traces/fitted/philly_120.json"
FIRST_HOUR, HOURS = 3, 4
LARGEST_GPU_S = 1000 * 3600.0  # where the largest job class of the paper ends
RARE = 100  # GPU counts seen less often share one table of durations
COMMON_AT = [*np.linspace(0, 0.975, 40).round(4), 0.985, 0.99, 0.995, 0.998, 1.0]
RARE_AT = list(np.linspace(0, 1, 11).round(4))


def select(trace: Trace) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """(submit_s, num_gpus, duration_s) of the jobs that are fitted, and how many were too long."""
    jobs = pool_days(trace, FIRST_HOUR, HOURS).jobs
    kept = [job for job in jobs if job.gpu_s <= LARGEST_GPU_S]
    columns = np.array([(j.submit_s, j.num_gpus, j.duration_s) for j in kept])
    return columns[:, 0], columns[:, 1].astype(int), columns[:, 2], len(jobs) - len(kept)


def fit(trace: Trace) -> dict[str, Any]:
    """The fitted numbers."""
    submit_s, gpus, duration_s, too_long = select(trace)
    arrivals = np.histogram(submit_s, bins=HOURS * 4, range=(0, HOURS * 3600))[0]
    counts = {int(n): int((gpus == n).sum()) for n in np.unique(gpus)}
    table_of = {n: str(n) if seen >= RARE else "rare" for n, seen in counts.items()}
    tables = {}
    for table in dict.fromkeys(table_of.values()):
        members = np.isin(gpus, [n for n, t in table_of.items() if t == table])
        at = RARE_AT if table == "rare" else COMMON_AT
        values = np.quantile(np.log(duration_s[members]), at)
        tables[table] = {"at": [float(a) for a in at], "ln_s": [round(float(v), 4) for v in values]}
    return {
        "schema": 1,
        "about": "4 hours of a morning of Philly: 120 jobs",
        "source": "fitted to Microsoft Philly (Jeon et al., USENIX ATC 2019, CC-BY 4.0) by scripts/fit_philly_generator.py",
        "fitted_jobs": len(submit_s),
        "left_out_above_1000_gpu_hours": too_long,
        "jobs_at_load_1": 120,
        "hours": HOURS,
        "arrival_weight": [round(float(a) / len(submit_s), 5) for a in arrivals],
        "gpu_counts": [
            {"num_gpus": n, "weight": round(seen / len(submit_s), 6), "table": table_of[n]}
            for n, seen in counts.items()
        ],
        "log_duration": tables,
    }


def main() -> None:
    default = Path(os.environ.get("ICEFROG_DATA", ROOT.parent / "shared/data")) / "philly/jobs.csv.gz"
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    OUTPUT.write_text(json.dumps(fit(read_trace(path)), indent=1) + "\n")
    print(f"wrote {OUTPUT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
