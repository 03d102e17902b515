"""The max-min value by binary search over the distinct shares, and which forced jobs fit (section 8).

At a threshold t every job needs g_k(t), the fewest GPUs that reach it. A pair that may share with both reaching t saves
g_i(t) + g_j(t) - 1, so the fewest GPUs for all is sum(g) minus a maximum-weight matching, and feasibility is monotone in t.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from icefrog.policies.iceshare.matching import SharingGraph, reaches
from icefrog.policies.iceshare.problem import Problem

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def fewest_gpus(problem: Problem, threshold: float) -> Ints:
    """(N,) g_k: the fewest GPUs whose fairness reaches the threshold; ``num_gpus + 1`` where none does."""
    none = problem.num_gpus + 1
    fits = (problem.opt_fairness >= threshold) & (problem.opt_gpus < none)
    return np.minimum.reduceat(np.where(fits, problem.opt_gpus, none), problem.opt_ptr[:-1])


def everyone_reaches(problem: Problem, graph: SharingGraph, threshold: float) -> bool:
    """Whether all jobs can have a fairness of at least ``threshold`` > 0 at once."""
    need = fewest_gpus(problem, threshold)
    return _saves_enough(problem.num_gpus, need, graph, graph.bottleneck >= threshold)


def _saves_enough(num_gpus: int, need: Ints, graph: SharingGraph, edges: Bools) -> bool:
    """Whether pairing can bring the total need down to ``num_gpus``."""
    required = int(need.sum()) - num_gpus
    if required <= 0 or graph.size == 0:
        return required <= 0
    at = need[graph.jobs]
    if int(at.sum()) - (int(np.count_nonzero(at)) + 1) // 2 < required:
        return False
    saving = np.where(edges, at[:, None] + at - 1, 0).astype(np.float64)
    return reaches(saving, required)


def max_min(problem: Problem, graph: SharingGraph) -> float:
    """t*: the largest value that the smallest fairness over all jobs can have; 0 when somebody must wait.

    Fairness is share / weight (weight * share under ``literal_weights``).
    """
    if problem.num_jobs == 0 or problem.num_gpus == 0:
        return 0.0
    inside = problem.opt_gpus <= problem.num_gpus
    top = np.maximum.reduceat(np.where(inside, problem.opt_fairness, 0.0), problem.opt_ptr[:-1])
    values = problem.opt_fairness[inside]
    if graph.size:
        top[graph.jobs] = np.maximum(top[graph.jobs], np.max(graph.bottleneck, axis=1))
        values = np.concatenate([values, problem.shr_fairness])
    values = np.unique(values[values <= top.min()])
    if len(values) == 0 or not everyone_reaches(problem, graph, float(values[0])):
        return 0.0
    low, high = 0, len(values)  # values[low] is feasible, values[high] is not
    while high - low > 1:
        mid = (low + high) // 2
        if everyone_reaches(problem, graph, float(values[mid])):
            low = mid
        else:
            high = mid
    return float(values[low])


def forced_jobs(problem: Problem, graph: SharingGraph) -> Bools:
    """(N,) the ``must_run`` jobs that run for certain: in the order given, each that fits with those before it.

    A forced job may be paired with one that is not. A job that does not fit is passed over, and those behind it are
    still tried: the cluster is never left idle for it.
    """
    forced = np.zeros(problem.num_jobs, dtype=bool)
    waiting_line = np.flatnonzero(problem.must_run)
    if len(waiting_line) == 0 or problem.num_gpus == 0:
        return forced
    need = fewest_gpus(problem, 0.0)
    if _fits(problem, graph, need, waiting_line):
        forced[waiting_line] = True
        return forced
    vertex = np.zeros(problem.num_jobs, dtype=bool)
    vertex[graph.jobs] = True
    refused = problem.num_gpus + 1  # a job without partners that needs this much did not fit, nor will a larger one
    taken: list[int] = []
    for job in waiting_line.tolist():
        if not vertex[job] and need[job] >= refused:
            continue
        if _fits(problem, graph, need, np.array([*taken, job])):
            taken.append(job)
        elif not vertex[job]:
            refused = int(need[job])
    forced[taken] = True
    return forced


def _fits(problem: Problem, graph: SharingGraph, need: Ints, jobs: Ints) -> bool:
    wanted = np.zeros(problem.num_jobs, np.int64)
    wanted[jobs] = need[jobs]
    return _saves_enough(problem.num_gpus, wanted, graph, graph.bottleneck > -np.inf)
