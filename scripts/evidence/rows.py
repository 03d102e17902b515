"""A row of the evidence: one run, and the control that trained beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
from tasks import TASKS

Row = dict[str, Any]


def control_steps(row: Row) -> int:
    """Of the control that trained beside this run: another processor rounds differently, and takes other steps."""
    return len(row["control_trace_cpu_s"]) * TASKS[row["task"]].interval_steps


def control_reached(row: Row) -> bool:
    """Whether it reached the target, or went on to the last interval."""
    return len(row["control_trace_cpu_s"]) < TASKS[row["task"]].max_intervals


def in_control_steps(row: Row) -> float:
    """The run's CPU time in steps of the control: each interval by what the control's took at the same time.

    After the control ended, by the mean of its intervals.
    """
    seconds = np.diff([0.0, *row["control_trace_cpu_s"]])
    mine = np.diff([0.0, *trace_s(row)])
    beside = [seconds[i] if i < len(seconds) else seconds.mean() for i in range(len(mine))]
    return float(np.sum(mine / beside) * TASKS[row["task"]].interval_steps)


def trace_s(row: Row) -> list[float]:
    """CPU seconds at the end of each interval."""
    return [entry[1] for entry in row["trace"]]
