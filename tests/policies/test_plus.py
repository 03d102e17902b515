"""The paper's baselines with tuned FreezeOut."""

from __future__ import annotations

from dataclasses import replace

import pytest

from icefrog.policies import make_policy
from icefrog.testing.builders import candidate, cluster, job_spec, view
from icefrog.types import Candidate, JobView, Snapshot


@pytest.mark.parametrize("name", ["lucid+", "optimus+", "pollux+"])
def test_they_freeze_by_freezeout_and_only_pollux_moves_the_batch(name: str) -> None:
    pricing = make_policy(name).pricing
    assert pricing.freezing == "freezeout"
    assert (pricing.batch == "elastic") == (name == "pollux+")


def options() -> tuple[Candidate, ...]:
    return candidate(1, 1000.0), candidate(2, 600.0), candidate(1, 1100.0, shared=True)


def waiting(name: str) -> JobView:
    return replace(view(name), spec=job_spec(name, share=True), waiting_since_s=0.0)


def snapshot(num_jobs: int, num_gpus: int) -> Snapshot:
    jobs = tuple(waiting(f"j{i}") for i in range(num_jobs))
    return Snapshot(now_s=0.0, cluster=cluster(1, num_gpus), jobs=jobs)


@pytest.mark.parametrize(("num_jobs", "num_gpus", "num_pairs"), [(3, 4, 0), (4, 4, 0), (5, 4, 1), (8, 4, 4), (9, 4, 4)])
def test_optimus_plus_can_pack_as_many_pairs_as_the_queue_takes(num_jobs: int, num_gpus: int, num_pairs: int) -> None:
    now = snapshot(num_jobs, num_gpus)
    plan = make_policy("optimus+", {"pack": "short"}).decide(now, {job.job_id: options() for job in now.jobs})
    assert len(plan.pairs) == num_pairs
    assert len(plan.choices) == min(num_jobs, num_gpus + num_pairs)


@pytest.mark.parametrize(("num_jobs", "gpus"), [(1, [2]), (2, [1, 1]), (3, [1, 1, 2]), (9, [1] * 8)])
def test_optimus_plus_packs_first_and_deals_out_what_that_leaves(num_jobs: int, gpus: list[int]) -> None:
    """Of four GPUs each pair takes one; a job that finds no partner has two, or none."""
    now = snapshot(num_jobs, 4)
    plan = make_policy("optimus+").decide(now, {job.job_id: options() for job in now.jobs})
    assert len(plan.pairs) == min(num_jobs // 2, 4)
    assert sorted(choice.config.num_gpus for choice in plan.choices.values()) == gpus


def test_optimus_plus_deals_out_what_packing_leaves() -> None:
    now = snapshot(3, 4)
    plan = make_policy("optimus+", {"pack": "short"}).decide(now, {job.job_id: options() for job in now.jobs})
    assert sorted(choice.config.num_gpus for choice in plan.choices.values()) == [1, 1, 2]
    alone = make_policy("optimus+", {"share": False}).decide(snapshot(5, 4), {f"j{i}": options() for i in range(5)})
    assert not alone.pairs
    assert len(alone.choices) == 4


@pytest.mark.parametrize("name", ["pollux", "pollux+"])
@pytest.mark.parametrize("knobs", [{}, {"max_growth": "inf"}])
def test_pollux_lets_no_job_wait_beside_idle_gpus_when_it_arrives(name: str, knobs: dict[str, str]) -> None:
    arrived = snapshot(1, 4)
    arrived = replace(arrived, now_s=arrived.jobs[0].submit_s)
    plan = make_policy(name, knobs).decide(arrived, {job.job_id: options() for job in arrived.jobs})
    assert set(plan.choices) == {job.job_id for job in arrived.jobs}
