"""Partners: nobody moves without need."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from icefrog.policies.iceshare import ExclusiveOption, Job, Problem, SharedOption, Solution, solve
from icefrog.policies.partners import steady_pairing

NAMES = "abcdefgh"


def sharer(name: str, partner: str | None, options: list[tuple[float, float, float]]) -> Job:
    shared = tuple(SharedOption(tta_s, mem_bytes, util_pct) for tta_s, mem_bytes, util_pct in options)
    return Job(name, (ExclusiveOption(1, 1000.0),), shared, current=0.5 if partner else None, partner=partner)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Four to eight sharers on few GPUs, some of them paired now."""
    count = draw(st.sampled_from([4, 6, 8]))
    running = draw(st.integers(0, count // 2))
    jobs = []
    for index in range(count):
        mate = index ^ 1 if index < 2 * running else None
        options = draw(
            st.lists(
                st.tuples(
                    st.sampled_from([1050.0, 1100.0, 1300.0, 2000.0]),
                    st.sampled_from([10e9, 30e9, 50e9]),
                    st.sampled_from([20.0, 45.0, 60.0]),
                ),
                min_size=1,
                max_size=3,
            )
        )
        jobs.append(sharer(NAMES[index], None if mate is None else NAMES[mate], options))
    return Problem.from_jobs(draw(st.integers(2, 4)), jobs, gpu_mem_bytes=80e9, rho=draw(st.sampled_from([0.0, 1.0])))


def worth(solution: Solution, options: dict[int, int]) -> float:
    return float(sum(solution.problem.shr_share[flat] for flat in options.values()))


@given(problem=problems(), move_worth=st.sampled_from([0.0, 0.05, 10.0]))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_the_same_jobs_share_every_pair_fits_and_the_floor_holds(problem: Problem, move_worth: float) -> None:
    solution = solve(problem)
    pairing = steady_pairing(solution, move_worth)
    sharers = set(np.flatnonzero(solution.mate >= 0).tolist())
    assert set(pairing.option) == sharers
    assert sorted(job for pair in pairing.pairs for job in pair) == sorted(sharers)
    for i, j in pairing.pairs:
        first, second = pairing.option[i], pairing.option[j]
        assert problem.shr_job[first] == i
        assert problem.shr_job[second] == j
        assert problem.fits_together(first, second)
        assert min(problem.shr_fairness[first], problem.shr_fairness[second]) >= solution.floor * (1 - 1e-6)


@given(problem=problems())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_as_many_running_pairs_stay_as_any_pairing_of_the_sharers_could_keep(problem: Problem) -> None:
    """With moves dear, against all pairings (brute force)."""
    solution = solve(problem)
    pairing = steady_pairing(solution, 1e9)
    jobs = sorted(pairing.option)

    def moves(pairs: list[tuple[int, int]]) -> int:
        held = ~np.isnan(problem.current)
        return sum(bool(held[i] and held[j] and problem.partner[i] != j) for i, j in pairs)

    def pairings(rest: list[int]) -> list[list[tuple[int, int]]]:
        if not rest:
            return [[]]
        first, *others = rest
        return [
            [(first, mate), *more]
            for mate in others
            if _fit(problem, first, mate, solution.floor)
            for more in pairings([job for job in others if job != mate])
        ]

    assert moves(list(pairing.pairs)) == min(moves(pairs) for pairs in pairings(jobs))


def _fit(problem: Problem, i: int, j: int, floor: float) -> bool:
    first = range(problem.shr_ptr[i], problem.shr_ptr[i + 1])
    second = range(problem.shr_ptr[j], problem.shr_ptr[j + 1])
    least = floor * (1 - 1e-9)
    return any(
        bool(problem.fits_together(a, b)) and min(problem.shr_fairness[a], problem.shr_fairness[b]) >= least
        for a, b in itertools.product(first, second)
    )


def test_a_better_partner_is_taken_only_if_that_pays() -> None:
    """(a, b) and (c, d) run; (a, c) and (b, d) would be a little faster."""
    slow, fast = (1200.0, 30e9, 60.0), (1150.0, 30e9, 40.0)
    jobs = [
        sharer("a", "b", [slow, (1250.0, 30e9, 30.0)]),
        sharer("b", "a", [slow, (1250.0, 30e9, 30.0)]),
        sharer("c", "d", [fast]),
        sharer("d", "c", [fast]),
    ]
    solution = solve(Problem.from_jobs(2, jobs, gpu_mem_bytes=80e9, rho=0.0))
    assert {tuple(sorted(pair)) for pair in solution.pairs} != {("a", "b"), ("c", "d")}
    dear = steady_pairing(solution, 1.0)
    assert set(dear.pairs) == {(0, 1), (2, 3)}
    assert worth(solution, dear.option) < solution.sum_share
    free = steady_pairing(solution, 0.0)
    assert {(solution.problem.job_ids[i], solution.problem.job_ids[j]) for i, j in free.pairs} == set(solution.pairs)
