"""Gandiva_fair by hand: users' shares of GPU time."""

from __future__ import annotations

from collections import Counter

import pytest
from stage import Role, Stage


def of(user: str, name: str, gpus: int = 1, length_s: float = 1e6, submit_s: float = 0.0) -> Role:
    return Role(name, length_s, gpus, submit_s, spec={"labels": {"user": user, "vc": "one"}})


def shares(stage: Stage, since: Counter[str] | None = None) -> dict[str, float]:
    """GPU time of each user over all GPU time."""
    had: Counter[str] = Counter()
    for name, gpu_s in stage.gpu_s.items():
        had[stage.roles[name].spec["labels"]["user"]] += gpu_s
    had.subtract(since or {})
    return {user: gpu_s / sum(had.values()) for user, gpu_s in had.items()}


@pytest.mark.parametrize("gang", [1, 2, 4])
def test_users_get_the_same_gpu_time_however_many_jobs_and_however_large(gang: int) -> None:
    """Three users on 4 GPUs: one job, three jobs, and a crowd of eight."""
    roles = [
        of("few", "gang", gang),
        *(of("some", f"s{i}") for i in range(3)),
        *(of("many", f"m{i}", 2) for i in range(8)),
    ]
    stage = Stage("gandiva-fair", roles, gpus=4, quantum_s=100.0).play(30_000.0, round_s=100.0)
    share = shares(stage)
    wanted = min(gang / 4, 1 / 3)  # a single one-GPU job cannot use a third
    assert share["few"] == pytest.approx(wanted, abs=0.02)
    assert share["some"] == pytest.approx((1 - wanted) / 2, abs=0.03)
    assert share["many"] == pytest.approx((1 - wanted) / 2, abs=0.03)


def test_a_gang_is_not_starved_by_small_jobs() -> None:
    """Naive stride passes a 4-GPU job for ever while single GPUs come free one by one."""
    roles = [*(of("small", f"s{i}") for i in range(6)), of("large", "gang", 4)]
    stage = Stage("gandiva-fair", roles, gpus=4, quantum_s=100.0).play(10_000.0, round_s=100.0)
    assert shares(stage) == pytest.approx({"small": 0.5, "large": 0.5}, abs=0.02)


def test_within_a_user_jobs_take_turns() -> None:
    roles = [of("one", f"j{i}") for i in range(3)]
    stage = Stage("gandiva-fair", roles, gpus=1, quantum_s=100.0).play(6_000.0, round_s=100.0)
    assert set(stage.gpu_s.values()) == {2000.0}


def test_nobody_is_preempted_within_a_quantum() -> None:
    stage = Stage("gandiva-fair", [of("a", "a"), of("b", "b", submit_s=130.0)], quantum_s=100.0)
    stage.play(199.0, round_s=10.0)
    assert not any(plan.preempted for plan in stage.plans)
    assert stage.plans[-1].stands_until_s == 200.0
    stage.play(201.0, round_s=10.0)
    assert stage.plans[-1].preempted == {"a"}


def test_idle_gpus_are_no_debt_and_absence_is_no_credit() -> None:
    """ "early" had the cluster to itself for long; from when "late" comes both get the same."""
    stage = Stage("gandiva-fair", [of("early", "e"), of("late", "l", submit_s=5_000.0)], quantum_s=100.0)
    stage.play(5_000.0, round_s=100.0)
    since = Counter(early=int(stage.gpu_s["e"]))
    assert shares(stage.play(15_000.0, round_s=100.0), since) == pytest.approx({"early": 0.5, "late": 0.5}, abs=0.02)


def test_the_owner_is_the_label_that_one_names() -> None:
    """By virtual cluster all jobs here have one owner: they take turns as equals."""
    roles = [of("one", "a"), of("one", "b"), of("two", "c")]
    by_user = Stage("gandiva-fair", roles, quantum_s=100.0).play(6_000.0, round_s=100.0)
    assert shares(by_user)["two"] == pytest.approx(0.5, abs=0.02)
    by_vc = Stage("gandiva-fair", roles, quantum_s=100.0, user="vc").play(6_000.0, round_s=100.0)
    assert shares(by_vc)["two"] == pytest.approx(1 / 3, abs=0.02)
