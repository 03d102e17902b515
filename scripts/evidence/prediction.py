"""The steps that a frozen prefix costs, as predicted and as needed: from arms ``watch-*`` and ``fixed:K@I``."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
from rows import Row, control_reached, control_steps
from tasks import TASKS

KINDS = {"watch-raw": "raw variance", "watch-auto": "preconditioned variance"}


def prediction(rows: list[Row]) -> str:
    """A line for each task, depth and start: geometric means over the seeds that have all of it."""
    by_run = {(row["task"], row["arm"], row["seed"]): row for row in rows}
    cells: dict[tuple[str, int, int], list[dict[str, float]]] = defaultdict(list)
    missed: dict[tuple[str, int, int], int] = defaultdict(int)
    for (task, arm, seed), row in sorted(by_run.items()):
        depth, _, start = arm.removeprefix("fixed:").partition("@")
        watches = [by_run.get((task, kind, seed)) for kind in KINDS]
        if not start or None in watches or not control_reached(row):
            continue
        at_step = int(start) * TASKS[task].interval_steps
        if control_steps(row) <= at_step:
            continue
        cell = task, int(depth), int(start)
        if not row["reached"]:
            missed[cell] += 1
            continue
        found = {"needed": (row["steps"] - at_step) / (control_steps(row) - at_step)}
        for kind, watch in zip(KINDS, watches, strict=True):
            assert watch is not None
            note = next((note for note in watch["predicted"] if note["steps"] >= at_step), None)
            found[kind] = 1.0 / note["psi"][int(depth)] if note and note["psi"][int(depth)] > 0 else math.inf
            if note and kind == "watch-auto":
                found["signal"] = note["signal_share"][int(depth)] ** -0.5
        cells[cell].append(found)
    lines = [
        "| task | layers frozen | from step | seeds (missed) | steps needed after that, of the control's | "
        "raw variance: 1/psi | preconditioned: 1/psi | signal: share^-0.5 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in sorted({*cells, *missed}, key=lambda cell: (list(TASKS).index(cell[0]), cell[2], cell[1])):
        task, depth, start = cell
        found = cells[cell]
        means = [_mean([one[key] for one in found if key in one]) for key in ("needed", *KINDS, "signal")]
        spread = ", ".join(f"{one['needed']:.2f}" for one in found)
        lines.append(
            f"| {task} | {depth} | {start * TASKS[task].interval_steps} | {len(found)} ({missed[cell]}) | "
            f"{means[0]} ({spread}) | {means[1]} | {means[2]} | {means[3]} |"
        )
    return "\n".join(lines) + "\n"


def _mean(values: list[float]) -> str:
    return f"{math.exp(float(np.mean(np.log(values)))):.2f}" if values else "-"
