"""The generated part of docs/evidence/layer-elasticity.md: paired ratios over seeds, from the raw rows."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

import numpy as np
from prediction import prediction
from rows import Row, control_reached, control_steps, in_control_steps
from scipy import stats
from tasks import TASKS

BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"


def write_page(page: Path, rows: list[Row]) -> None:
    """Put the tables between the marks of the page."""
    text = page.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n\n{tables(rows)}\n{END}{after}")


def tables(rows: list[Row]) -> str:
    """Ratios by task and rule, predicted against needed steps, then every run, folded away."""
    by_run = {(row["task"], row["arm"], row["seed"]): row for row in rows}
    tests: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for (task, arm, _), row in sorted(by_run.items()):
        if arm != "control" and "@" not in arm and "watch" not in arm:
            tests[task, arm].append(row)
    alone = {key: of_arm for key, of_arm in tests.items() if key[1] == "progress"}
    rivals = {key: of_arm for key, of_arm in tests.items() if key[1] != "progress"}
    for task in {task for task, _ in rivals}:  # beside them, on the seeds that they have
        seeds = {row["seed"] for (name, _), of_arm in rivals.items() if name == task for row in of_arm}
        rivals[task, "progress"] = [row for row in tests[task, "progress"] if row["seed"] in seeds]
    lines = [
        "Ratios are over the runs that reached the target; *at most* is the mean with a missed run counted as if it had "
        "reached it when it was given up.",
        "",
        "### `progress` against no freezing",
        "",
        *_ratios(alone),
        "",
        "### Rivals",
        "",
        *_ratios(rivals),
    ]
    lines += [
        "",
        "### Predicted and needed steps",
        "",
        prediction(rows),
        f"<details><summary>Every run ({len(by_run)})</summary>",
        "",
        "| task | rule | seed | CPU s | steps | last accuracy | depths |",
        "|---|---|---|---|---|---|---|",
    ]
    for (task, arm, seed), row in sorted(by_run.items()):
        depths = [int(entry[6]) for entry in row["trace"]]
        moves = [str(depth) for i, depth in enumerate(depths) if i == 0 or depth != depths[i - 1]]
        mark = "" if row["reached"] else " (missed)"
        lines.append(
            f"| {task} | {arm} | {seed} | {row['cpu_s']:.1f}{mark} | {row['steps']} | {row['accuracy']:.3f} | "
            f"{' '.join(moves)} |"
        )
    lines += ["", "</details>"]
    return "\n".join(lines) + "\n"


def _ratios(tests: dict[tuple[str, str], list[Row]]) -> list[str]:
    """A table: a line for each task and rule."""
    lines = [
        "| task | rule | seeds | reached | times faster in CPU time (95 % interval) | in steps of the control beside it | "
        "steps against the control | steps frozen / cached |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (task, arm), rows in sorted(tests.items(), key=lambda item: (list(TASKS).index(item[0][0]), item[0][1])):
        reached = [row for row in rows if row["reached"] and control_reached(row)]
        cpu = [row["control_trace_cpu_s"][-1] / row["cpu_s"] for row in reached]
        units = [control_steps(row) / in_control_steps(row) for row in reached]
        steps = [row["steps"] / control_steps(row) for row in reached]
        total = sum(row["steps"] for row in rows)
        frozen, cached = (sum(row[key] for row in rows) / total for key in ("frozen_steps", "cached_steps"))
        could = sum(control_reached(row) for row in rows)
        lines.append(
            f"| {task} | {arm} | {len(rows)} | {len(reached)} of {could} | {interval(cpu)}{at_most(rows)} | "
            f"{interval(units)} | {interval(steps)} | {frozen:.0%} / {cached:.0%} |"
        )
    return lines


def at_most(rows: list[Row]) -> str:
    """The mean with missed runs counted as if they had reached the target when they were given up."""
    rows = [row for row in rows if control_reached(row)]
    if all(row["reached"] for row in rows):
        return ""
    logs = np.log([row["control_trace_cpu_s"][-1] / row["cpu_s"] for row in rows])
    return f"; at most {math.exp(float(logs.mean())):.2f}"


def interval(ratios: list[float]) -> str:
    """Geometric mean, and Student's interval of the logarithms from three seeds on."""
    if not ratios:
        return "-"
    logs = np.log(ratios)
    mean = float(logs.mean())
    if len(logs) < 3:
        return f"{math.exp(mean):.2f} ({', '.join(f'{ratio:.2f}' for ratio in ratios)})"
    half = float(stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs)))
    return f"{math.exp(mean):.2f} ({math.exp(mean - half):.2f} to {math.exp(mean + half):.2f})"
