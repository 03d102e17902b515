"""Who shares with whom, with as few moves as possible. The solver decides *who shares*; its values do not know that a
job which changes its partner has to move, and to restart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from icefrog.policies.iceshare import Problem, Solution
from icefrog.policies.iceshare.matching import exact_matching

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
        move_worth: sum of shares that one avoided move may cost.

    Returns:
        A perfect pairing of the same jobs; every pair fits, and no job falls below the solution's fairness floor.
    """
    found = _of(solution)
    jobs = sorted(found.option)
    if not jobs or len(jobs) > _EXACT_UP_TO:
        return found
    combos = {
        (i, j): combo for n, i in enumerate(jobs) for j in jobs[n + 1 :] if (combo := _combination(solution, i, j))
    }
    weight = np.zeros((len(jobs), len(jobs)))
    place = {job: n for n, job in enumerate(jobs)}
    for i, j in combos:
        weight[place[i], place[j]] = weight[place[j], place[i]] = _PAIRED + _ease(solution.problem, i, j)
    mate = exact_matching(weight)
    if np.any(mate < 0):
        return found
    pairs = tuple((jobs[n], jobs[int(m)]) for n, m in enumerate(mate) if n < m)
    option = {job: flat for i, j in pairs for job, flat in zip((i, j), combos[i, j], strict=True)}
    steady = Pairing(pairs, option)
    saved = _moves(solution.problem, found) - _moves(solution.problem, steady)
    loss = _worth(solution.problem, found) - _worth(solution.problem, steady)
    return steady if loss <= move_worth * max(saved, 0) else found


def _of(solution: Solution) -> Pairing:
    mates = solution.mate.tolist()
    pairs = tuple((i, j) for i, j in enumerate(mates) if i < j)
    return Pairing(pairs, {job: int(solution.shared_option[job]) for pair in pairs for job in pair})


def _combination(solution: Solution, i: int, j: int) -> tuple[int, int] | None:
    """The two shared options with the largest sum of weighted shares that fit on one GPU, or None."""
    problem = solution.problem
    first = np.arange(problem.shr_ptr[i], problem.shr_ptr[i + 1])
    second = np.arange(problem.shr_ptr[j], problem.shr_ptr[j + 1])
    least = solution.floor * (1.0 - 1e-9)
    fair = (problem.shr_fairness[first] >= least)[:, None] & (problem.shr_fairness[second] >= least)
    fits = problem.fits_together(first[:, None], second) & fair
    if not fits.any():
        return None
    value = problem.weight[i] * problem.shr_share[first][:, None] + problem.weight[j] * problem.shr_share[second]
    row, column = np.unravel_index(int(np.where(fits, value, -np.inf).argmax()), fits.shape)
    return int(first[row]), int(second[column])


def _ease(problem: Problem, i: int, j: int) -> float:
    if problem.partner[i] == j and problem.partner[j] == i:
        return _STAYS
    return _JOINS if _homeless(problem, i) or _homeless(problem, j) else 0.0


def _homeless(problem: Problem, job: int) -> bool:
    """Whether it holds no single GPU that a partner could join it on (it waits, or shrinks: it starts anew anyway)."""
    return bool(np.isnan(problem.current[job]) or problem.current[job] > 1.0)


def _moves(problem: Problem, pairing: Pairing) -> int:
    """Pairs of which one member must leave the GPU it is on."""
    return sum(_ease(problem, i, j) == 0.0 for i, j in pairing.pairs)


def _worth(problem: Problem, pairing: Pairing) -> float:
    return float(sum(problem.weight[job] * problem.shr_share[flat] for job, flat in pairing.option.items()))
