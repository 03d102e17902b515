"""Equal to brute force on small problems and to the binary program on middle ones; deterministic; stable."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from iceshare_oracle import brute_force, problems, seeded_problem

from icefrog.policies.iceshare import InvalidSolutionError, Problem, Solution, solve, verify
from icefrog.policies.iceshare.knapsack import InfeasibleError, solve_knapsack
from icefrog.policies.iceshare.matching import (
    assignment_matching,
    dual_prices,
    exact_matching,
    matching_weight,
    sharing_graph,
)
from icefrog.policies.iceshare.threshold import forced_jobs

RHOS = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0.0, 1.0))


def same_choice(a: Solution, b: Solution) -> bool:
    return (
        np.array_equal(a.option, b.option)
        and np.array_equal(a.shared_option, b.shared_option)
        and np.array_equal(a.mate, b.mate)
    )


@settings(max_examples=200)
@given(problems(), RHOS)
def test_exact_against_brute_force(problem: Problem, rho: float) -> None:
    truth = brute_force(problem, rho)
    answer = solve(problem, rho)
    verify(problem, answer)
    assert answer.max_min == pytest.approx(truth.max_min, abs=1e-12)
    assert answer.sum_share <= truth.best_sum + 1e-9 <= answer.bound + 2e-9 * max(1.0, truth.best_sum)
    assert answer.gap == 0.0
    assert answer.sum_share == pytest.approx(truth.best_sum, rel=1e-9)
    stuck = {problem.index[job] for job in answer.must_run_waiting}
    assert not stuck & truth.forced


def hurried(problem: Problem, seed: int) -> Problem:
    """The same jobs, each with an age of its own and an urgency."""
    rng = np.random.default_rng(seed)
    age_s = problem.best_tta_s * rng.uniform(0.0, 0.9, problem.num_jobs)
    return replace(problem, age_s=age_s, urgency=rng.choice([0.01, 0.5, 1.0, 20.0], problem.num_jobs))


@settings(max_examples=60)
@given(problems(), RHOS, st.integers(0, 5))
def test_ages_and_urgencies_against_the_reference(problem: Problem, rho: float, seed: int) -> None:
    hurry = hurried(problem, seed)
    ours, theirs = solve(hurry, rho), solve(hurry, rho, method="milp")
    assert ours.max_min == pytest.approx(solve(problem, rho).max_min, abs=1e-12)  # they count in the sum only
    assert ours.gap == 0.0
    assert ours.sum_share == pytest.approx(theirs.sum_share, rel=1e-5, abs=1e-5)


@settings(max_examples=60)
@given(problems(jobs=(1, 14), most_gpus=20), RHOS, st.sampled_from([0.0, 1e-3, 0.05]))
def test_a_tolerated_gap_is_kept_to_and_told(problem: Problem, rho: float, tolerance: float) -> None:
    best, quick = solve(problem, rho), solve(problem, rho, tolerance=tolerance)
    verify(problem, quick)
    assert quick.gap <= tolerance + best.gap + 1e-12
    assert quick.sum_share >= best.sum_share * (1.0 - tolerance) - 1e-9
    assert quick.bound >= best.sum_share - 1e-9


@settings(max_examples=40)
@given(problems(jobs=(1, 4)), RHOS)
def test_the_reference_against_brute_force(problem: Problem, rho: float) -> None:
    truth = brute_force(problem, rho)
    answer = solve(problem, rho, method="milp")
    assert answer.max_min == pytest.approx(truth.max_min, abs=1e-6)
    assert answer.sum_share == pytest.approx(truth.best_sum, abs=1e-5)


@pytest.mark.parametrize("seed", range(24))
def test_exact_against_the_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    share_fraction = float(rng.choice([0.0, 0.3, 0.9]))
    num_jobs = int(rng.integers(10, 41 if share_fraction < 0.9 else 18))
    problem = seeded_problem(seed, num_jobs, int(rng.integers(3, 3 * num_jobs)), share_fraction)
    rho = float(rng.choice([0.0, 0.6, 1.0]))
    ours, theirs = solve(problem, rho), solve(problem, rho, method="milp", time_limit_s=10)
    if theirs.note:  # HiGHS did not finish: nothing to compare with
        return
    assert ours.max_min == pytest.approx(theirs.max_min, abs=1e-6)
    assert theirs.sum_share <= ours.bound + 1e-5
    if len(problem.shr_tta_s) == 0:
        assert ours.gap == 0.0
    if ours.gap == 0.0 and theirs.gap == 0.0:
        assert ours.sum_share == pytest.approx(theirs.sum_share, abs=1e-5)


@settings(max_examples=100)
@given(problems(jobs=(1, 14), most_gpus=20), RHOS)
def test_deciding_again_changes_nothing(problem: Problem, rho: float) -> None:
    first = solve(problem, rho)
    assert same_choice(first, solve(problem, rho))
    held = np.where(first.gpus > 0, first.gpus, np.nan)
    for partner in (np.full(problem.num_jobs, -1), first.mate):
        again = solve(replace(problem, current=held, partner=partner), rho)  # the times stay: no restart is charged
        if first.gap == 0.0:
            assert same_choice(first, again)


@settings(max_examples=30)
@given(problems(jobs=(2, 8)), RHOS, st.data())
def test_verify_notices_a_broken_answer(problem: Problem, rho: float, data: st.DataObject) -> None:
    answer = solve(problem, rho)
    running = np.flatnonzero(answer.option >= 0)
    if len(running) == 0:
        return
    k = int(data.draw(st.sampled_from(running.tolist())))
    stolen = answer.option.copy()
    stolen[k] = (problem.opt_ptr[k + 1]) % len(problem.opt_gpus)  # the next job's first option
    for broken in (
        replace(answer, option=stolen),
        replace(answer, problem=problem, bound=answer.sum_share - 0.01),
        replace(answer, mate=np.roll(np.arange(problem.num_jobs), 1)),
    ):
        with pytest.raises(InvalidSolutionError):
            verify(problem, broken)
    with pytest.raises(InvalidSolutionError, match="GPUs are used"):
        verify(replace(problem, num_gpus=answer.gpus_used - 1), answer)


def plain_knapsack(ptr: np.ndarray, cost: np.ndarray, value: np.ndarray, capacity: int, even: bool) -> float:
    best = np.full(capacity + 1, -np.inf)
    best[0] = 0.0
    for k in range(len(ptr) - 1):
        new = np.full(capacity + 1, -np.inf)
        for j in range(ptr[k], ptr[k + 1]):
            if cost[j] <= capacity:
                new[cost[j] :] = np.maximum(new[cost[j] :], best[: capacity + 1 - cost[j]] + value[j])
        best = new
    return float(np.max(best[::2] if even else best))


@pytest.mark.parametrize("seed", range(8))
def test_knapsack_against_the_plain_table(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for trial in range(60):
        sizes = rng.integers(1, 6, rng.integers(1, 60))
        ptr = np.append(0, np.cumsum(sizes)).astype(np.int64)
        cost = rng.integers(0, 9, ptr[-1]).astype(np.int64) * (4 if trial % 5 == 1 else 1)
        value = [rng.random(ptr[-1]), rng.integers(0, 6, ptr[-1]) / 8, cost / 8, np.sqrt(cost)][trial % 4]
        capacity, even = int(rng.integers(0, 120)), bool(rng.random() < 0.4)
        truth = plain_knapsack(ptr, cost, value, capacity, even)
        try:
            found = solve_knapsack(ptr, cost, value, capacity, even)
        except InfeasibleError:
            assert truth == -np.inf
            continue
        if truth == -np.inf:  # only the parity forbids it, which the caller rules out
            continue
        assert int(cost[found.choice].sum()) <= capacity
        assert not (even and cost[found.choice].sum() % 2)
        assert found.excess == 0.0
        assert float(value[found.choice].sum()) == pytest.approx(truth, abs=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_matchings_and_their_bounds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    v = int(rng.integers(2, 24))
    weight = rng.integers(-3, 10, (v, v)).astype(float)
    weight = np.triu(weight, 1) + np.triu(weight, 1).T
    best = matching_weight(weight, exact_matching(weight))
    found = assignment_matching(weight)
    assert matching_weight(np.maximum(weight, 0), found.mate) == pytest.approx(found.weight)
    assert found.weight <= best + 1e-9 <= found.bound + 2e-9
    price = dual_prices(weight)
    assert np.all(price[:, None] + price >= np.maximum(weight, 0) - 1e-9)
    assert float(price.sum()) == pytest.approx(found.bound, abs=1e-6)


@pytest.mark.parametrize("seed", range(30))
def test_forced_jobs_against_one_by_one(seed: int) -> None:
    """The shortcuts (stretches, refusals that imply others) change nothing."""
    rng = np.random.default_rng(seed)
    num_jobs = int(rng.integers(5, 40))
    problem = seeded_problem(seed, num_jobs, int(rng.integers(1, num_jobs)), float(rng.choice([0.0, 0.5, 1.0])))
    problem = replace(problem, must_run=rng.random(num_jobs) < 0.8)
    graph = sharing_graph(problem)
    taken: list[int] = []
    for job in np.flatnonzero(problem.must_run).tolist():
        only = np.zeros(num_jobs, dtype=bool)
        only[[*taken, job]] = True
        if np.array_equal(forced_jobs(replace(problem, must_run=only), graph), only):
            taken.append(job)
    assert np.flatnonzero(forced_jobs(problem, graph)).tolist() == taken
