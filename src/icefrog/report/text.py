"""How values are written for people: durations, counts over time, numbers with a unit."""

from __future__ import annotations

from collections.abc import Iterable

from icefrog.report.record import JobRecord, StepSeries

ARROW = "→"
NONE = "–"


def duration(seconds: float | None) -> str:
    """``42.0 s``, ``3 min 20 s``, ``5 h 07 min``, ``2 d 04 h``."""
    if seconds is None:
        return NONE
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def time_unit(span_s: float) -> tuple[str, float]:
    """The unit of a time axis of this length, and its seconds."""
    if span_s < 600:
        return "s", 1.0
    if span_s < 4 * 3600:
        return "min", 60.0
    if span_s < 10 * 86400:
        return "h", 3600.0
    return "days", 86400.0


def number(value: float | None, digits: int = 3) -> str:
    """Significant digits, no exponent; a dash for nothing."""
    if value is None:
        return NONE
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.{max(0, digits - len(str(int(abs(value)))))}f}"


def percent(value: float | None) -> str:
    """``87.5 %``."""
    return NONE if value is None else f"{100 * value:.1f} %"


def gpus_over_time(job: JobRecord, limit: int | None = 8) -> str:
    """``1→2→4``: the GPU counts a job ran with, in order. Times without a GPU are left out; half a GPU is a shared one."""
    return chain((value for _, value in job.gpus if value > 0), limit)


def frozen_over_time(job: JobRecord, limit: int | None = 8) -> str:
    """``0→3→2``: the boundary, in frozen layers."""
    return chain((value for _, value in job.frozen), limit)


def chain(values: Iterable[float], limit: int | None = 8) -> str:
    """Values in order, repeats merged, joined by arrows; with more than ``limit`` the middle is left out."""
    kept: list[str] = []
    for value in values:
        text = _count(value)
        if not kept or kept[-1] != text:
            kept.append(text)
    if not kept:
        return NONE
    if limit is not None and len(kept) > limit:
        kept = [*kept[: limit - 2], "…", kept[-1]]
    return ARROW.join(kept)


def _count(value: float) -> str:
    if value == 0.5:
        return "½"
    return f"{value:g}"


def peak(series: StepSeries) -> float:
    """The largest value; 0 of nothing."""
    return max((value for _, value in series), default=0.0)


def target_text(job: JobRecord) -> str:
    """``yes, accuracy 0.972 (target 0.97)``: whether the target was met, and by how much."""
    if job.target is None:
        return "no target" if job.status == "completed" else status_text(job.status)
    goal = f"{job.target.metric} {job.target.value:g}"
    if not job.metric:
        return f"yes, {goal}" if target_reached(job) else f"no, {goal} ({status_text(job.status)})"
    met = next((value for _, value in job.metric if job.target.reached(value)), None)
    if met is not None:
        return f"yes, {job.target.metric} {met:.4g} (target {job.target.value:g})"
    last = job.metric[-1][1]
    return f"no, {job.target.metric} {last:.4g} (target {job.target.value:g}; {status_text(job.status)})"


def status_text(status: str) -> str:
    """A status in words."""
    return status.replace("_", " ")


def target_reached(job: JobRecord) -> bool | None:
    """Whether the job met its target; None if it has none."""
    if job.target is None:
        return None
    return job.time_to_target_s is not None


def time_to_accuracy(job: JobRecord) -> float | None:
    """Seconds from submission to the target; for a job without one, to its completion."""
    return job.time_to_target_s if job.target is not None else job.jct_s
