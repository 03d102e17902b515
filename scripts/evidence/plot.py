"""Accuracy over CPU time, control against the rule, a panel a task: docs/evidence/img/layer-elasticity.svg."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "icefrog"  # the same rows make the same bytes
from matplotlib import pyplot as plt  # noqa: E402
from tasks import TASKS  # noqa: E402

COLOURS = {"control": "#8a8a8a", "progress": "#1f77b4"}


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Each run is a line, of the mean of three validations that is held against the target; seeds that have both."""
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
