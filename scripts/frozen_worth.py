"""Puts together src/icefrog/workloads/frozen_worth.json: what a step with a frozen prefix was worth in real trainings.

    python scripts/frozen_worth.py [ROWS.jsonl ...] [--starts 0,0.125,0.3333,0.6667]

reads the rows of ``scripts/evidence/layer_elasticity.py`` (by default those of docs/evidence/data) and prints the tables of
docs/evidence/frozen-worth.md. Every run counts that stayed at one frozen depth from some step on, with the control of the
same task, target and seed, and so do the runs of the development seeds that docs/evidence/layer-elasticity.md writes down:

    worth = (steps of the control after the freeze) / (steps of the frozen run after the freeze)

* A run that missed the target, or moved its boundary again before it was reached, gives an *upper bound*: it needed more
  steps than it had by then. Bounds enter the means as if they were the worth, and are counted in the table. A bound of 1 or
  more says nothing.
* A freeze with fewer than three validations left to the control is left out: the target is a mean of three.
* Geometric means over the runs of a task, at most 1 (a frozen run that was faster is taken for luck, or for less
  overfitting), then over the tasks: no task counts for more because it was run more often.
* Depths (share of the units) are rounded *down* to DEPTHS, so that the table is rather too pessimistic; starts (progress of
  the control at the freeze) to the nearest of the ``starts``. Where a deeper prefix came out better, it counts as the
  shallower one.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "src/icefrog/workloads/frozen_worth.json"
DATA = ROOT / "docs/evidence/data"
KINDS = {  # kind of training and number of units of each task (scripts/evidence/tasks.py)
    "minilm-spam": ("finetune", 8),
    "minilm-lists": ("finetune", 8),
    "resnet-transfer": ("finetune", 10),
    "resnet-mnist": ("cnn", 10),
    "cnn-digits": ("cnn", 7),
    "transformer-spam": ("transformer", 6),
}
NOTED_IN = "layer-elasticity.md"
NOTED = (
    # Steps of the control; (units frozen, from step, steps to the target, or those after which it was missed, reached).
    ("minilm-lists", 100, 120, 15, ((4, 0, 105, True), (5, 0, 135, True), (6, 0, 180, True))),
    ("minilm-lists", 101, 105, 15, ((4, 0, 165, True), (5, 0, 195, True))),
    ("minilm-spam", 100, 75, 15, ((4, 0, 90, True), (5, 0, 120, True), (6, 0, 270, True))),
    ("minilm-spam", 101, 90, 15, ((4, 0, 90, True), (5, 0, 135, True), (6, 0, 360, False))),
    ("minilm-lists", 100, 135, 15, ((2, 0, 135, True), (3, 0, 135, True), (4, 0, 135, True), (5, 0, 165, True))),
    ("minilm-spam", 100, 105, 15, ((3, 0, 90, True), (4, 0, 120, True), (5, 0, 195, True))),
    ("minilm-spam", 100, 60, 15, ((4, 0, 60, True),)),
    ("resnet-mnist", 100, 510, 30, ((4, 0, 900, True), (3, 60, 540, True), (4, 120, 510, True), (5, 240, 480, True))),
    ("transformer-spam", 100, 270, 30, ((2, 90, 720, False),)),
)
"""Runs of the development seeds that are written down on that page only: task, seed, control, interval, frozen runs.
The page has a learning rate or a target of its own for each of the last five."""
DEPTHS = (0.25, 0.5, 0.6, 0.75)
LEAST_VALIDATIONS = 3
CONSTANT_RULES = ("fixed", "progress")
"""Rules that train layers either as they are or not at all (FreezeOut anneals them)."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One frozen run against its control."""

    task: str
    arm: str
    seed: int
    file: str
    units: int
    depth: float  # share of the units
    start: float  # progress of the control at the freeze
    worth: float
    bound: bool

    def row(self) -> list[Any]:
        """For the table."""
        return [
            self.task,
            self.arm,
            self.seed,
            self.file,
            self.units,
            round(self.start, 3),
            round(self.worth, 3),
            self.bound,
        ]


def runs_of(rows: Iterable[Row], file: str) -> list[Run]:
    """Those that can be told, in the order of the file."""
    rows = list(rows)
    controls = {_setting(row): row["steps"] for row in rows if row["arm"] == "control" and row["reached"]}
    found = [_run(row, controls[_setting(row)], file) for row in rows if _setting(row) in controls]
    return [run for run in found if run is not None]


def _setting(row: Row) -> tuple[Any, ...]:
    return row["task"], row["target"], row["seed"], row.get("why")


def _run(row: Row, control_steps: int, file: str) -> Run | None:
    if not row["arm"].startswith(CONSTANT_RULES):
        return None
    steps, depths = [int(entry[0]) for entry in row["trace"]], [int(entry[6]) for entry in row["trace"]]
    first = next((place for place, depth in enumerate(depths) if depth), None)
    if first is None:
        return None
    interval = steps[0]
    by_hand = row["arm"].partition("@")[2]
    began = int(by_hand) * interval if by_hand else (steps[first - 1] if first else 0)
    moved = next((place for place in range(first, len(depths)) if depths[place] != depths[first]), None)
    bound = moved is not None or not row["reached"]
    ended = steps[moved - 1] if moved is not None else steps[-1]
    return _against(
        row["task"], row["arm"], row["seed"], file, interval, control_steps, depths[first], began, ended, bound
    )


def _against(
    task: str,
    arm: str,
    seed: int,
    file: str,
    interval: int,
    control_steps: int,
    units: int,
    began: int,
    ended: int,
    bound: bool,
) -> Run | None:
    left, frozen_steps = control_steps - began, ended - began
    if left < LEAST_VALIDATIONS * interval or (bound and left >= frozen_steps):
        return None
    depth = units / KINDS[task][1]
    return Run(task, arm, seed, file, units, depth, began / control_steps, left / frozen_steps, bound)


def noted_runs() -> list[Run]:
    """Those of NOTED."""
    found = [
        _against(task, "fixed", seed, NOTED_IN, interval, control, units, began, ended, not reached)
        for task, seed, control, interval, frozen in NOTED
        for units, began, ended, reached in frozen
    ]
    return [run for run in found if run is not None]


def table(runs: list[Run], starts: list[float]) -> dict[str, Any]:
    """The JSON, without its runs."""
    kinds: dict[str, Any] = {}
    for kind in ("finetune", "cnn", "transformer"):
        curves = []
        for start in starts:
            here = [r for r in runs if KINDS[r.task][0] == kind and _nearest(r.start, starts) == start]
            cells = [_cell(depth, [r for r in here if _knot(r.depth) == depth]) for depth in DEPTHS]
            known = [cell for cell in cells if cell is not None]
            if known:
                curves.append({"start": round(start, 4), "cells": _falling(known)})
        kinds[kind] = curves
    return kinds


def _cell(depth: float, runs: list[Run]) -> dict[str, Any] | None:
    if not runs:
        return None
    by_task: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_task[run.task].append(run)
    tasks = {task: round(min(_mean(r.worth for r in own), 1.0), 3) for task, own in sorted(by_task.items())}
    bounds = sum(run.bound for run in runs)
    return {"depth": depth, "measured": _mean(tasks.values()), "runs": len(runs), "bounds": bounds, "tasks": tasks}


def _falling(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``worth`` of every cell: never more than that of a shallower one."""
    least = 1.0
    for cell in cells:
        least = min(least, cell["measured"])
        cell["measured"], cell["worth"] = round(cell["measured"], 3), round(least, 3)
    return cells


def _mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def _nearest(start: float, starts: list[float]) -> float:
    return min(starts, key=lambda knot: abs(knot - start))


def _knot(depth: float) -> float | None:
    return max((knot for knot in DEPTHS if knot <= depth + 1e-9), default=None)


def main() -> None:
    """Read, write, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", type=Path, default=sorted(DATA.glob("layer-elasticity*.jsonl")))
    parser.add_argument(
        "--starts", default="0,0.125,0.3333,0.6667", help="progress at which curves over the depth are made"
    )
    args = parser.parse_args()
    runs = [
        run
        for file in args.rows
        for run in runs_of([json.loads(line) for line in file.read_text().splitlines()], file.name)
    ]
    runs += noted_runs()
    kinds = table(runs, [float(start) for start in args.starts.split(",")])
    document = {
        "schema": 1,
        "about": "written by scripts/frozen_worth.py from trainings of docs/evidence/data; worth of a step with the first "
        "`depth` of the units frozen since `start`, share of a step of full training; proxy for larger networks",
        "provenance": "proxy",
        "kinds": kinds,
        "run_columns": ["task", "arm", "seed", "file", "units_frozen", "start", "worth", "is_upper_bound"],
        "runs": [run.row() for run in runs],
    }
    text = json.dumps(document, separators=(",", ":"))
    for opening in ('["minilm', '["resnet', '["cnn', '["transformer', '{"start"', '{"depth"', '"runs":['):
        text = text.replace(opening, "\n" + opening)
    OUTPUT.write_text(text + "\n")
    print("| training | frozen from | depth | worth | measured | runs (of them bounds) | by task |")
    print("|---|---|---|---|---|---|---|")
    for kind, curves in kinds.items():
        for curve in curves:
            for cell in curve["cells"]:
                tasks = ", ".join(f"{task} {worth:.2f}" for task, worth in cell["tasks"].items())
                print(
                    f"| {kind} | {curve['start']:.2f} | {cell['depth']:.2f} | {cell['worth']:.2f} | "
                    f"{cell['measured']:.2f} | {cell['runs']} ({cell['bounds']}) | {tasks} |"
                )


if __name__ == "__main__":
    main()
