"""An answer of the solver: its numbers, the JSON of ``icefrog solve``, and the check that it keeps every rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from icefrog.policies.iceshare.menu import FLOOR_SLACK
from icefrog.policies.iceshare.problem import SHARED_GPUS, Problem

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

GAP_TOLERANCE = 1e-9
"""A sum within this of its bound, relatively, is reported as optimal (gap 0)."""


class InvalidSolutionError(Exception):
    """A solution breaks a rule of its problem: a fault of the solver, never acted upon."""


@dataclass(frozen=True, eq=False)
class Solution:
    """One decision. Per-job arrays follow ``problem.job_ids``.

    ``option``: flat index of the exclusive option, -1: none. ``shared_option``: flat index of the shared option, -1: does
    not share. ``mate``: job on the same GPU, -1. ``max_min``: t*, the best possible min_share. ``floor``: rho * t*.
    ``must_run_waiting``: jobs that had to run and did not fit. ``note``: what the reader should know ("": nothing).
    """

    problem: Problem
    option: Ints
    shared_option: Ints
    mate: Ints
    max_min: float
    floor: float
    must_run_waiting: tuple[str, ...]
    bound: float
    gap: float
    method: str
    note: str = ""
    solve_s: float = 0.0

    @property
    def gpus(self) -> Floats:
        """(N,) GPUs of every job: 0 waits, 0.5 shares one."""
        alone = np.where(self.option >= 0, self.problem.opt_gpus[self.option], 0).astype(np.float64)
        return np.where(self.shared_option >= 0, SHARED_GPUS, alone)

    @property
    def shares(self) -> Floats:
        """(N,) share of every job, 0 for the waiting."""
        out = np.where(self.option >= 0, self.problem.opt_share[self.option], 0.0)
        at = np.flatnonzero(self.shared_option >= 0)
        out[at] = self.problem.shr_share[self.shared_option[at]]
        return out

    @property
    def min_share(self) -> float:
        """The smallest share / weight (weight * share under ``literal_weights``) over all jobs; 1 if there is none."""
        if self.problem.num_jobs == 0:
            return 1.0
        return float(self.problem.fairness(self.shares, np.arange(self.problem.num_jobs)).min())

    @property
    def sum_share(self) -> float:
        """What was maximised, and what ``bound`` bounds: the sum of worths; weight * share without ages and urgencies."""
        return total_worth(self.problem, self.option, self.shared_option)

    @property
    def gpus_used(self) -> int:
        """Whole GPUs in use; a pair uses one."""
        return round(float(self.gpus.sum()))

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Ids of the jobs on one GPU, in the order of submission."""
        ids = self.problem.job_ids
        first = np.flatnonzero(self.mate > np.arange(len(self.mate))).tolist()
        return tuple((ids[i], ids[int(self.mate[i])]) for i in first)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Ids of the jobs that get nothing."""
        idle = np.flatnonzero((self.option < 0) & (self.shared_option < 0)).tolist()
        return tuple(self.problem.job_ids[k] for k in idle)

    @property
    def assignment(self) -> dict[str, dict[str, Any]]:
        """id -> {"gpus", "share"} of every job that runs; sharers also have "share_option", the index in their list."""
        out: dict[str, dict[str, Any]] = {}
        gpus, shares = self.gpus.tolist(), self.shares.tolist()
        inner = (self.shared_option - self.problem.shr_ptr[:-1]).tolist()
        for k, job_id in enumerate(self.problem.job_ids):
            if gpus[k] == SHARED_GPUS:
                out[job_id] = {"gpus": SHARED_GPUS, "share": shares[k], "share_option": inner[k]}
            elif gpus[k] > 0:
                out[job_id] = {"gpus": int(gpus[k]), "share": shares[k]}
        return out

    def to_json(self) -> dict[str, Any]:
        """The JSON contract of ``icefrog solve``, outbound."""
        return {
            "min_share": self.min_share,
            "sum_share": self.sum_share,
            "bound": self.bound,
            "gap": self.gap,
            "gpus_used": self.gpus_used,
            "assignment": self.assignment,
            "pairs": [list(pair) for pair in self.pairs],
            "waiting": list(self.waiting),
            "method": self.method,
            "solve_s": self.solve_s,
            "max_min": self.max_min,
            "must_run_waiting": list(self.must_run_waiting),
            "note": self.note,
        }


def total_worth(problem: Problem, option: Ints, shared_option: Ints) -> float:
    """The sum of the chosen options' worths; (N,) flat indices, -1: none."""
    alone, shared = option[option >= 0], shared_option[shared_option >= 0]
    return float(problem.opt_worth[alone].sum() + problem.shr_worth[shared].sum())


def bound_and_gap(total: float, bound: float) -> tuple[float, float]:
    """The bound to report and the gap (bound - total) / bound: exactly 0 when proven equal to within 1e-9."""
    if bound - total <= GAP_TOLERANCE * max(abs(bound), 1e-300):
        return total, 0.0
    return bound, (bound - total) / bound


def verify(problem: Problem, solution: Solution) -> None:
    """Check every rule against the problem itself (practice S12).

    Raises:
        InvalidSolutionError: an option of another job, too many GPUs, a pair that does not fit, a fairness below the floor,
            a forced job that waits, or a sum above the bound.
    """
    jobs = np.arange(problem.num_jobs)
    alone, shared = solution.option >= 0, solution.shared_option >= 0
    _require(not np.any(alone & shared), "a job has two options")
    _require(bool(np.all(problem.opt_job[solution.option[alone]] == jobs[alone])), "an option of another job")
    _require(bool(np.all(problem.shr_job[solution.shared_option[shared]] == jobs[shared])), "an option of another job")
    _require(bool(np.all((solution.mate >= 0) == shared)), "a job shares with nobody")
    a, b = jobs[shared], solution.mate[shared]
    _require(bool(np.all(solution.mate[b] == a)) and not np.any(a == b), "pairs are not mutual")
    first, second = solution.shared_option[a], solution.shared_option[b]
    _require(bool(np.all(problem.fits_together(first, second))), "a pair does not fit on its GPU")
    used = int(problem.opt_gpus[solution.option[alone]].sum()) + len(a) // 2
    _require(used <= problem.num_gpus, f"{used} GPUs are used of {problem.num_gpus}")
    if problem.num_jobs:
        least = solution.floor * (1.0 - FLOOR_SLACK)
        _require(solution.min_share >= least, f"a fairness of {solution.min_share} is below the floor {solution.floor}")
    excused = set(solution.must_run_waiting)
    idle = problem.must_run & ~alone & ~shared
    stuck = [problem.job_ids[k] for k in np.flatnonzero(idle).tolist()]
    _require(all(job in excused for job in stuck), f"jobs that must run wait: {stuck}")
    total = solution.sum_share
    _require(
        total <= solution.bound + 1e-6 * max(1.0, abs(total)), f"the sum {total} exceeds its bound {solution.bound}"
    )


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise InvalidSolutionError(what)
