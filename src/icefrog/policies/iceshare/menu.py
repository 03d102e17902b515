"""What every job may choose once the floor is known: the input of the second stage (largest sum under the floor)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from icefrog.policies.iceshare.problem import SHARED_GPUS, Problem

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

KEEP_BONUS = 1e-10
"""What the running configuration is worth more, relatively: decides among equals, invisible in the sum (tolerance 1e-9)."""
FLOOR_SLACK = 1e-12
"""Relative rounding allowed when a fairness is compared with the floor rho * t*."""


@dataclass(frozen=True, eq=False)
class Menu:
    """Flat lists of items, job k owning ``ptr[k]:ptr[k+1]`` (none, if all it can do is share).

    ``option``: index of the exclusive option, -1 = wait. ``value``: its worth in the sum, the running configuration a trifle
    more. ``shared_value``: (S,) the same for the shared options, -inf below the floor.
    """

    ptr: Ints
    cost: Ints
    value: Floats
    option: Ints
    shared_value: Floats


def build_menu(problem: Problem, floor: float, forced: Bools) -> Menu:
    """The options of fairness >= ``floor``; waiting only with a floor of 0, and not for a forced job."""
    least = floor * (1.0 - FLOOR_SLACK)
    allowed = (problem.opt_gpus <= problem.num_gpus) & (problem.opt_fairness >= least)
    may_wait = ~forced if floor <= 0.0 else np.zeros_like(forced)
    jobs = problem.opt_job
    weighted = problem.opt_worth.copy()
    weighted[problem.opt_gpus == problem.current[jobs]] *= 1.0 + KEEP_BONUS

    sizes = np.bincount(jobs[allowed], minlength=problem.num_jobs) + may_wait
    ptr = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    cost, value = np.zeros(ptr[-1], np.int64), np.zeros(ptr[-1])
    option = np.full(ptr[-1], -1, np.int64)
    place = np.ones(ptr[-1], dtype=bool)
    place[ptr[:-1][may_wait]] = False  # the first item of those who may wait
    cost[place], value[place] = problem.opt_gpus[allowed], weighted[allowed]
    option[place] = np.flatnonzero(allowed)

    owner = problem.shr_job
    shared = problem.shr_worth.copy()
    shared[problem.current[owner] == SHARED_GPUS] *= 1.0 + KEEP_BONUS
    shared[problem.shr_fairness < least] = -np.inf
    return Menu(ptr, cost, value, option, shared)
