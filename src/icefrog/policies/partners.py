"""Who shares with whom, with as few moves as possible. The solver decides *who shares*; its values do not know that a
job which changes its partner has to move, and to restart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from icefrog.policies.iceshare import Problem, Solution
from icefrog.policies.iceshare.matching import exact_matching

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_PAIRED = 1000.0  # far above what follows: everybody must keep a partner
_STAYS, _JOINS = 3.0, 1.0  # partners stay together (nobody moves); a waiting job joins a running one (nobody moves)
_EXACT_UP_TO = 200


@dataclass(frozen=True, slots=True)
class Pairing:
    """``pairs``: indices of jobs; ``option``: job -> flat index of its shared option."""

    pairs: tuple[tuple[int, int], ...]
    option: dict[int, int]


def steady_pairing(solution: Solution, move_worth: float) -> Pairing:
    """The solution's sharers, paired with the fewest moves, unless that loses too much.

    Args:
        solution: verified.
        move_worth: sum of shares (times the sharers' mean urgency) that one avoided move may cost.

    Returns:
        A perfect pairing of the same jobs; every pair fits, and no job falls below the solution's fairness floor.
    """
    found = _of(solution)
    problem = solution.problem
    jobs = np.array(sorted(found.option), dtype=np.int64)
    if not len(jobs) or len(jobs) > _EXACT_UP_TO or _moves(problem, found) == 0:
        return found
    value, first = _best_combinations(solution, jobs)
    weight = np.where(value > -np.inf, _PAIRED + _ease(problem, jobs), 0.0)
    np.fill_diagonal(weight, 0.0)
    mate = exact_matching(weight)
    if np.any(mate < 0):
        return found
    pairs = tuple((int(jobs[n]), int(jobs[m])) for n, m in enumerate(mate.tolist()) if n < m)
    steady = Pairing(pairs, {int(jobs[n]): int(first[n, m]) for n, m in enumerate(mate.tolist())})
    saved = _moves(problem, found) - _moves(problem, steady)
    loss = _worth(problem, found) - _worth(problem, steady)
    return steady if loss <= move_worth * max(saved, 0) * float(problem.urgency[jobs].mean()) else found


def _of(solution: Solution) -> Pairing:
    mates = solution.mate.tolist()
    pairs = tuple((i, j) for i, j in enumerate(mates) if i < j)
    return Pairing(pairs, {job: int(solution.shared_option[job]) for pair in pairs for job in pair})


def _best_combinations(solution: Solution, jobs: Ints) -> tuple[Floats, Ints]:
    """For every two jobs (V, V): the largest sum of their worths that fits on one GPU, -inf: none; and the flat shared
    option that the first of the two then runs."""
    problem = solution.problem
    counts = np.diff(problem.shr_ptr)[jobs]
    column = np.arange(int(counts.max()))
    option = np.where(column < counts[:, None], problem.shr_ptr[jobs][:, None] + column, -1)  # (V, Q)
    allowed = (option >= 0) & (problem.shr_fairness[option] >= solution.floor * (1.0 - 1e-9))
    worth = np.where(allowed, problem.shr_worth[option], -np.inf)
    size, width = option.shape
    fits = problem.fits_together(option[:, None, :, None], option[None, :, None, :])  # (V, V, Q, Q)
    total = np.where(fits, worth[:, None, :, None] + worth[None, :, None, :], -np.inf)
    # Symmetric in the two jobs up to ties, which must be broken the same way: the later job takes the earlier one's choice.
    best = total.reshape(size, size, width * width).argmax(axis=2)
    row, other = np.divmod(best, width)
    upper = np.triu(np.ones((size, size), dtype=np.bool_))
    own = np.where(upper, row, other.T)
    value = total.max(axis=(2, 3))
    return value, option[np.arange(size)[:, None], own]


def _ease(problem: Problem, jobs: Ints) -> Floats:
    """(V, V) how easily two sharers come together: partners stay, a job without a single GPU of its own joins another."""
    current, place = problem.current[jobs], {job: n for n, job in enumerate(jobs.tolist())}
    homeless = np.isnan(current) | (current > 1.0)  # it waits, or shrinks: it starts anew anyway
    ease = np.where(homeless[:, None] | homeless, _JOINS, 0.0)
    for n, partner in enumerate(problem.partner[jobs].tolist()):
        m = place.get(partner, -1)
        if m >= 0 and problem.partner[partner] == jobs[n]:
            ease[n, m] = _STAYS
    return ease


def _moves(problem: Problem, pairing: Pairing) -> int:
    """Pairs of which one member must leave the GPU it is on."""
    held = np.nan_to_num(problem.current, nan=np.inf) <= 1.0
    return sum(bool(held[i] and held[j] and problem.partner[i] != j) for i, j in pairing.pairs)


def _worth(problem: Problem, pairing: Pairing) -> float:
    return float(sum(problem.shr_worth[flat] for flat in pairing.option.values()))
