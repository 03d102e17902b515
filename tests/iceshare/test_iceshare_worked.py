"""The worked examples of the specification and the stated decisions, one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from icefrog.policies.iceshare import ExclusiveOption, Job, Problem, SharedOption, solve, verify
from icefrog.policies.iceshare.matching import sharing_graph

MIN = 60.0


def job(job_id: str, minutes: dict[int, float], **more: object) -> Job:
    return Job(job_id, tuple(ExclusiveOption(a, t * MIN) for a, t in minutes.items()), **more)  # type: ignore[arg-type]


A = {1: 100.0, 2: 60.0, 4: 50.0}
B = {1: 80.0, 2: 50.0, 4: 45.0}


@pytest.mark.parametrize("method", ["exact", "milp"])
def test_two_plus_two(method: str) -> None:
    problem = Problem.from_jobs(4, [job("A", A), job("B", B)])
    np.testing.assert_allclose(problem.opt_share, [0.5, 50 / 60, 1, 45 / 80, 0.9, 1])
    answer = solve(problem, method=method).to_json()  # type: ignore[arg-type]
    assert {k: a["gpus"] for k, a in answer["assignment"].items()} == {"A": 2, "B": 2}
    assert answer["min_share"] == pytest.approx(50 / 60)
    assert (answer["gap"], answer["gpus_used"], answer["waiting"]) == (0.0, 4, [])


def test_a_layer_elastic_job_leaves_a_gpu_over() -> None:
    problem = Problem.from_jobs(4, [job("A", A | {1: 55.0}), job("B", B)])
    answer = solve(problem).to_json()
    assert {k: a["gpus"] for k, a in answer["assignment"].items()} == {"A": 1, "B": 2}
    assert answer["assignment"]["A"]["share"] == pytest.approx(50 / 55)
    assert answer["gpus_used"] == 3  # A 2, B 2 would have the same minimum but a smaller sum


@pytest.mark.parametrize(("other_gb", "may"), [(35.0, True), (45.0, False)])
def test_memory_of_a_pair(other_gb: float, may: bool) -> None:
    jobs = [
        job("A", {1: 100.0}, shared=(SharedOption(110 * MIN, 30e9, 42.0),)),
        job("B", {1: 100.0}, shared=(SharedOption(110 * MIN, other_gb * 1e9, 45.0),)),
    ]
    problem = Problem.from_jobs(1, jobs, gpu_mem_bytes=80e9)
    assert (sharing_graph(problem).size == 2) is may
    answer = solve(problem)
    assert answer.pairs == ((("A", "B"),) if may else ())
    assert answer.min_share == pytest.approx(100 / 110 if may else 0.0)


def test_utilisation_of_a_pair() -> None:
    shared = SharedOption(110 * MIN, 1e9, 50.1)
    jobs = [job(k, {1: 100.0}, shared=(shared,)) for k in "AB"]
    assert solve(Problem.from_jobs(1, jobs, 80e9)).pairs == ()


def test_freezing_deeper_in_order_to_fit() -> None:
    """A pair may share if some combination of the two sets fits; the answer names the combination."""
    wide, narrow = SharedOption(105 * MIN, 45e9, 60.0), SharedOption(140 * MIN, 20e9, 30.0)
    jobs = [job(k, {1: 100.0}, shared=(wide, narrow)) for k in "AB"]
    answer = solve(Problem.from_jobs(1, jobs, 80e9))
    picked = sorted(entry["share_option"] for entry in answer.assignment.values())
    assert picked == [0, 1]
    assert answer.sum_share == pytest.approx(100 / 105 + 100 / 140)


def test_a_lone_shared_option_counts_towards_the_best_time_only() -> None:
    lonely = job("A", {1: 100.0}, shared=(SharedOption(50 * MIN, 1e9, 10.0),))
    answer = solve(Problem.from_jobs(1, [lonely], 80e9))
    assert answer.assignment == {"A": {"gpus": 1, "share": 0.5}}


def test_options_above_the_cluster_count_towards_the_best_time_only() -> None:
    answer = solve(Problem.from_jobs(2, [job("A", {1: 100.0, 8: 25.0})]))
    assert answer.assignment == {"A": {"gpus": 1, "share": 0.25}}


def test_restarts_are_charged_to_every_other_option() -> None:
    busy = job("A", {1: 100.0, 2: 99.5}, current=1.0, restart_s=60.0)
    problem = Problem.from_jobs(2, [busy])
    np.testing.assert_allclose(problem.opt_tta_s, [100 * MIN, 100.5 * MIN])
    assert solve(problem).gpus.tolist() == [1.0]
    assert solve(Problem.from_jobs(2, [job("A", {1: 100.0, 2: 99.5})])).gpus.tolist() == [2.0]


def test_equal_optima_keep_what_runs() -> None:
    def twins(first: float | None, second: float | None) -> list[float]:
        jobs = [job("A", {1: 100.0, 2: 50.0}, current=first), job("B", {1: 100.0, 2: 50.0}, current=second)]
        return solve(Problem.from_jobs(3, jobs)).gpus.tolist()

    assert twins(1.0, 2.0) == [1.0, 2.0]
    assert twins(2.0, 1.0) == [2.0, 1.0]


def test_equal_pairings_keep_the_running_partners() -> None:
    shared = (SharedOption(110 * MIN, 1e10, 40.0),)

    def four(partner: dict[str, str]) -> set[frozenset[str]]:
        jobs = [job(k, {1: 100.0}, shared=shared, current=0.5, partner=partner[k]) for k in ("A", "B", "C", "D")]
        return {frozenset(pair) for pair in solve(Problem.from_jobs(2, jobs, 80e9)).pairs}

    for one, two, three, four_ in (("A", "B", "C", "D"), ("A", "C", "B", "D"), ("A", "D", "B", "C")):
        running = {one: two, two: one, three: four_, four_: three}
        assert four(running) == {frozenset((one, two)), frozenset((three, four_))}


def test_rho_trades_the_worst_off_for_the_sum() -> None:
    jobs = [job("A", {1: 100.0, 3: 50.0}), job("B", {1: 100.0, 3: 10.0})]
    problem = Problem.from_jobs(4, jobs)
    fair, free = solve(problem, rho=1.0), solve(problem, rho=0.0)
    assert fair.gpus.tolist() == [1.0, 3.0]
    assert free.sum_share >= fair.sum_share
    scarce = Problem.from_jobs(3, [job("A", {3: 10.0}), job("B", {1: 10.0, 3: 9.0}), job("C", {2: 10.0})])
    assert solve(scarce).waiting == ("A",)  # somebody waits, so the sum decides


def test_what_is_over_does_not_count_in_the_sum_and_short_jobs_do() -> None:
    """Two jobs after 100 minutes, one GPU: 10 minutes more or 100. Eq. 17 has both at share 1; only one can run."""
    old = [job("long", {1: 200}, age_s=6000.0), job("short", {1: 110}, age_s=6000.0)]
    assert solve(Problem.from_jobs(1, old), rho=0).assignment.keys() == {"long"}  # equal worth: the first
    hurry = [replace(old[0], urgency=1 / 100), replace(old[1], urgency=1 / 10)]
    assert solve(Problem.from_jobs(1, hurry), rho=0).assignment == {"short": {"gpus": 1, "share": 1.0}}
    grown = Problem.from_jobs(2, [job("x", {1: 120, 2: 110}, age_s=6000.0)])
    assert grown.opt_share.tolist() == pytest.approx([110 / 120, 1.0])  # Eq. 17, for the floor
    assert grown.opt_worth.tolist() == pytest.approx([10 / 20, 1.0])  # of what is left


def test_weights_and_their_literal_form() -> None:
    jobs = [job("A", {1: 100.0, 3: 50.0}, weight=2.0), job("B", {1: 100.0, 3: 50.0}, weight=1.0)]
    assert solve(Problem.from_jobs(4, jobs)).gpus.tolist() == [3.0, 1.0]
    literal = Problem.from_jobs(4, jobs, literal_weights=True)
    assert solve(literal).gpus.tolist() == [1.0, 3.0]  # Eq. 18 as printed: the larger weight gets less


def test_jobs_that_must_run_displace_better_ones() -> None:
    small = [job(f"s{k}", {1: 100.0}) for k in range(4)]
    large = job("large", {4: 100.0})
    assert solve(Problem.from_jobs(4, [*small, large])).waiting == ("large",)
    forced = job("large", {4: 100.0}, must_run=True)
    answer = solve(Problem.from_jobs(4, [*small, forced]))
    assert answer.assignment.keys() == {"large"}
    assert answer.must_run_waiting == ()


def test_jobs_that_must_run_are_taken_in_the_order_given() -> None:
    jobs = [job("a", {3: 9.0}, must_run=True), job("b", {2: 9.0}, must_run=True), job("c", {1: 9.0}, must_run=True)]
    answer = solve(Problem.from_jobs(4, jobs))
    assert answer.must_run_waiting == ("b",)
    assert set(answer.assignment) == {"a", "c"}


def test_a_forced_job_may_be_paired_with_one_that_is_not() -> None:
    shared = (SharedOption(110 * MIN, 1e10, 40.0),)
    jobs = [job("big", {4: 100.0}, shared=shared, must_run=True), job("mate", {1: 100.0}, shared=shared)]
    answer = solve(Problem.from_jobs(1, jobs, 80e9))
    assert answer.pairs == (("big", "mate"),)


@pytest.mark.parametrize("num_gpus", [0, 3])
def test_nothing_to_decide(num_gpus: int) -> None:
    nobody = solve(Problem.from_jobs(num_gpus, []))
    assert (nobody.to_json()["assignment"], nobody.sum_share, nobody.gap) == ({}, 0.0, 0.0)
    stuck = solve(Problem.from_jobs(num_gpus, [job("A", {4: 10.0}, must_run=True)]))
    assert (stuck.waiting, stuck.must_run_waiting, stuck.min_share) == (("A",), ("A",), 0.0)


def test_whole_node_units_and_huge_counts() -> None:
    jobs = [job(f"j{k}", {4_000_000: 100.0 + k, 8_000_000: 60.0 + k}) for k in range(6)]
    answer = solve(Problem.from_jobs(40_000_003, jobs))
    assert answer.gap == 0.0
    assert answer.gpus_used == 40_000_000


def test_identical_jobs_by_the_thousand() -> None:
    """All ties: 5,000 equal jobs, and a remainder that no upgrade fills."""
    n = 5000
    problem = Problem.from_arrays(
        12_002,
        opt_ptr=np.arange(n + 1) * 3,
        opt_gpus=np.tile([1, 4, 8], n),
        opt_tta_s=np.tile([100.0, 40.0, 30.0], n),
    )
    answer = solve(problem)
    verify(problem, answer)
    assert answer.gap == 0.0
    upgrades = [((7002 - 7 * y) // 3, y) for y in range(1001)]  # x jobs take 3 GPUs more, y jobs 7 more
    best = max(0.3 * n + 0.45 * x + 0.7 * y for x, y in upgrades if x + y <= n)
    assert answer.sum_share == pytest.approx(best, rel=1e-9)


def test_rho_and_method_are_checked() -> None:
    problem = Problem.from_jobs(1, [job("A", {1: 1.0})])
    with pytest.raises(ValueError, match="rho"):
        solve(problem, rho=1.5)
    with pytest.raises(ValueError, match="method"):
        solve(problem, method="magic")  # type: ignore[arg-type]


def test_the_clock_is_the_callers() -> None:
    ticks = iter([10.0, 10.25])
    problem = Problem.from_jobs(1, [job("A", {1: 1.0})])
    assert solve(problem, clock=lambda: next(ticks)).solve_s == 0.25
    assert solve(problem).solve_s == 0.0
