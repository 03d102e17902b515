"""Fits the whole-model gradient statistics by training progress; writes src/icefrog/workloads/gradient_totals.json.

Input: validation-<batch>.csv of the Pollux artifact (one row an epoch; grad_var refers to the application's smallest
batch M0, so S = M0 * grad_var is per-sample). Written are, for the smallest, a middle and the largest batch, the medians
around 11 points of progress of S and |G|^2, both divided by the application's first S.

    python scripts/fit_pollux_gradients.py [FOLDER with pollux/]
"""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "src/icefrog/workloads/gradient_totals.json"
APPLICATIONS = ("cifar10", "imagenet", "yolov3", "bert")
GRID = np.linspace(0, 1, 11)
HALF_WINDOW = 0.05


def fit(folder: Path) -> dict[str, Any]:
    """Totals of one application."""
    batches = sorted(int(p.stem.split("-")[1]) for p in folder.glob("validation-*.csv"))
    chosen = [batches[0], batches[len(batches) // 2], batches[-1]]
    rows = {}
    for batch in chosen:
        with (folder / f"validation-{batch}.csv").open(newline="") as file:
            rows[batch] = [
                (float(r["progress"]), float(r["grad_var"]), float(r["grad_sqr"])) for r in csv.DictReader(file)
            ]
    unit = rows[batches[0]][0][1] * batches[0]
    totals = []
    for batch in chosen:
        progress, var, sqr = np.array(rows[batch]).T
        at = (progress - progress[0]) / (progress[-1] - progress[0])
        scaled = (var * batches[0] / unit, np.maximum(sqr, 1e-30) / unit)
        totals.append(
            {"batch": batch, **{k: _medians(at, v) for k, v in zip(("variance", "sqr_norm"), scaled, strict=True)}}
        )
    return {"initial_batch": batches[0], "epochs": len(rows[batches[0]]), "totals": totals}


def _medians(at: np.ndarray, values: np.ndarray) -> list[float]:
    dense = np.linspace(0, 1, 401)
    curve = np.interp(dense, at, np.log(values))
    return [float(f"{np.exp(np.median(curve[np.abs(dense - p) <= HALF_WINDOW])):.4g}") for p in GRID]


def main() -> None:
    data = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(os.environ.get("ICEFROG_DATA", ROOT.parent / "shared/data"))
    table = {
        "schema": 1,
        "source": "fitted to the validation files of the Pollux artifact (Qiao et al., OSDI 2021; AdaptDL, Apache 2.0) by "
        "scripts/fit_pollux_gradients.py; bert: two epochs only, gradients under loss scaling",
        "applications": {app: fit(data / "pollux" / app) for app in APPLICATIONS},
    }
    OUTPUT.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
