"""Gavel: its worked example, its allocations against an independent program, its rounds, what it comes to on one type."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from icefrog.placement import place
from icefrog.policies import make_policy
from icefrog.policies.gavel_allocation import (
    equal_throughput,
    finish_time_fair,
    isolated,
    las_gains,
    max_min,
    water_fill,
)
from icefrog.specfile import parse_cluster
from icefrog.testing import builders as b
from icefrog.types import Candidate, JobView, Plan, Snapshot

DATA = Path(os.environ.get("ICEFROG_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
ONES = np.ones(3)


def check_valid(allocation, num_gpus, capacity) -> None:
    assert allocation.min() >= 0.0
    assert allocation.sum(axis=1).max() <= 1.0 + 1e-6
    assert np.all(num_gpus @ allocation <= capacity * (1.0 + 1e-6) + 1e-9)


def best_minimum(gain, num_gpus, capacity) -> float:
    """The same program written down once more, dense and in the paper's own units."""
    jobs, types = gain.shape
    rows, limits = [], []
    for m in range(jobs):
        mask = np.zeros((jobs, types))
        mask[m] = 1.0
        rows += [np.append(-(gain * mask).ravel(), 1.0), np.append(mask.ravel(), 0.0)]
        limits += [0.0, 1.0]
    for j in range(types):
        mask = np.zeros((jobs, types))
        mask[:, j] = num_gpus
        rows.append(np.append(mask.ravel(), 0.0))
        limits.append(capacity[j])
    cost = np.append(np.zeros(jobs * types), -1.0)
    found = linprog(cost, A_ub=np.array(rows), b_ub=limits, bounds=(0, None), method="highs-ipm")
    return float(found.x[-1])


# -- worked examples -------------------------------------------------------------------------------------------------------


def test_the_worked_example_of_the_paper() -> None:
    """Section 4.1: one V100, one K80, three jobs. By hand: job 0 has nothing but V100 time, job 1 both, job 2 mostly K80
    time; all reach 8/11 of what half of the time on each type would give, against 2/3 for a third of the cluster each:
    'about 10 % higher'.
    """
    throughput = np.array([[40.0, 10.0], [12.0, 4.0], [100.0, 50.0]])
    capacity = np.ones(2)
    gains = las_gains(throughput, ONES, ONES, capacity)
    found = max_min(gains, ONES, capacity)
    assert found == pytest.approx(np.array([[5, 0], [5, 1], [1, 10]]) / 11, abs=1e-5)
    assert found.round(2).tolist() == [[0.45, 0.0], [0.45, 0.09], [0.09, 0.91]]  # as printed
    assert (gains * found).sum(axis=1) == pytest.approx(ONES * 8 / 11, rel=1e-5)
    assert (gains * isolated(ONES, capacity)).sum(axis=1) == pytest.approx(ONES * 2 / 3)


def test_makespan_by_hand() -> None:
    """Two jobs, one fast and one slow GPU: 100 s and 100 s on the fast one, 400 s and 200 s on the slow one. None idles:
    job 0 is on the fast one for a of the time, job 1 for 1 - a.

    1/T = a/100 + (1 - a)/400 = (1 - a)/100 + a/200, so a = 0.6 and T = 1000/7 s (against 200 s with a GPU each).
    """
    remaining_s = np.array([[100.0, 400.0], [100.0, 200.0]])
    found = max_min(1.0 / remaining_s, np.ones(2), np.ones(2))
    assert found == pytest.approx(np.array([[0.6, 0.4], [0.4, 0.6]]), abs=1e-5)
    assert 1.0 / (found / remaining_s).sum(axis=1) == pytest.approx([1000 / 7] * 2, rel=1e-5)


def test_finish_time_fairness_by_hand() -> None:
    """One GPU, two jobs that need 100 s each, D = 200 s for both (half of it); one has waited for 100 s already.

    Equal rho: 100 + 100/x = 100/(1 - x), so x^2 + x - 1 = 0: the one that waited gets 0.618 of the time.
    """
    remaining_s = np.full((2, 1), 100.0)
    age_s, isolated_s = np.array([100.0, 0.0]), np.array([200.0, 200.0])
    found, rho = finish_time_fair(remaining_s, age_s, isolated_s, np.ones(2), np.ones(1))
    x = (np.sqrt(5.0) - 1.0) / 2.0
    assert found[:, 0] == pytest.approx([x, 1.0 - x], rel=1e-4)
    assert rho == pytest.approx((100.0 + 100.0 / x) / 200.0, rel=1e-4)


def test_finish_time_fairness_of_jobs_that_all_fit_is_to_run_them_all() -> None:
    found, rho = finish_time_fair(
        np.array([[50.0], [70.0]]), np.zeros(2), np.array([50.0, 70.0]), np.ones(2), np.full(1, 4.0)
    )
    assert found.tolist() == [[1.0], [1.0]]
    assert rho == pytest.approx(1.0)


def test_jobs_that_can_run_nowhere_do_not_drag_the_rest_down() -> None:
    gain = np.array([[1.0, 2.0], [0.0, 0.0], [1.0, 1.0]])
    found = max_min(gain, np.array([1.0, 1.0, 8.0]), np.array([1.0, 1.0]))
    assert found[1].tolist() == [0.0, 0.0]
    assert found[2].tolist() == [0.0, 0.0]  # larger than every type
    assert found[0].sum() == pytest.approx(1.0)


# -- properties ------------------------------------------------------------------------------------------------------------

PROBLEMS = st.integers(0, 10**6)


def problem(seed: int):
    rng = np.random.default_rng(seed)
    jobs, types = int(rng.integers(1, 9)), int(rng.integers(1, 4))
    throughput = np.exp(rng.normal(0, 2, (jobs, 1))) * rng.uniform(0.1, 1.0, (jobs, types))
    throughput[rng.random((jobs, types)) < 0.1] = 0.0
    num_gpus = rng.choice([1.0, 1.0, 2.0, 4.0], jobs)
    capacity = rng.integers(0, 8, types).astype(float)
    capacity[int(rng.integers(types))] = 4.0
    return throughput, num_gpus, rng.choice([0.5, 1.0, 2.0], jobs), capacity


@given(PROBLEMS)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_other_allocation_has_a_larger_minimum(seed: int) -> None:
    throughput, num_gpus, weight, capacity = problem(seed)
    gains = las_gains(throughput, num_gpus, weight, capacity)
    found = max_min(gains, num_gpus, capacity)
    check_valid(found, num_gpus, capacity)
    runs = np.where(num_gpus[:, None] <= capacity[None, :], gains, 0.0)
    able = runs.max(axis=1) > 0.0
    if able.any():
        reached = (runs * found).sum(axis=1)[able].min()
        assert reached == pytest.approx(best_minimum(runs[able], num_gpus[able], capacity), rel=1e-4)


@given(PROBLEMS)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_nobody_can_have_more_unless_someone_has_less(seed: int) -> None:
    throughput, num_gpus, weight, capacity = problem(seed)
    gains = las_gains(throughput, num_gpus, weight, capacity)
    found = max_min(gains, num_gpus, capacity)
    can = (gains > 0.0) & (num_gpus[:, None] <= capacity[None, :])
    free = capacity - num_gpus @ found
    idle = 1.0 - found.sum(axis=1)
    assert not np.any(can & (idle[:, None] > 1e-4) & (free[None, :] > 1e-4)), "time and GPUs are left for the same job"


@given(PROBLEMS)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_on_one_type_the_program_and_the_closed_form_agree(seed: int) -> None:
    rng = np.random.default_rng(seed)
    jobs = int(rng.integers(1, 12))
    gain, num_gpus = np.exp(rng.normal(0, 1, jobs)), rng.choice([1.0, 2.0, 4.0], jobs)
    capacity = float(rng.integers(4, 20))
    found = water_fill(gain, num_gpus, capacity)
    check_valid(found[:, None], num_gpus, np.array([capacity]))
    level = (gain * found).min()
    assert level == pytest.approx(best_minimum(gain[:, None], num_gpus, np.array([capacity])), rel=1e-5)
    # Lexicographic: whoever has more gain than the least is full-time or at the level of those that are not.
    open_ = found < 1.0 - 1e-12
    assert np.ptp((gain * found)[open_]) <= 1e-9 * gain.max() if open_.any() else num_gpus.sum() <= capacity


@given(PROBLEMS)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_no_other_allocation_has_a_smaller_largest_rho(seed: int) -> None:
    throughput, num_gpus, _, capacity = problem(seed)
    rng = np.random.default_rng(seed + 1)
    with np.errstate(divide="ignore"):
        remaining_s = 1000.0 / throughput
    age_s = rng.uniform(0.0, 2000.0, len(num_gpus))
    rate = (isolated(num_gpus, capacity) / remaining_s).sum(axis=1)
    isolated_s = age_s / 2 + 1.0 / np.maximum(rate, 1e-12)
    found, rho = finish_time_fair(remaining_s, age_s, isolated_s, num_gpus, capacity)
    check_valid(found, num_gpus, capacity)
    runs = np.where(num_gpus[:, None] <= capacity[None, :], 1.0 / remaining_s, 0.0)
    able = runs.max(axis=1) > 0.0
    if able.any():
        speed = (runs * found).sum(axis=1)[able]
        assert ((age_s[able] + 1.0 / speed) / isolated_s[able]).max() == pytest.approx(rho, rel=1e-3)
        smaller = (runs * (0.99 * rho * isolated_s - age_s)[:, None])[able]
        feasible = smaller.max(axis=1).min() > 0.0 and best_minimum(smaller, num_gpus[able], capacity) >= 1.0
        assert not feasible


@pytest.mark.data
@pytest.mark.skipif(not (DATA / "gavel").is_dir(), reason=f"no measurements in {DATA}/gavel ($ICEFROG_DATA)")
def test_on_the_measured_throughputs_nobody_is_worse_off_than_with_a_part_of_the_cluster_for_itself() -> None:
    """26 job types on K80, P100, V100 as published: valid, max-min optimal by the independent program, sharing incentive."""
    with gzip.open(DATA / "gavel" / "throughputs.json.gz", "rt") as file:
        measured = json.load(file)
    names = sorted(name for name in measured["v100"] if name.endswith("', 1)"))
    throughput = np.array([[measured[gpu][name]["null"] for gpu in ("v100", "p100", "k80")] for name in names])
    assert throughput.shape == (26, 3)
    rng = np.random.default_rng(0)
    for _ in range(5):
        rows = rng.integers(0, len(names), 40)
        num_gpus, weight = rng.choice([1.0, 1.0, 1.0, 2.0, 4.0], 40), np.ones(40)
        capacity = np.array([12.0, 12.0, 12.0])
        gains = las_gains(throughput[rows], num_gpus, weight, capacity)
        found = max_min(gains, num_gpus, capacity)
        check_valid(found, num_gpus, capacity)
        reached = (gains * found).sum(axis=1)
        assert reached.min() == pytest.approx(best_minimum(gains, num_gpus, capacity), rel=1e-5)
        assert reached.min() >= (gains * isolated(num_gpus, capacity)).sum(axis=1).min() * (1.0 - 1e-6)
        unaware = max_min(las_gains((throughput[rows] > 0) * 1.0, num_gpus, weight, capacity), num_gpus, capacity)
        assert reached.min() > (gains * unaware).sum(axis=1).min()  # what awareness of the types is for


# -- rounds ----------------------------------------------------------------------------------------------------------------

MIXED = parse_cluster("1x1:a100+1x1:t4")
ONE = parse_cluster("1x4")


def view(name: str, cluster, num_gpus: int = 1, **changes) -> JobView:
    spec = b.job_spec(name, gpus=(num_gpus,), batch={"global": 64}, **changes)
    return JobView(
        spec=spec, profile=None, submit_s=0.0, gpus=(), shared=False, running=False, config=None, effective_samples=0.0,
        remaining_samples=1000.0, frozen_layers=0, stats=None, attained_gpu_s=0.0, holding_since_s=None, waiting_since_s=0.0,
        restart_s=60.0, num_restarts=0,
    )  # fmt: skip


def option(num_gpus: int, gpu_type: str, speed: float) -> Candidate:
    plain = b.candidate(num_gpus, 1000.0 / speed)
    estimate = replace(plain.estimate, effective_progress=speed, throughput=speed)
    return Candidate(replace(plain.config, gpu_type=gpu_type), estimate)


class Rounds:
    """A policy driven by hand, round by round, on jobs that never end."""

    def __init__(
        self, cluster, speeds: dict[str, dict[str, float]], sizes: dict[str, int] | None = None, **options
    ) -> None:
        self.cluster = cluster
        self.policy = make_policy("gavel", options)
        sizes = sizes or {}
        self.jobs = {name: view(name, cluster, sizes.get(name, 1)) for name in speeds}
        self.options = {
            name: tuple(option(sizes.get(name, 1), t, speed) for t, speed in by.items()) for name, by in speeds.items()
        }
        self.memory = None
        self.now_s = 0.0
        self.time_on: dict[str, dict[str, float]] = {name: dict.fromkeys(cluster.parts, 0.0) for name in speeds}

    def decide(self) -> Plan:
        snapshot = Snapshot(self.now_s, self.cluster, tuple(self.jobs.values()), memory=self.memory)
        plan = self.policy.decide(snapshot, self.options)
        self.memory = json.loads(json.dumps(plan.memory))
        return plan

    def pass_time(self, plan: Plan, seconds: float) -> None:
        allocation = place(Snapshot(self.now_s, self.cluster, tuple(self.jobs.values())), plan).allocation
        for name, job in self.jobs.items():
            choice, gpus = plan.choices.get(name), allocation.get(name, ())
            if choice is not None:
                self.time_on[name][choice.config.gpu_type] += seconds
            self.jobs[name] = replace(job, gpus=gpus, running=bool(gpus), config=choice.config if choice else None)
        self.now_s += seconds

    def run(self, rounds: int, seconds: float = 360.0) -> None:
        for _ in range(rounds):
            self.pass_time(self.decide(), seconds)

    def shares(self) -> dict[str, list[float]]:
        return {name: [time_s / self.now_s for time_s in by.values()] for name, by in self.time_on.items()}


def test_rounds_bring_the_allocation_about() -> None:
    """The paper's example again, in time: after many rounds the jobs have had the shares that the program asked for."""
    speeds = {"a": {"a100": 40, "t4": 10}, "b": {"a100": 12, "t4": 4}, "c": {"a100": 100, "t4": 50}}
    rounds = Rounds(MIXED, speeds)
    rounds.run(150)
    shares = rounds.shares()
    assert shares["a"] == pytest.approx([0.4545, 0.0], abs=0.03)
    assert shares["b"] == pytest.approx([0.4545, 0.0909], abs=0.03)
    assert shares["c"] == pytest.approx([0.0909, 0.9091], abs=0.03)


def test_types_taken_for_equal_give_equal_shares() -> None:
    speeds = {"a": {"a100": 40, "t4": 10}, "b": {"a100": 12, "t4": 4}, "c": {"a100": 100, "t4": 50}}
    rounds = Rounds(MIXED, speeds, heterogeneity_aware=False)
    rounds.run(100)
    assert [sum(share) for share in rounds.shares().values()] == pytest.approx([2 / 3] * 3, abs=0.03)


@given(
    st.lists(st.sampled_from([1, 1, 2, 4]), min_size=2, max_size=9),
    st.integers(5, 25),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_on_one_type_it_is_least_attained_service(sizes: list[int], turns: int) -> None:
    """Every turn goes to whom the GPUs gave least so far: jobs in order of attained GPU time while they fit."""
    names = {f"j{i}": size for i, size in enumerate(sizes)}
    rounds = Rounds(ONE, {name: {"any": 10.0} for name in names}, names)
    if sum(sizes) <= 4:
        return
    level = 4 / len(sizes)  # GPUs a job; nobody can use more than it asked for
    full = {name for name, size in names.items() if size <= level}
    for _ in range(turns):
        attained = {name: rounds.time_on[name]["any"] * size for name, size in names.items()}
        plan = rounds.decide()
        waiting = [name for name in names if name not in plan.choices and name not in full]
        running = [name for name in plan.choices if name not in full]
        free = 4 - sum(names[name] for name in plan.choices)
        for late in waiting:
            # Whoever runs in its stead has had no more, or takes GPUs that it could not use.
            ahead = [name for name in running if attained[name] <= attained[late] + 1e-6]
            assert names[late] > free + sum(names[n] for n in running if n not in ahead), (late, attained, plan.choices)
        rounds.pass_time(plan, 360.0)


def test_within_a_round_running_jobs_stay_and_free_gpus_are_given_out() -> None:
    rounds = Rounds(parse_cluster("1x2"), {name: {"any": 1.0} for name in "abc"})
    first = rounds.decide()
    assert set(first.choices) == {"a", "b"}
    assert first.stands_until_s == 360.0
    rounds.pass_time(first, 100.0)
    assert set(rounds.decide().choices) == {"a", "b"}  # it is not c's turn yet
    del rounds.jobs["a"]
    rounds.pass_time(rounds.decide(), 100.0)
    assert {name for name, job in rounds.jobs.items() if job.running} == {"b", "c"}
    rounds.jobs["d"] = view("d", rounds.cluster)
    rounds.options["d"] = (option(1, "any", 1.0),)
    rounds.time_on["d"] = {"any": 0.0}
    plan = rounds.decide()
    assert set(plan.choices) == {"b", "c"}
    rounds.pass_time(plan, 160.0)
    assert "d" in rounds.decide().choices  # a new round


def test_a_plan_that_nothing_but_an_arrival_changes_stands() -> None:
    rounds = Rounds(parse_cluster("1x4"), {name: {"any": 1.0} for name in "abc"})
    assert rounds.decide().stands_until_s == float("inf")


def test_weights_are_shares() -> None:
    rounds = Rounds(parse_cluster("1x1"), {name: {"any": 1.0} for name in "ab"})
    rounds.jobs["a"] = view("a", rounds.cluster, weight=3.0)
    rounds.run(100)
    assert [share[0] for share in rounds.shares().values()] == pytest.approx([0.75, 0.25], abs=0.03)


def test_a_job_that_comes_within_a_round_is_behind_those_that_wait() -> None:
    rounds = Rounds(parse_cluster("1x1"), {name: {"any": 1.0} for name in "ab"})
    rounds.pass_time(rounds.decide(), 100.0)
    del rounds.jobs["a"]
    rounds.jobs = {"new": view("new", rounds.cluster), **rounds.jobs}
    rounds.options["new"] = (option(1, "any", 1.0),)
    assert set(rounds.decide().choices) == {"b"}


def test_the_least_total_duration_needs_everybody() -> None:
    rounds = Rounds(
        MIXED, {"a": {"a100": 40, "t4": 10}, "b": {"a100": 20, "t4": 10}, "c": {"t4": 5}}, objective="makespan"
    )
    rounds.run(60)
    assert all(sum(share) > 0.1 for share in rounds.shares().values())


def test_equal_throughput_is_the_mean_by_gpus() -> None:
    assert equal_throughput(np.array([[10.0, 2.0]]), np.array([3.0, 1.0])).tolist() == [8.0]
