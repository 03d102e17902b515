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
    if problem.num_jobs == 0:
        return 1.0
    if problem.num_gpus == 0:
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
    line = np.flatnonzero(problem.must_run)
    if len(line) == 0 or problem.num_gpus == 0:
        return forced
    need = fewest_gpus(problem, 0.0)
    if graph.size == 0:
        forced[_taken_alone(line, need, problem.num_gpus)] = True
        return forced
    forced[_taken_with_pairs(problem, graph, line, need)] = True
    return forced


def _taken_alone(line: Ints, need: Ints, free: int) -> list[int]:
    taken = []
    for job, wanted in zip(line.tolist(), need[line].tolist(), strict=True):
        if wanted <= free:
            taken.append(job)
            free -= wanted
    return taken


def _taken_with_pairs(problem: Problem, graph: SharingGraph, line: Ints, need: Ints) -> list[int]:
    """In order: as long a stretch as fits, then pass over the job that does not, and so on."""
    refused = _Refused(graph, need)
    taken: list[int] = []
    rest = line.tolist()
    while rest:
        low, high = 0, 1  # rest[:low] fits with those taken; gallop, then bisect
        while high <= len(rest) and _fits(problem, graph, need, [*taken, *rest[:high]]):
            low, high = high, 2 * high
        high = min(high, len(rest) + 1)
        while high - low > 1:
            mid = (low + high) // 2
            if _fits(problem, graph, need, [*taken, *rest[:mid]]):
                low = mid
            else:
                high = mid
        taken += rest[:low]
        if low == len(rest):
            break
        refused.add(rest[low])
        rest = [job for job in rest[low + 1 :] if not refused.implies(job)]
    return taken


class _Refused:
    """Jobs that did not fit. One that needs as much and has no partner that those lack will not fit either."""

    def __init__(self, graph: SharingGraph, need: Ints) -> None:
        self.need = need
        self.vertex = {job: i for i, job in enumerate(graph.jobs.tolist())}
        self.edges = graph.bottleneck > -np.inf
        self.least_alone = int(np.iinfo(np.int64).max)
        self.sharers: list[int] = []

    def add(self, job: int) -> None:
        self.sharers += [job] if job in self.vertex else []
        self.least_alone = min(self.least_alone, int(self.need[job]))

    def implies(self, job: int) -> bool:
        if job not in self.vertex:
            return bool(self.need[job] >= self.least_alone)
        row = self.edges[self.vertex[job]]
        for other in self.sharers:
            if self.need[job] >= self.need[other]:
                extra = row & ~self.edges[self.vertex[other]]
                extra[self.vertex[other]] = False
                if not extra.any():
                    return True
        return False


def _fits(problem: Problem, graph: SharingGraph, need: Ints, jobs: list[int]) -> bool:
    wanted = np.zeros(problem.num_jobs, np.int64)
    wanted[jobs] = need[jobs]
    return _saves_enough(problem.num_gpus, wanted, graph, graph.bottleneck > -np.inf)
