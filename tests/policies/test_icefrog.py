"""What icefrog decides, and what it promises to those who wait."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from icefrog import events as ev
from icefrog.policies import make_policy
from icefrog.simulate import RunResult, SimSettings, icefrog_scenario, simulate
from icefrog.testing.builders import candidate, cluster, job_spec
from icefrog.testing.policies import CONTRACT, Case, after, cases
from icefrog.types import Candidate, Config, Estimate, GpuId, JobView, Plan, Pricing, Snapshot

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))
from worlds import SettlingCurves, Workload

from icefrog.testing.builders import profile


def view(name: str, *, held: tuple[GpuId, ...] = (), waiting_since_s: float = 0.0, **spec: Any) -> JobView:
    config = Config(len(held), 32) if held else None
    return JobView(
        spec=job_spec(name, **spec), profile=None, submit_s=0.0, gpus=held, shared=False, running=bool(held), config=config,
        effective_samples=0.0, remaining_samples=1e4, frozen_layers=0, stats=None, attained_gpu_s=0.0, holding_since_s=None,
        waiting_since_s=None if held else waiting_since_s, restart_s=60.0, num_restarts=0,
    )  # fmt: skip


def options(**minutes: float) -> tuple[Candidate, ...]:
    """``g2=60``: two GPUs take 60 minutes."""
    return tuple(candidate(int(key[1:]), value * 60.0) for key, value in minutes.items())


def half(tta_s: float, mem_bytes: float, util_pct: float) -> Candidate:
    return Candidate(Config(1, 32, shared=True), Estimate(0.1, 100.0, 1.0, 100.0, mem_bytes, util_pct, tta_s))


def decide(
    jobs: list[JobView], offered: dict[str, tuple[Candidate, ...]], *, now_s: float = 0.0, nodes: int = 1,
    memory: Any = None, **knobs: Any,
) -> Plan:  # fmt: skip
    snapshot = Snapshot(now_s=now_s, cluster=cluster(nodes, 4), jobs=tuple(jobs), memory=memory)
    return make_policy("icefrog", knobs).decide(snapshot, offered)


def counts(plan: Plan) -> dict[str, int]:
    return {job_id: choice.config.num_gpus for job_id, choice in plan.choices.items()}


def test_worked_example_of_the_specification() -> None:
    jobs = [view("A", gpus=(1, 2, 4)), view("B", gpus=(1, 2, 4))]
    b = options(g1=80, g2=50, g4=45)
    assert counts(decide(jobs, {"A": options(g1=100, g2=60, g4=50), "B": b})) == {"A": 2, "B": 2}
    assert counts(decide(jobs, {"A": options(g1=55, g2=60, g4=50), "B": b})) == {"A": 1, "B": 2}


def test_in_overload_everything_ties_at_zero_and_the_sum_decides() -> None:
    jobs = [view(f"j{i}", gpus=(1, 2)) for i in range(6)]
    plan = decide(jobs, {job.job_id: options(g1=100, g2=60) for job in jobs}, rho=1.0)
    assert counts(plan) == {"j0": 1, "j1": 1, "j2": 1, "j3": 1}
    assert all("waits" in plan.reasons[name] for name in ("j4", "j5"))


def test_a_change_must_be_worth_its_restart() -> None:
    held = view("A", held=(GpuId(0, 0), GpuId(0, 1)), gpus=(2, 4))
    slightly, much = options(g2=10, g4=9.5), options(g2=10, g4=5)
    assert counts(decide([held], {"A": slightly})) == {"A": 2}
    assert counts(decide([held], {"A": much})) == {"A": 4}
    assert counts(decide([view("A", gpus=(2, 4))], {"A": slightly})) == {"A": 4}


def test_who_ends_before_a_restart_is_over_is_not_resized() -> None:
    """Two of A's four GPUs would let B run now; but A, if it has 50 s left, gives up all four in less than its restart."""
    held = view("A", held=tuple(GpuId(0, device) for device in range(4)), gpus=(2, 4))
    short = options(g2=2)
    ends_soon, goes_on = options(g2=52 / 60, g4=50 / 60), options(g2=104 / 60, g4=100 / 60)
    jobs = [held, view("B", gpus=(2,))]
    assert counts(decide(jobs, {"A": ends_soon, "B": short}, min_gain=0.0)) == {"A": 4}
    assert counts(decide(jobs, {"A": goes_on, "B": short}, min_gain=0.0)) == {"A": 2, "B": 2}


def test_who_ran_undisturbed_for_long_moves_for_less() -> None:
    held = view("A", held=(GpuId(0, 0), GpuId(0, 1)), gpus=(2, 4))
    days = options(g2=6000, g4=5400)  # a tenth less, with idle GPUs, for a restart of a minute
    lately, long_ago = (replace(held, holding_since_s=now_s) for now_s in (9000.0, 0.0))
    then: dict[str, Any] = {"now_s": 10_000.0, "batch": "fixed"}
    assert counts(decide([lately], {"A": days}, **then)) == {"A": 2}
    assert counts(decide([long_ago], {"A": days}, **then)) == {"A": 4}
    assert counts(decide([long_ago], {"A": options(g2=200, g4=199)}, **then)) == {"A": 2}
    assert counts(decide([long_ago], {"A": days}, now_s=10_000.0)) == {"A": 2}  # elastic batches: as before


def test_large_requests_are_whole_nodes() -> None:
    job = view("A", gpus=(2, 6, 8))
    offered = {"A": options(g2=100, g6=40, g8=41)}
    assert counts(decide([job], offered, nodes=2)) == {"A": 8}
    assert counts(decide([job], {"A": options(g6=40)}, nodes=2)) == {"A": 6}  # nothing else to take


def test_a_pair_gets_the_combination_that_fits() -> None:
    """One GPU's worth each; the fastest two do not fit together, one of them must take its smaller configuration."""
    jobs = [view(name, gpus=(1,), share=True) for name in "abcde"]
    small = (*options(g1=100), half(6600.0, 45e9, 60.0), half(7000.0, 20e9, 30.0))
    plan = decide(jobs, dict.fromkeys("abcde", small))
    assert len(plan.pairs) == 1
    first, second = (plan.choices[job_id].estimate for job_id in plan.pairs[0])
    assert 1.1 * (first.mem_bytes + second.mem_bytes) <= 80e9
    assert first.util_pct + second.util_pct <= 100.0
    assert first.tta_s + second.tta_s == 6600.0 + 7000.0
    alone = decide(jobs, dict.fromkeys("abcde", small), share=False)
    assert not alone.pairs
    assert len(alone.choices) == 4


def test_who_waited_too_long_runs_and_keeps_running_for_a_while() -> None:
    jobs = [view(f"j{i}", held=(GpuId(0, i),), gpus=(1,)) for i in range(4)]
    big = view("big", gpus=(4,), waiting_since_s=0.0)
    offered = {**{job.job_id: options(g1=100) for job in jobs}, "big": options(g4=100)}
    assert "big" not in decide([*jobs, big], offered, now_s=3599.0, max_wait_s=3600.0).choices
    plan = decide([*jobs, big], offered, now_s=3601.0, max_wait_s=3600.0)
    assert set(plan.choices) == {"big"}
    waiting = [replace(job, gpus=(), running=False, config=None, waiting_since_s=3601.0) for job in jobs]
    runs = replace(
        big, gpus=tuple(GpuId(0, i) for i in range(4)), running=True, config=Config(4, 32), waiting_since_s=None
    )
    knobs = {"max_wait_s": 3600.0, "min_run_s": 600.0, "memory": plan.memory}
    assert set(decide([*waiting, runs], offered, now_s=4200.0, **knobs).choices) == {"big"}
    assert "big" not in decide([*waiting, runs], offered, now_s=4202.0, **knobs).choices


def test_in_overload_short_jobs_run_first_however_old_the_long_ones_are() -> None:
    long_ones = [view(f"long{i}", gpus=(1,)) for i in range(4)]
    short = [replace(view(f"short{i}", gpus=(1,)), submit_s=3000.0) for i in range(4)]
    offered = {job.job_id: options(g1=600) for job in long_ones} | {job.job_id: options(g1=10) for job in short}
    jobs = [*long_ones, *short]
    assert set(decide(jobs, offered, now_s=3000.0).choices) == {job.job_id for job in short}
    assert set(decide(jobs, offered, now_s=3000.0, urgency=0.0).choices) == {job.job_id for job in long_ones}


def test_forced_jobs_take_their_share_of_the_gpus_and_the_first_in_line_always_runs() -> None:
    """Six have waited too long. All want one GPU for ten hours; four newcomers want one for ten minutes."""
    old = [view(f"old{i}", gpus=(1,), waiting_since_s=float(i)) for i in range(6)]
    new = [replace(view(f"new{i}", gpus=(1,), waiting_since_s=9000.0), submit_s=9000.0) for i in range(4)]
    offered = {job.job_id: options(g1=750) for job in old} | {job.job_id: options(g1=10) for job in new}

    def forced(turn_share: float) -> set[str]:
        plan = decide([*old, *new], offered, now_s=9000.0, max_wait_s=3600.0, turn_share=turn_share)
        return {job_id for job_id in plan.choices if job_id.startswith("old")}

    assert forced(0.0) == {"old0"}
    assert forced(0.5) == {"old0", "old1"}
    assert forced(1.0) == {"old0", "old1", "old2", "old3"}


def test_where_everybody_has_what_is_best_nothing_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [view("A", held=(GpuId(0, 0), GpuId(0, 1)), gpus=(1, 2)), view("B", held=(GpuId(0, 2),), gpus=(1, 2))]
    offered = {"A": options(g1=100, g2=60), "B": options(g1=50, g2=49)}  # B: not worth a restart
    solved = decide(held, offered)
    monkeypatch.setattr("icefrog.policies.icefrog.solve", None)
    assert decide(held, offered) == solved
    assert counts(solved) == {"A": 2, "B": 1}
    with pytest.raises(TypeError):
        decide(held, {**offered, "B": options(g1=50, g2=25)})


@pytest.mark.parametrize(
    ("knobs", "pricing"),
    [
        ({}, Pricing(freezing="tuner", batch="elastic")),
        ({"penalty": "signal"}, Pricing(freezing="signal", batch="elastic")),
        ({"penalty": "freezeout"}, Pricing(freezing="freezeout", batch="elastic")),
        ({"batch": "fixed"}, Pricing(freezing="tuner")),
        ({"slowdown": 0.6}, Pricing(freezing="tuner", batch="elastic", sharing_speed=0.6)),
    ],
)
def test_ablations_are_options(knobs: dict[str, Any], pricing: Pricing) -> None:
    assert make_policy("icefrog", knobs).pricing == pricing


@given(case=cases())
@CONTRACT
def test_deciding_again_changes_nothing(case: Case) -> None:
    """No flip-flop: once a plan is carried out, the same situation gives the same configurations."""
    policy = make_policy("icefrog")
    snapshot, offered = case.of(policy)
    plan = policy.decide(snapshot, offered)
    later = after(case, policy, plan)
    again = policy.decide(later.snapshot, offered)
    assert counts(again) == counts(plan)
    assert {c for c, o in again.choices.items() if o.config.shared} == {
        c for c, o in plan.choices.items() if o.config.shared
    }


# -- the bound on waiting ----------------------------------------------------------------------------------------------


def stream(gap_s: float) -> Workload:
    """A one-node cluster kept busy by single-GPU jobs, and one job that accepts nothing but the whole node."""
    specs = [
        job_spec(
            f"small{i:02d}", command=None, workload="made-up", gpus=(1,), batch={"global": 256}, max_epochs=20,
            submit_s=gap_s * i, duration_s=3600.0,
        )
        for i in range(40)
    ]  # fmt: skip
    big = job_spec(
        "big", command=None, workload="made-up", gpus=(4,), batch={"global": 256}, max_epochs=20, submit_s=1000.0,
        duration_s=3600.0,
    )  # fmt: skip
    jobs = sorted((*specs, big), key=lambda spec: spec.submit_s)
    names = [spec.name for spec in jobs]
    shape = profile(6, samples_per_epoch=10_000)
    return Workload(tuple(jobs), dict.fromkeys(names, shape), dict.fromkeys(names, SettlingCurves(6)))


@dataclass(frozen=True)
class Wait:
    job_id: str
    seconds: float
    ahead: int  # jobs that waited already when it began


def waits(result: RunResult) -> list[Wait]:
    """Every wait for GPUs of every job, in the order in which they ended."""
    begun: dict[str, tuple[float, int]] = {}
    ended = []
    for record in result.records:
        if isinstance(record, ev.JobSubmitted | ev.JobStopped):
            begun[record.job_id] = (record.time_s, len(begun))
        elif isinstance(record, ev.JobStarted) and record.job_id in begun:
            since_s, ahead = begun.pop(record.job_id)
            ended.append(Wait(record.job_id, record.time_s - since_s, ahead))
    return ended


@cache
def simulated(gap_s: float, max_wait_s: float) -> RunResult:
    work, knobs = stream(gap_s), {"max_wait_s": max_wait_s, "min_run_s": 600.0}
    return simulate(
        icefrog_scenario(work.specs, work.profiles, work.curves, cluster(1, 4)),
        "icefrog",
        knobs,
        SimSettings(check=True),
    )


def test_without_a_bound_a_stream_of_small_jobs_starves_a_large_one() -> None:
    assert max(wait.seconds for wait in waits(simulated(900.0, 1e9)) if wait.job_id == "big") > 4 * 3600.0
    assert max(wait.seconds for wait in waits(simulated(900.0, 3600.0)) if wait.job_id == "big") < 1.5 * 3600.0


@pytest.mark.parametrize(("gap_s", "max_wait_s"), [(900.0, 3600.0), (300.0, 1800.0), (300.0, 7200.0)])
def test_every_wait_is_bounded(gap_s: float, max_wait_s: float) -> None:
    """Whoever is forced waits for those ahead of it at most, one turn (and one round) each."""
    found = waits(simulated(gap_s, max_wait_s))
    assert max(wait.seconds for wait in found) > max_wait_s  # the bound is put to the test
    for wait in found:
        assert wait.seconds <= max_wait_s + (600.0 + 300.0) * (1 + wait.ahead)
