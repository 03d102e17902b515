"""Themis by hand: finish-time fairness, who takes part in an auction, leases."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from stage import Role, Stage, view

from icefrog.policies.themis import Bid, Themis, bid
from icefrog.testing.builders import candidate, cluster
from icefrog.types import Snapshot


def test_finish_time_fairness() -> None:
    """Half done after 300 s, 100 s to go on 2 GPUs; on a third of 4 GPUs it would have taken 200 x 2 x 3 / 4 = 300 s."""
    job = replace(view(Role("a", 100, 2)), effective_samples=50.0, remaining_samples=50.0)
    others = tuple(view(Role(name, 100)) for name in "bc")
    snapshot = Snapshot(300.0, cluster(1, 4), (job, *others))
    own = bid(job, candidate(2, 400.0), snapshot)
    assert own == Bid(age_s=300.0, remaining_s=100.0, independent_s=300.0, num_gpus=2)
    assert own.rho() == pytest.approx(400 / 300)
    assert own.rho(delay_s=200.0) == pytest.approx(2.0)
    assert own.gain(200.0) == pytest.approx(math.log(1.5) / 2)


def test_a_job_that_fits_into_its_share_needs_no_more_than_its_own_time() -> None:
    job = view(Role("a", 100, 1))
    snapshot = Snapshot(0.0, cluster(1, 4), (job, view(Role("b", 100))))
    assert bid(job, candidate(1, 100.0), snapshot).rho() == 1.0


def in_line(fairness: float, **bids: Bid) -> list[str]:
    policy = Themis(Themis.Options(fairness=fairness, lease_s=100.0))
    return [job.job_id for job in policy._in_line([view(Role(name, 1)) for name in bids], bids)]


def test_the_knob_says_who_takes_part() -> None:
    """rho: worst 3.0, middle 2.0, best 1.1. By gain a GPU the order is the other way round."""
    bids = {
        "best": Bid(10.0, 100.0, 100.0, 1),  # a lease lost takes it from 1.1 to 2.1
        "middle": Bid(300.0, 100.0, 200.0, 1),  # from 2.0 to 2.5
        "worst": Bid(500.0, 100.0, 200.0, 4),  # from 3.0 to 3.5, for four GPUs
    }
    assert in_line(1.0, **bids) == ["worst", "middle", "best"]
    assert in_line(0.5, **bids) == ["middle", "worst", "best"]  # two seats: the worst-off two bid
    assert in_line(0.0, **bids) == ["best", "middle", "worst"]


def test_gpus_are_leased_and_offered_again() -> None:
    """One GPU, two equal jobs: a lease each in turn; the loser of an auction is worse off in the next."""
    stage = Stage("themis", [Role("a", 300), Role("b", 300)], lease_s=100.0, fairness=1.0)
    stage.play(round_s=50.0)
    assert stage.finish_s == {"a": 500, "b": 600}
    assert [plan.stands_until_s for plan in stage.plans[:3]] == [100.0, 100.0, 200.0]


def test_a_lease_is_kept_until_it_ends() -> None:
    stage = Stage("themis", [Role("a", 1000), Role("b", 10, submit_s=130)], lease_s=100.0).play(round_s=10.0)
    assert stage.finish_s == {"b": 210, "a": 1010}


def test_a_lease_won_again_is_no_restart() -> None:
    stage = Stage("themis", [Role("a", 500), Role("huge", 10, 2, submit_s=1)], lease_s=100.0).play(200.0, round_s=50.0)
    assert not any(plan.preempted for plan in stage.plans)
    assert sum("a" in plan.choices for plan in stage.plans) == 1


def test_gangs_and_small_jobs_end_equally_late() -> None:
    """6 GPUs, one 6-GPU job and two 3-GPU jobs of 3,000 s. On a third of the cluster the large one would take 9,000 s, each
    small one 4,500 s; the auctions let all three end at two thirds of that."""
    roles = [Role("six", 3000, 6), Role("three-a", 3000, 3), Role("three-b", 3000, 3)]
    stage = Stage("themis", roles, gpus=6, lease_s=100.0, fairness=1.0).play(round_s=100.0)
    rho = {"six": stage.jct_s["six"] / 9000, **{name: stage.jct_s[name] / 4500 for name in ("three-a", "three-b")}}
    assert rho == pytest.approx(dict.fromkeys(rho, 2 / 3), abs=0.03)
