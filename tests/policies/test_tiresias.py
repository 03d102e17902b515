"""Tiresias by hand: demotion, promotion, the Gittins index, and what it remembers."""

from __future__ import annotations

import math

import pytest
from stage import Role, Stage

from icefrog.errors import UserError
from icefrog.policies import make_policy
from icefrog.policies.gittins import GittinsIndex

SECONDS = 1.0 / 3600.0  # in GPU-hours, on one GPU


def test_a_job_that_reached_the_threshold_makes_way_for_one_that_has_not() -> None:
    roles = [Role("long", 300), Role("short", 50, submit_s=50)]
    stage = Stage("tiresias", roles, thresholds_gpu_h=(100 * SECONDS,))
    stage.play(until_s=50)
    assert stage.decide().stands_until_s == 100  # when the running job comes to its threshold
    assert stage.play(round_s=10).finish_s == {"short": 150, "long": 350}


@pytest.mark.parametrize(
    ("promote", "finish_s"),
    [
        (math.inf, {"long": 400, "other": 550}),  # 100 each, then in order of their coming to the second queue
        (1.0, {"long": 500, "other": 550}),  # who has waited as long as it ran is first again: they take turns
    ],
)
def test_a_job_that_waited_too_long_is_forgiven(promote: float, finish_s: dict[str, float]) -> None:
    roles = [Role("long", 300), Role("other", 250, submit_s=50)]
    stage = Stage("tiresias", roles, thresholds_gpu_h=(100 * SECONDS,), promote=promote)
    assert stage.play(round_s=10).finish_s == finish_s


@pytest.mark.parametrize(
    ("attained", "quantum", "index"),
    [
        (0.0, 1.0, 1 / 3),  # one of three is complete, and each takes 1
        (0.0, 2.0, (2 / 3) / ((1 + 2 + 2) / 3)),
        (1.0, 1.0, 1 / 2),  # of 2 and 4, which are left, one is complete
        (1.0, math.inf, 1 / ((1 + 3) / 2)),
        (4.0, 1.0, 0.0),  # nobody lasted longer
    ],
)
def test_the_gittins_index_by_hand(attained: float, quantum: float, index: float) -> None:
    assert GittinsIndex([4.0, 1.0, 2.0])(attained, quantum) == pytest.approx(index)


@pytest.mark.parametrize(
    ("services_s", "first"),
    [
        ([10] * 9 + [1000], "new"),  # who has run for 20 s is one of the long ones
        ([21] * 9 + [10], "old"),  # who has run for 20 s is as good as complete
    ],
)
def test_within_a_queue_the_larger_index_runs(services_s: list[float], first: str) -> None:
    services = tuple(value * SECONDS for value in services_s)
    stage = Stage("tiresias", [Role("old", 40), Role("new", 40, submit_s=20)], index="gittins", services_gpu_h=services)
    finish_s = stage.play().finish_s
    assert min(finish_s, key=finish_s.__getitem__) == first


def test_jobs_that_have_left_are_not_remembered() -> None:
    roles = [Role(f"job-{at}", 150, submit_s=100 * at) for at in range(10)]
    stage = Stage("tiresias", roles, thresholds_gpu_h=(100 * SECONDS,), promote=1.0)
    stage.play(until_s=1150, round_s=10)
    there = {job.job_id for job in stage.snapshot.jobs}
    assert len(there) < len(roles)
    stage.decide()
    memory = stage.plans[-1].memory
    assert {job_id for queue in memory["later"] for job_id in queue} | set(memory["forgiven"]) <= there


@pytest.mark.parametrize("hours", [(), "", (0,), (4, 1), (math.inf,)])
def test_thresholds_that_make_no_queues_are_refused(hours: object) -> None:
    with pytest.raises(UserError, match="thresholds_gpu_h"):
        make_policy("tiresias", {"thresholds_gpu_h": hours})


def test_a_job_that_moves_to_make_room_still_comes_to_its_threshold() -> None:
    roles = [
        Role("old", 500),
        Role("gone", 115),
        Role("young", 500, submit_s=110),
        Role("wide", 500, gpus=2, submit_s=120),
    ]
    thresholds = (100 * SECONDS, 130 * SECONDS)
    stage = Stage("tiresias", roles, nodes=2, gpus=2, thresholds_gpu_h=thresholds).play(until_s=120, round_s=10)
    plan = stage.decide()  # "old", in the second queue, goes from beside nobody to beside "young"
    assert set(plan.choices) == {"wide", "old"}
    assert plan.stands_until_s == 130  # not 170, when "wide" comes to its own
