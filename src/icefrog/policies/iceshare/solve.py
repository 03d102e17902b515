"""One decision: the max-min value, then the largest sum above the floor, checked before it is handed out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from icefrog.policies.iceshare.knapsack import solve_knapsack
from icefrog.policies.iceshare.matching import SharingGraph, sharing_graph
from icefrog.policies.iceshare.menu import KEEP_BONUS, Menu, build_menu
from icefrog.policies.iceshare.milp import Reference
from icefrog.policies.iceshare.pairing import settle_pairs
from icefrog.policies.iceshare.problem import SHARED_GPUS, Problem
from icefrog.policies.iceshare.sharing import PairedKnapsack
from icefrog.policies.iceshare.solution import Solution, bound_and_gap, total_worth, verify
from icefrog.policies.iceshare.threshold import forced_jobs, max_min

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Choice:
    """Flat options per job (-1: none) and the proven bound on the sum."""

    option: Ints
    shared_option: Ints
    mate: Ints
    bound: float


def solve(
    problem: Problem,
    rho: float | None = None,
    method: Literal["exact", "milp"] = "exact",
    *,
    tolerance: float = 0.0,
    time_limit_s: float = 60.0,
    clock: Callable[[], float] | None = None,
) -> Solution:
    """Decide for all jobs together (Eq. 17, 18 and section 8's decisions).

    Maximises sum(weight * share) subject to share / weight >= rho * t* for every job, t* being the largest value that the
    smallest share / weight can have (0 as soon as somebody must wait). ``must_run`` jobs do not wait; if they cannot all
    run, they are taken in the order given as far as they fit, and the rest is named in ``must_run_waiting``. Among equal
    sums the running configuration wins; otherwise equal problems give equal answers.

    Args:
        problem: what to decide.
        rho: fairness in [0, 1]; default: the problem's.
        method: ``exact``: this package's solver. ``milp``: the binary program with HiGHS, the reference.
        tolerance: relative gap between sum and bound that is good enough; 0: proven optimal wherever that can be had.
        time_limit_s: per stage, ``milp`` only.
        clock: seconds from anywhere; fills ``solve_s`` (0 without: a decision does not know the time).

    Raises:
        ValueError: rho outside [0, 1], or an unknown method.
        InvalidSolutionError: a fault of the solver; an answer that breaks a rule is never returned.
    """
    rho = problem.rho if rho is None else rho
    if not 0.0 <= rho <= 1.0:
        raise ValueError(f"rho must be within [0, 1], got {rho}")
    if method not in ("exact", "milp"):
        raise ValueError(f"method must be 'exact' or 'milp', got {method!r}")
    start = clock() if clock else 0.0
    graph = sharing_graph(problem)
    solution = (
        _by_milp(problem, graph, rho, time_limit_s) if method == "milp" else _exact(problem, graph, rho, tolerance)
    )
    verify(problem, solution)
    return replace(solution, solve_s=clock() - start) if clock else solution


def _exact(problem: Problem, graph: SharingGraph, rho: float, tolerance: float = 0.0) -> Solution:
    t_star = max_min(problem, graph)
    floor = rho * t_star
    forced = forced_jobs(problem, graph) if floor <= 0.0 else problem.must_run
    menu = build_menu(problem, floor, forced)
    choice = _select(problem, graph, menu, tolerance)
    choice = _unless_current_is_as_good(problem, graph, menu, choice)
    note = ""
    if graph.left_out:
        note = f"too many sharers: the last {graph.left_out} were not considered for sharing, nor by the bound"
    return _solution(problem, choice, t_star, floor, forced, "exact", note)


def _select(problem: Problem, graph: SharingGraph, menu: Menu, tolerance: float) -> _Choice:
    n = problem.num_jobs
    nobody = np.full(n, -1, np.int64)
    if graph.size == 0 or not np.any(menu.shared_value > -np.inf):
        best = solve_knapsack(menu.ptr, menu.cost, menu.value, problem.num_gpus)
        choice = _Choice(menu.option[best.choice], nobody, nobody, 0.0)
        return replace(choice, bound=_total(problem, choice) + best.excess)
    paired = PairedKnapsack(menu, graph, problem.num_gpus, tolerance).solve()
    option = _options_of(menu, paired.item)
    shared_option, mate = settle_pairs(graph, menu.shared_value, paired.mate)
    choice = _Choice(option, shared_option, mate, 0.0)
    excess = max(0.0, paired.bound - paired.value)
    return replace(choice, bound=_total(problem, choice) + excess)


def _options_of(menu: Menu, item: Ints) -> Ints:
    """The exclusive option behind every menu item; -1 stays -1."""
    option = np.full(len(item), -1, np.int64)
    some = item >= 0
    option[some] = menu.option[item[some]]
    return option


def _total(problem: Problem, choice: _Choice) -> float:
    return total_worth(problem, choice.option, choice.shared_option)


def _unless_current_is_as_good(problem: Problem, graph: SharingGraph, menu: Menu, choice: _Choice) -> _Choice:
    """The running configuration itself when it is allowed and loses nothing: equal answers must not alternate."""
    if np.all(np.isnan(problem.current)):
        return choice
    running = _current(problem, graph, menu)
    if running is None:
        return choice
    total = _total(problem, running)
    if total < _total(problem, choice) * (1.0 - KEEP_BONUS):
        return choice
    return replace(running, bound=max(choice.bound, total))


def _current(problem: Problem, graph: SharingGraph, menu: Menu) -> _Choice | None:
    """What runs now as a choice, or None where the floor, the forced jobs or the GPUs forbid it."""
    n = problem.num_jobs
    held = np.nan_to_num(problem.current, nan=0.0)
    owner = np.repeat(np.arange(n), np.diff(menu.ptr))
    matches = np.flatnonzero(menu.cost == held[owner])
    item = np.full(n, -1, np.int64)
    item[owner[matches]] = matches
    sharing = held == SHARED_GPUS
    if np.any((item < 0) & ~sharing) or int(menu.cost[item[~sharing]].sum()) + sharing.sum() / 2 > problem.num_gpus:
        return None
    option = _options_of(menu, np.where(sharing, -1, item))
    shared_option = mate = np.full(n, -1, np.int64)
    if np.any(sharing):
        vertex = np.flatnonzero(sharing[graph.jobs])
        if len(vertex) < np.count_nonzero(sharing) or len(vertex) % 2:
            return None
        settled = settle_pairs(graph, menu.shared_value, None, vertex)
        if np.any(settled[1][sharing] < 0):
            return None
        shared_option, mate = settled
    return _Choice(option, shared_option, mate, 0.0)


def _by_milp(problem: Problem, graph: SharingGraph, rho: float, time_limit_s: float) -> Solution:
    """Both stages by HiGHS; where it proves or finds nothing in time, that is said and the exact solver answers."""
    reference = Reference(problem, graph)
    if len(reference.value) == 0:  # nobody can run: nothing to decide
        return replace(_exact(problem, graph, rho), method="milp")
    first = reference.max_min(time_limit_s)
    if first is None:
        return replace(
            _exact(problem, graph, rho), note="the ILP found nothing in time; this is the exact solver's answer"
        )
    t_star, _, proved = first
    floor = rho * t_star
    forced = forced_jobs(problem, graph) if floor <= 0.0 else problem.must_run
    second = reference.best_sum(floor, forced, time_limit_s)
    if second is None:
        return replace(
            _exact(problem, graph, rho), note="the ILP found nothing in time; this is the exact solver's answer"
        )
    chosen, bound, finished = second
    choice = _Choice(*reference.decode(chosen), bound=bound)
    note = "" if proved else "the max-min value was not proved within the time limit"
    return _solution(problem, choice, t_star, floor, forced, "milp", note, tolerance=1e-6 if finished else 0.0)


def _solution(
    problem: Problem,
    choice: _Choice,
    t_star: float,
    floor: float,
    forced: Bools,
    method: str,
    note: str,
    tolerance: float = 0.0,
) -> Solution:
    total = _total(problem, choice)
    bound = total if choice.bound - total <= tolerance * max(1.0, total) else choice.bound
    bound, gap = bound_and_gap(total, bound)
    waits = (choice.option < 0) & (choice.shared_option < 0)
    stuck = np.flatnonzero(problem.must_run & ~forced & waits).tolist()
    return Solution(
        problem=problem,
        option=choice.option,
        shared_option=choice.shared_option,
        mate=choice.mate,
        max_min=t_star,
        floor=floor,
        must_run_waiting=tuple(problem.job_ids[k] for k in stuck),
        bound=bound,
        gap=gap,
        method=method,
        note=note,
    )
