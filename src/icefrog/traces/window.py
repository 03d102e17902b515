"""Parts of a trace: a window of time, all days pooled, a sample, a denser load. All return new traces."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import datetime, timedelta

import numpy as np

from icefrog.errors import UserError
from icefrog.traces.trace import Trace


def window(trace: Trace, start: datetime | None = None, hours: float | None = None) -> Trace:
    """The jobs submitted in [start, start + hours); ``submit_s`` then counts from ``start``.

    ``start`` None: from the first job. ``hours`` None: to the end.

    Raises:
        UserError: no job in the window, or ``start`` given for a trace without absolute times.
    """
    if hours is not None and not (math.isfinite(hours) and hours > 0):
        raise UserError(f"hours: got {hours}, allowed: a number > 0", "leave it out to take the whole trace")
    begin_s = _begin_s(trace, start)
    end_s = math.inf if hours is None else begin_s + hours * 3600
    jobs = tuple(replace(job, submit_s=job.submit_s - begin_s) for job in trace.jobs if begin_s <= job.submit_s < end_s)
    if not jobs:
        raise UserError(f"no job was submitted in this window; {_span(trace)}", "choose a start within the trace")
    report = trace.report.drop("outside the window", len(trace.jobs) - len(jobs))
    zero = None if trace.start is None else trace.start + timedelta(seconds=begin_s)
    return replace(trace, jobs=jobs, report=report, start=zero)


def pool_days(trace: Trace, first_hour: int, hours: int) -> Trace:
    """The jobs submitted between ``first_hour`` and ``first_hour + hours`` of any day, laid over one another.

    ``submit_s`` counts from ``first_hour``; the result has no absolute start.

    Raises:
        UserError: the trace has no absolute times.
    """
    if trace.start is None:
        raise UserError(f"{trace.source}: days cannot be pooled, its times are relative", "use a log with dates")
    midnight = trace.start.replace(hour=0, minute=0, second=0, microsecond=0)
    offset_s = (trace.start - midnight).total_seconds() - first_hour * 3600
    placed = [(math.fmod(job.submit_s + offset_s + 86400.0, 86400.0), job) for job in trace.jobs]
    inside = sorted((at, index) for index, (at, _) in enumerate(placed) if at < hours * 3600)
    jobs = tuple(replace(placed[index][1], submit_s=at) for at, index in inside)
    report = trace.report.drop(
        f"outside hours {first_hour}-{first_hour + hours} of the day", len(trace.jobs) - len(jobs)
    )
    return Trace(jobs, report, f"{trace.source}, hours {first_hour}-{first_hour + hours} of all days", None)


def sample(trace: Trace, num_jobs: int, seed: int, *, load: float = 1.0) -> Trace:
    """``num_jobs`` x ``load`` jobs (rounded) drawn without replacement, in order of submission.

    Raises:
        UserError: fewer jobs in the trace than asked for, or none asked for; ``load`` is not a finite number > 0.
    """
    _check_load(load)
    wanted = round(num_jobs * load)
    if not 1 <= wanted <= len(trace.jobs):
        times = "" if load == 1.0 else f" x load {load:g}"
        raise UserError(
            f"jobs: got {num_jobs}{times}, allowed: 1..{len(trace.jobs)}", "the trace (or its window) has no more"
        )
    chosen = np.sort(np.random.default_rng([seed, 1]).choice(len(trace.jobs), size=wanted, replace=False))
    jobs = tuple(trace.jobs[int(index)] for index in chosen)
    return replace(trace, jobs=jobs, report=trace.report.drop("not sampled", len(trace.jobs) - wanted))


def scale_load(trace: Trace, load: float) -> Trace:
    """Divide the gaps between submissions by ``load``.

    Raises:
        UserError: ``load`` is not a finite number > 0.
    """
    _check_load(load)
    return replace(trace, jobs=tuple(replace(job, submit_s=job.submit_s / load) for job in trace.jobs))


def limit_gpus(trace: Trace, num_gpus: int) -> Trace:
    """Without the jobs that ask for more than ``num_gpus``; the report counts them."""
    jobs = tuple(job for job in trace.jobs if job.num_gpus <= num_gpus)
    report = trace.report.drop(f"asks for more than {num_gpus} GPUs", len(trace.jobs) - len(jobs))
    return replace(trace, jobs=jobs, report=report)


def _check_load(load: float) -> None:
    if not (math.isfinite(load) and load > 0):
        raise UserError(f"load: got {load}, allowed: a number > 0", "1 keeps the trace as it is, 2 doubles its load")


def _begin_s(trace: Trace, start: datetime | None) -> float:
    if start is None:
        return trace.jobs[0].submit_s if trace.jobs else 0.0
    if trace.start is None:
        raise UserError(f"start: {trace.source} has relative times only", "leave the start out")
    if start.tzinfo is not None:
        raise UserError(f"start: got {start.isoformat()}, allowed: a local time without zone", "leave the zone out")
    return (start - trace.start).total_seconds()


def _span(trace: Trace) -> str:
    if not trace.jobs:
        return "the trace is empty"
    first, last = trace.jobs[0].submit_s, trace.jobs[-1].submit_s
    if trace.start is None:
        return f"the trace spans {first:.0f} s to {last:.0f} s"
    ends = [(trace.start + timedelta(seconds=at)).isoformat(sep=" ") for at in (first, last)]
    return f"the trace spans {ends[0]} to {ends[1]}"
