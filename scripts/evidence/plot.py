"""The figures of docs/evidence/layer-elasticity.md."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "icefrog"  # the same rows make the same bytes
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from rows import Row, control_reached  # noqa: E402
from tasks import TASKS  # noqa: E402

RULES = {
    "progress": "#1f77b4",
    "tuner": "#d62728",
    "tuner-nocache": "#ff9896",
    "freezeout": "#2ca02c",
    "autofreeze": "#9467bd",
    "egeria": "#8c564b",
    "linear": "#e377c2",
    "fixed": "#7f7f7f",
}
COLOURS = {"control": "#8a8a8a", "progress": RULES["progress"]}
MISSED_AT = 0.55
"""Where a missed target is marked, times."""


def draw(rows: list[Row], file: Path) -> None:
    """Accuracy over CPU time, control against the rule, a panel a task.

    Each run is a line, of the mean of three validations that is held against the target; seeds that have both.
    """
    tested = {(row["task"], row["seed"]) for row in rows if row["arm"] == "progress"}
    rows = [row for row in rows if row["arm"] in COLOURS and (row["task"], row["seed"]) in tested]
    names = [name for name in TASKS if any(row["task"] == name for row in rows)]
    num_rows = -(-len(names) // 3)
    figure, axes = plt.subplots(num_rows, 3, figsize=(10, 2.8 * num_rows), squeeze=False)
    for axis, name in zip(axes.flat, names, strict=False):
        for row in rows:
            if row["task"] == name:
                settled = row["trace"][2:]  # the mean has three members from the third on
                axis.plot(
                    [entry[1] for entry in settled],
                    [entry[3] for entry in settled],
                    color=COLOURS[row["arm"]],
                    linewidth=1.2,
                    alpha=0.8,
                    label=row["arm"],
                )
        axis.axhline(TASKS[name].target, color="black", linewidth=0.7, linestyle=":")
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("CPU s", fontsize=8)
        axis.set_ylabel("validation accuracy", fontsize=8)
        axis.set_ylim(top=min(1.0, TASKS[name].target + 0.04), bottom=TASKS[name].target - 0.25)
        axis.tick_params(labelsize=8)
        lines, labels = axis.get_legend_handles_labels()
        first = {label: line for line, label in zip(lines, labels, strict=True)}
        axis.legend(first.values(), first.keys(), fontsize=8, loc="lower right")
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def draw_gains(rows: list[Row], file: Path) -> None:
    """Times faster to the target, each seed a dot.

    Left: ``progress`` on every task. Right: all rules on the tasks, and the seeds, that rivals were run on.
    """
    by_run = {(row["task"], row["arm"], row["seed"]): row for row in rows}
    rows = [row for row in by_run.values() if _rule(row) in RULES and control_reached(row)]
    contested = {row["task"]: set[int]() for row in rows if row["arm"] == "tuner"}
    for row in rows:
        if row["arm"] == "tuner":
            contested[row["task"]].add(row["seed"])
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5.2), width_ratios=(1, 1.15))
    tasks = [task for task in TASKS if any(row["task"] == task for row in rows)][::-1]
    for place, task in enumerate(tasks):
        _dots(left, place, [row for row in rows if row["task"] == task and row["arm"] == "progress"], "progress")
    left.set_yticks(range(len(tasks)), tasks, fontsize=8)
    left.set_title("progress against no freezing", fontsize=10)
    place, ticks = 0, []
    for task in [task for task in tasks if task in contested]:
        here = [row for row in rows if row["task"] == task and row["seed"] in contested[task]]
        first = place
        for rule in [rule for rule in reversed(RULES) if any(_rule(row) == rule for row in here)]:
            _dots(right, place, [row for row in here if _rule(row) == rule], rule)
            place += 1
        ticks.append((first + place - 1) / 2)
        right.axhline(place, color="#cccccc", linewidth=0.6)
        place += 1
    right.set_yticks(ticks, [task for task in tasks if task in contested], fontsize=8)
    right.set_title("rivals (the same seeds; x: target missed)", fontsize=10)
    names = [rule for rule in RULES if any(_rule(row) == rule for row in rows)]
    marks = [plt.Line2D([], [], marker="o", linestyle="", markersize=5, color=RULES[rule]) for rule in names]
    right.legend(marks, names, fontsize=7, loc="lower right")
    for axis in (left, right):
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_xscale("log")
        axis.set_xticks([0.5, 0.7, 1, 1.5, 2, 3, 4, 5], ["0.5", "0.7", "1", "1.5", "2", "3", "4", "5"], fontsize=8)
        axis.minorticks_off()
        axis.grid(axis="x", linewidth=0.4)
        axis.set_xlabel("times faster in CPU time", fontsize=9)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def _rule(row: Row) -> str:
    name = str(row["arm"])
    return "fixed" if name.startswith("fixed:") and "@" not in name else name


def _dots(axis: Axes, place: float, rows: list[Row], rule: str) -> None:
    """A line of dots, the geometric mean as a stroke, and missed targets at the left."""
    ratios = [row["control_trace_cpu_s"][-1] / row["cpu_s"] for row in rows if row["reached"]]
    axis.plot(ratios, [place] * len(ratios), "o", color=RULES[rule], markersize=4, alpha=0.75)
    if ratios:
        axis.plot(
            [float(np.exp(np.mean(np.log(ratios))))], [place], "|", color=RULES[rule], markersize=12, markeredgewidth=2
        )
    missed = len(rows) - len(ratios)
    axis.plot([MISSED_AT * 1.06**i for i in range(missed)], [place] * missed, "x", color=RULES[rule], markersize=5)
