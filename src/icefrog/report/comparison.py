"""Policies side by side: the one table behind the terminal's and the report's comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from icefrog.report import text

Run = Mapping[str, Any]
"""One entry of ``runs`` in ``summary.json``."""


@dataclass(frozen=True, slots=True)
class Column:
    """One measure. ``better`` says which end is marked as the best; None: neither is better by itself."""

    title: str
    value: Callable[[Run], float | None]
    show: Callable[[float | None], str]
    better: Literal["min", "max"] | None = None
    note: str = ""


Table: TypeAlias = tuple[Column, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in the table."""

    text: str
    value: float | None
    best: bool


def _key(key: str) -> Callable[[Run], float | None]:
    return lambda run: run.get(key)


def _milliseconds(seconds: float | None) -> str:
    return text.NONE if seconds is None else f"{text.number(1000 * seconds)} ms"


def _hours(value: float | None) -> str:
    return text.NONE if value is None else f"{text.number(value)} h"


COMPLETION: Table = (
    Column("completed", _key("completed"), text.number, "max"),
    Column("mean JCT", _key("avg_jct_s"), text.duration, "min", "job completion time: from submission to the end"),
    Column("median JCT", _key("p50_jct_s"), text.duration, "min"),
    Column("p90 JCT", _key("p90_jct_s"), text.duration, "min"),
    Column("p99 JCT", _key("p99_jct_s"), text.duration, "min"),
    Column("mean queueing", _key("avg_queue_s"), text.duration, "min", "time without a GPU, restarts included"),
    Column("makespan", _key("makespan_s"), text.duration, "min", "from the first submission to the last finish"),
    Column("GPU use", _key("gpu_utilization"), text.percent, None, "busy GPU-seconds / (GPUs × makespan)"),
    Column("restarts", _key("restarts"), text.number),
    Column("frozen", _key("mean_frozen_fraction"), text.percent, None, "share of layers frozen, by GPU time"),
    Column(
        "decision, mean",
        lambda run: (run.get("decision_s") or {}).get("mean"),
        _milliseconds,
        None,
        "time a scheduling decision took, on the machine that ran this",
    ),
)
"""How soon jobs are done, and what the cluster did for it."""

FAIRNESS: Table = (
    Column("median queueing", _key("p50_queue_s"), text.duration, "min"),
    Column("p90 queueing", _key("p90_queue_s"), text.duration, "min"),
    Column("p99 queueing", _key("p99_queue_s"), text.duration, "min"),
    Column("worst 5 %", _key("worst_queue_s"), text.duration, "min", "mean queueing of the 5 % that wait longest"),
    Column("longest", _key("max_queue_s"), text.duration, "min", "the longest queueing of any job"),
    Column("mean ρ", _key("mean_rho"), text.number, "min", "finish-time fairness: JCT / JCT on 1/N of the cluster"),
    Column("p99 ρ", _key("p99_rho"), text.number, "min"),
    Column("worst ρ", _key("max_rho"), text.number, "min"),
    Column("ρ > 1", _key("unfair_fraction"), text.percent, "min", "jobs that sharing the cluster made slower"),
    Column("Jain", _key("jain_index"), text.number, "max", "Jain's index of 1/ρ: 1 where all jobs are treated alike"),
    Column("lost to restarts", _key("restart_gpu_hours"), _hours, "min", "GPU hours that restarts cost"),
)
"""Who waits, who is treated unfairly, and what moving jobs costs."""


def columns(runs: Sequence[Run], table: Table = COMPLETION) -> list[Column]:
    """The columns that have a value in some run; with several runs the speed-up over the first follows the mean JCT."""
    shown = [column for column in table if any(column.value(run) is not None for run in runs)]
    base = runs[0].get("avg_jct_s") if len(runs) > 1 and table is COMPLETION else None
    if base is None:
        return shown

    def speed_up(run: Run) -> float | None:
        jct_s = run.get("avg_jct_s")
        return base / jct_s if jct_s else None

    def show(value: float | None) -> str:
        return text.NONE if value is None else f"{value:.2f}×"

    note = f"mean JCT of {runs[0]['policy']} / mean JCT"
    at = 1 + next((i for i, column in enumerate(shown) if column.title == "mean JCT"), len(shown) - 1)
    return [*shown[:at], Column("speed-up", speed_up, show, "max", note), *shown[at:]]


def rows(runs: Sequence[Run], table: Table = COMPLETION) -> list[tuple[str, list[Cell]]]:
    """(policy, cells in the order of :func:`columns`). The best of a column is marked where the runs differ."""
    shown = columns(runs, table)
    best = [_best(column, runs) for column in shown]
    return [
        (
            str(run["policy"]),
            [
                Cell(column.show(value := column.value(run)), value, goal is not None and value == goal)
                for column, goal in zip(shown, best, strict=True)
            ],
        )
        for run in runs
    ]


def _best(column: Column, runs: Sequence[Run]) -> float | None:
    values = [value for run in runs if (value := column.value(run)) is not None]
    if column.better is None or len(set(values)) < 2:
        return None
    return min(values) if column.better == "min" else max(values)


def caveats(runs: Sequence[Run]) -> list[str]:
    """One sentence a run that did not finish all its jobs: its means leave them out, so they look better than they are."""
    out = []
    for run in runs:
        lost = {status: run.get(status, 0) for status in ("target_missed", "failed", "cancelled", "unfinished")}
        counts = [f"{count:,} {text.status_text(status)}" for status, count in lost.items() if count]
        if run.get("stalled"):
            out.append(f"{run['policy']} stalled: {run['stalled']}.")
        if not counts:
            continue
        left_out = any(lost[status] for status in ("failed", "cancelled", "unfinished"))
        tail = "; jobs that failed, were cancelled or are unfinished are out of the means" if left_out else ""
        out.append(f"{run['policy']}: {', '.join(counts)} of {run['jobs']:,} jobs{tail}.")
    return out
