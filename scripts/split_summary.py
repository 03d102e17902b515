"""Finished runs of scripts/measure_layer_split.py -> layer_split.json and the tables of docs/workloads.md."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from split_tasks import STUDIES, TASKS, Task

from icefrog.estimate.penalty import frozen_penalty
from icefrog.profile import FloatArray

OUTPUT = Path(__file__).parents[1] / "src/icefrog/workloads/layer_split.json"
FRACTIONS = (0.25, 0.5, 0.75)
GRID = 11
LEAST_WINDOW = 10  # steps on either side of a grid point
PHASES = {"first tenth": (0, 2), "middle": (3, 8), "end": (8, 11)}  # rows of the grid


def write_table(work: Path) -> None:
    """Put together what is in the work folder; families that it lacks stay as they are in the file."""
    families = json.loads(OUTPUT.read_text())["families"] if OUTPUT.exists() else {}
    families = {name: family for name, family in families.items() if "param_share" in family}
    for name, task in TASKS.items():
        kinds = {"preconditioned": "", "raw": "-raw"} if task.adaptive else {"raw": ""}
        for mode, (kind, suffix) in enumerate(kinds.items()):
            folders = [f for f in sorted((work / name).glob("seed*")) if len(list(f.glob("frozen-*.npz"))) == 9]
            if folders:
                families[name + suffix] = _family(task, kind, folders, mode)
    studies = {}
    for name, task in STUDIES.items():
        folders = [f.parent for f in sorted((work / name.replace("/", "_")).glob("seed*/base.npz"))]
        if folders:
            studies[name] = _study(task, folders)
    table = {
        "schema": 2,
        "about": "written by scripts/measure_layer_split.py; rows: 11 points of progress (runs: from the freezing to the "
        "end), columns: units in forward order; marked proxy for larger networks",
        "provenance": "proxy",
        "families": dict(sorted(families.items())),
        "studies": studies,
    }
    text = json.dumps(table, separators=(",", ":"))
    OUTPUT.write_text(text.replace('{"start"', '\n{"start"').replace('{"network"', '\n{"network"') + "\n")
    _print_tables(table)


def on_grid(rows: FloatArray) -> FloatArray:
    """Means over a window around each of the 11 grid points; (steps, 2, units) -> (11, 2, units)."""
    at = np.arange(len(rows))
    centres = np.linspace(0, len(rows) - 1, GRID)
    half = max(len(rows) / (GRID - 1) / 2, LEAST_WINDOW)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # all-NaN columns: frozen units
        return np.array([np.nanmean(rows[np.abs(at - centre) <= half], axis=0) for centre in centres])


def _family(task: Task, kind: str, folders: Sequence[Path], mode: int) -> dict[str, Any]:
    base = [np.load(folder / "base.npz") for folder in folders]
    variance, sqr = _mean_curves([run["statistics"][:, mode] for run in base])
    runs, losses, accuracies = [], [_last(base, 1)], [_last(base, 2)]
    units = variance.shape[1]
    for start in FRACTIONS:
        for depth in FRACTIONS:
            after = [np.load(folder / f"frozen-{start}-{depth}.npz") for folder in folders]
            first = round(start * task.steps)
            ratios = [
                on_grid(run["statistics"][:, mode])[:, 0]
                / np.maximum(on_grid(whole["statistics"][first:, mode])[:, 0], 1e-30)
                for run, whole in zip(after, base, strict=True)
            ]
            runs.append({"start": start, "depth": round(depth * units) / units, "ratio": _rounded(_log_mean(ratios))})
            losses.append(_last(after, 1))
            accuracies.append(_last(after, 2))
    return {
        "network": task.note,
        "gradients": kind,
        "seeds": len(folders),
        "batch": task.batch,
        "validation_accuracy": accuracies,
        "validation_loss": losses,
        "param_share": _param_share(task, folders[0]),
        "total": _digits(variance.sum(1) / variance.sum(1).mean()),
        "noise_scale": _digits(variance.sum(1) / sqr.sum(1)),
        "variance_share": _rounded(variance / variance.sum(1, keepdims=True)),
        "sqr_share": _rounded(sqr / sqr.sum(1, keepdims=True)),
        "runs": runs,
    }


def _study(task: Task, folders: Sequence[Path]) -> dict[str, Any]:
    base = [np.load(folder / "base.npz") for folder in folders]
    variance, _ = _mean_curves([run["statistics"][:, 0] for run in base])
    return {
        "network": task.note,
        "seeds": len(folders),
        "validation_accuracy": _last(base, 2),
        "param_share": _param_share(task, folders[0]),
        "variance_share": _rounded(variance / variance.sum(1, keepdims=True)),
    }


def _mean_curves(runs: Sequence[FloatArray]) -> tuple[FloatArray, FloatArray]:
    """(S averaged in the logarithm, |G|^2 averaged and clamped at 0), each (11, units).

    Where no unit shows any signal above the noise, |G|^2 is taken from the moment that shows the least.
    """
    grids = [on_grid(run) for run in runs]
    sqr = np.mean([np.maximum(g[:, 1], 0) for g in grids], axis=0)
    total = sqr.sum(1)
    sqr[total <= 0] = sqr[np.where(total > 0, total, np.inf).argmin()]
    return _log_mean([g[:, 0] for g in grids]), sqr


def _param_share(task: Task, folder: Path) -> list[float]:
    """Shares of the units in the parameters. Rows of embeddings that never had a gradient do not count (v = 0)."""
    model = task.build()
    checkpoint = folder / f"mark-{FRACTIONS[-1]}.pt"
    state: dict[str, Any] = {}
    if task.adaptive and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=False)["optimizer"]["state"]
    names = {id(param): name for name, param in model.named_parameters()}

    def size(param: torch.nn.Parameter) -> int:
        held = state.get(names[id(param)])
        return param.numel() if held is None else int(torch.count_nonzero(held["exp_avg_sq"]))

    counts = np.array([sum(size(p) for m in unit for p in m.parameters()) for unit in task.units(model)])
    return _digits(counts / counts.sum())


def _last(runs: Sequence[Any], column: int) -> float:
    return round(float(np.mean([run["evaluations"][-1, column] for run in runs])), 4)


def _log_mean(values: Sequence[FloatArray]) -> FloatArray:
    return np.asarray(np.exp(np.mean(np.log(np.maximum(values, 1e-12)), axis=0)))


def _digits(values: FloatArray) -> list[float]:
    return [float(f"{v:.4g}") for v in values]


def _rounded(values: FloatArray) -> list[Any]:
    return [[None if math.isnan(v) else float(f"{v:.4g}") for v in row] for row in values]


# --- tables for the documentation


def _print_tables(table: dict[str, Any]) -> None:
    print("psi if frozen now (Eq. 3), by share of units frozen and phase of training\n")
    print("| network | phase | 25 % | 50 % | 75 % |\n|---|---|---|---|---|")
    for name, family in {**table["families"], **table["studies"]}.items():
        share = np.array(family["variance_share"])
        for phase, rows in PHASES.items():
            psi = frozen_penalty(share[slice(*rows)].mean(0))
            cells = " | ".join(f"{_at(psi, depth):.2f}" for depth in FRACTIONS)
            print(f"| {name} | {phase} | {cells} |")
        left = frozen_penalty(np.array(family["param_share"]))
        print(f"| {name} | *parameters left* | " + " | ".join(f"{_at(left, depth):.2f}" for depth in FRACTIONS) + " |")
    print(
        "\nlast evaluation of each run\n\n| network | frozen | from 25 % | from 50 % | from 75 % |\n|---|---|---|---|---|"
    )
    for name, family in table["families"].items():
        pairs = list(zip(family["validation_accuracy"], family["validation_loss"], strict=True))
        print(f"| {name} | nothing | {pairs[0][0]:.3f} ({pairs[0][1]:.3f}) | | |")
        for index, depth in enumerate(FRACTIONS):
            cells = " | ".join(f"{a:.3f} ({loss:.3f})" for a, loss in pairs[1 + index :: 3])
            print(f"| {name} | {depth:.0%} | {cells} |")


def _at(psi: FloatArray, depth: float) -> float:
    """Linear between depths, so that networks of different numbers of units compare."""
    units = len(psi) - 1
    return float(np.interp(depth * units, np.arange(units), psi[:-1]))
