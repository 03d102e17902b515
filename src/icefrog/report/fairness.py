"""How evenly a run treated its jobs: finish-time fairness, Jain's index, and what moving jobs cost.

Finish-time fairness (Themis, NSDI'20): ``rho = T_sh / T_id``, a job's completion time in the shared cluster over the one it
would have had in a private cluster of 1/N of the GPUs. As in Themis, N is the average contention: the number of jobs in the
system, averaged over the job's life, the job itself included. The private cluster runs the job as it was submitted: at
its logged time where 1/N of the GPUs is at least what it asked for, else slower in proportion (as Themis does):

    T_id = logged time x max(1, requested GPUs x N / GPUs)

``rho`` <= 1: sharing did the job no harm. One yardstick for all policies: neither sharing nor elasticity is in T_id. Jobs
without a logged time (live ones) have none, and neither has a job that did not run to its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from icefrog.profile import FloatArray
from icefrog.report.record import JobRecord, RunRecord, area_until

WORST = 0.05
"""Share of the jobs that count as the worst-off."""


def finish_time_rho(run: RunRecord) -> tuple[float | None, ...]:
    """rho of every job of the run, in its order; None where it is not defined."""
    contention = _contention(run)
    return tuple(_rho(job, n, run.cluster.num_gpus) for job, n in zip(run.jobs, contention, strict=True))


def _rho(job: JobRecord, contention: float, num_gpus: int) -> float | None:
    if job.jct_s is None or job.logged_s is None:
        return None
    return job.jct_s / (job.logged_s * max(1.0, job.requested_gpus * contention / num_gpus))


def _contention(run: RunRecord) -> list[float]:
    """N of every job: jobs in the system averaged over its life, itself included."""
    if not run.jobs:
        return []
    begins = np.array([job.submit_s for job in run.jobs])
    ends = np.array([run.end_s if job.finish_s is None else job.finish_s for job in run.jobs])
    times = np.concatenate((begins, ends))
    order = np.argsort(times, kind="stable")
    present = np.cumsum(np.concatenate((np.ones(len(begins)), -np.ones(len(ends))))[order])
    area = area_until(times[order], present, np.concatenate((begins, ends)))
    lives = ends - begins
    shared = area[len(begins) :] - area[: len(begins)]
    return [float(s / t) if t > 0 else 1.0 for s, t in zip(shared, lives, strict=True)]


def jain_index(values: Sequence[float]) -> float | None:
    """(sum x)^2 / (n sum x^2): 1 where all get the same, 1/n where one gets everything; None of nothing (Jain, 1984)."""
    x = np.asarray(values, dtype=np.float64)
    squares = float((x * x).sum())
    return float(x.sum() ** 2 / (len(x) * squares)) if squares > 0 else None


def worst_mean(values: Sequence[float], share: float = WORST) -> float | None:
    """The mean of the largest ``share`` of the values, of one at least; None of nothing."""
    if not values:
        return None
    count = max(1, round(share * len(values)))
    return float(np.mean(np.sort(np.asarray(values))[-count:]))


def restart_gpu_s(job: JobRecord, restart_s: float) -> float:
    """GPU-seconds that starts other than the first cost the job; a sharer counts half.

    They are held for ``restart_s`` without progress (less where the attempt ends earlier), after having been kept for it
    from when the old attempt had left until the new one was up. Work lost in crashes is not among them.
    """
    held = 0.0
    if restart_s > 0 and job.restarted_s:
        times, gpus = (np.array(column) for column in zip(*job.gpus, strict=True))
        begins: FloatArray = np.array(job.restarted_s)
        ends = np.minimum(begins + restart_s, np.append(begins[1:], np.inf))
        held = float((area_until(times, gpus, ends) - area_until(times, gpus, begins)).sum())
    return held + job.reserved_gpu_s


def fairness_summary(run: RunRecord, restart_s: float) -> Mapping[str, Any]:
    """What :func:`icefrog.report.summarise` adds to ``summary.json`` about fairness and restarts."""
    queue_s = [job.queue_s for job in run.jobs if job.jct_s is not None]
    rho = [value for value in finish_time_rho(run) if value is not None]
    return {
        "max_queue_s": max(queue_s, default=None),
        "worst_queue_s": worst_mean(queue_s),
        "mean_rho": float(np.mean(rho)) if rho else None,
        "p99_rho": float(np.percentile(rho, 99)) if rho else None,
        "max_rho": max(rho, default=None),
        "unfair_fraction": sum(value > 1.0 + 1e-9 for value in rho) / len(rho) if rho else None,
        "jain_index": jain_index([1.0 / value for value in rho if value > 0]),
        "restart_s": restart_s,
        "restart_gpu_hours": sum(restart_gpu_s(job, restart_s) for job in run.jobs) / 3600,
    }
