"""Whether it pays a job to let layers be frozen: restricted and free jobs against themselves in a run without restrictions.

    icefrog experiment experiments/incentive.yaml
    python scripts/freezing_incentive.py runs/incentive

Mean JCT of each half of the jobs in the run in which one half is restricted, in times that of the same jobs where nobody is;
both from the cells of the experiment, paired by seed.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from icefrog.experiment.statistics import ratio_interval


def main(folder: Path, policy: str = "icefrog") -> None:
    """Print a line for each load and half."""
    cells = [json.loads(path.read_text()) for path in sorted((folder / "cells").glob("*.json"))]
    runs: dict[tuple[float, int], dict[bool, dict[str, Any]]] = defaultdict(dict)
    for cell in cells:
        given = cell["inputs"]
        if given["policy"] == policy:
            runs[given["load"], given["seed"]][bool(given["restrict_freezing"])] = cell["jobs"]
    for load in sorted({load for load, _ in runs}):
        pairs = [run for (at, _), run in sorted(runs.items()) if at == load and len(run) == 2]
        for half in ("restricted", "free"):
            means = [_means(run[True], run[False], half) for run in pairs]
            found = ratio_interval(*zip(*means, strict=True))
            longer = sum(mine > other for mine, other in means)
            print(
                f"load {load:g}, {half}: {found.value:.3f} ({found.low:.3f} to {found.high:.3f}) times as long, "
                f"longer on {longer} of {len(means)} seeds"
            )


def _means(run: dict[str, Any], without: dict[str, Any], half: str) -> tuple[float, float]:
    """Mean JCT of one half, seconds: in the run with restrictions, and without."""
    alone = dict(zip(without["job_id"], without["jct_s"], strict=True))
    rows = zip(run["job_id"], run["jct_s"], run["freezing"], strict=True)
    chosen = [(jct, alone[job]) for job, jct, group in rows if group == half]
    mine, other = np.mean(chosen, axis=0)
    return float(mine), float(other)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
