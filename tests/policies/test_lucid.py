"""Lucid by hand: order of service, who is packed with whom; its rule against Lucid's own measurements."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from stage import Role, Stage

from icefrog.estimate.sharing import MEM_SAFETY
from icefrog.policies.lucid import Lucid
from icefrog.types import Candidate, Config, Estimate


def job(
    name: str, length_s: float, util_pct: float | None, submit_s: float = 0.0, gpus: int = 1, **more: float
) -> Role:
    spec = {"share": True, "gpus": (1, gpus) if gpus > 1 else (1,), "num_gpus": gpus} if util_pct is not None else {}
    return Role(name, length_s, gpus, submit_s, util_pct=util_pct, spec=spec, **more)


def test_least_service_first_and_nobody_is_preempted() -> None:
    roles = [job("now", 10, None, gpus=4), job("wide", 20, None, 1, gpus=4), job("narrow", 70, None, 1)]
    assert Stage("lucid", roles, gpus=4).play().finish_s == {"now": 10, "narrow": 80, "wide": 100}


@pytest.mark.parametrize(
    ("first", "second", "packed"),
    [(10, 99, True), (50, 50, True), (51, 50, False), (51, 15, True), (16, 51, False)],
)
def test_packed_if_the_scores_add_up_to_two(first: float, second: float, packed: bool) -> None:
    stage = Stage("lucid", [job("a", 100, first), job("b", 100, second, 1)])
    stage.play(until_s=2)
    assert stage.plans[-1].pairs == ((("a", "b"),) if packed else ())
    assert stage.play().finish_s == {"a": 100, "b": 101 if packed else 200}


def test_packing_is_for_queues_only() -> None:
    stage = Stage("lucid", [job("a", 100, 10), job("b", 100, 10)], gpus=2).play()
    assert not any(plan.pairs for plan in stage.plans)


@pytest.mark.parametrize(
    ("knobs", "packed"), [({"gss": 1}, False), ({"gss": 0}, False), ({"pack": False}, False), ({}, True)]
)
def test_capacity_and_switch(knobs: dict[str, object], packed: bool) -> None:
    stage = Stage("lucid", [job("a", 100, 30), job("b", 100, 30, 1)], **knobs).play()
    assert any(plan.pairs for plan in stage.plans) == packed


def test_memory_must_fit() -> None:
    big = {"mem_bytes": 40e9}  # 1.1 x 80 GB on 80 GB
    assert Stage("lucid", [job("a", 9, 10, **big), job("b", 9, 10, 1, **big)]).play().finish_s["b"] == 18
    small = {"mem_bytes": 32e9}
    assert Stage("lucid", [job("a", 9, 10, **big), job("b", 9, 10, 1, **small)]).play().finish_s["b"] == 10


def test_the_least_busy_partner_is_taken_and_none_twice() -> None:
    roles = [job("busy", 100, 40), job("idle", 100, 20), *(job(f"late{i}", 50 + i, 30, 1) for i in range(3))]
    stage = Stage("lucid", roles, gpus=2).play(until_s=2)
    assert stage.plans[-1].pairs == (("idle", "late0"), ("busy", "late1"))


def test_a_partner_has_its_gpu_to_itself_again() -> None:
    stage = Stage("lucid", [job("a", 100, 30), job("b", 10, 30, 1), job("c", 10, 30, 50)]).play(until_s=12)
    assert not next(view for view in stage.snapshot.jobs if view.job_id == "a").shared
    assert stage.plans[-1].reasons == {"a": "has its GPU to itself again"}
    assert stage.play().finish_s == {"b": 11, "c": 60, "a": 100}


def test_distributed_jobs_are_never_packed() -> None:
    stage = Stage("lucid", [job("a", 10, 10), job("two", 10, 10, 1, gpus=2)], gpus=2).play()
    assert stage.finish_s == {"a": 10, "two": 20}
    assert not any(plan.pairs for plan in stage.plans)


def test_predictions_can_be_made_wrong_reproducibly() -> None:
    roles = [job("now", 10, None), *(job(f"j{i}", 100 + i, None, 1) for i in range(8))]
    exact, wrong, again = (Stage("lucid", roles, duration_noise=noise).play() for noise in (0.0, 1.0, 1.0))
    assert list(exact.finish_s) == [role.name for role in roles]
    assert list(wrong.finish_s) != list(exact.finish_s)
    assert wrong.finish_s == again.finish_s


def test_the_rule_is_as_cautious_as_lucids_on_lucids_measurements(data_dir: Path) -> None:
    """The paper: of the pairs its decision tree lets share, 98.1 % keep a normalised speed of at least 0.85 (mean of the
    two), and it finds 87 % of such pairs. Our round thresholds, not fitted to these data, admit fewer, as safe ones."""
    folder = data_dir / "lucid"
    if not folder.is_dir():
        pytest.skip(f"no measured pairs in {folder}")
    policy = Lucid(Lucid.Options())
    alone = {_key(row, ""): row for row in _rows(folder / "single_data.csv")}
    pairs = [
        ([alone[_key(row, "1")], alone[_key(row, "2")]], (float(row["speed1"]) + float(row["speed2"])) / 2)
        for row in _rows(folder / "colocate_info.csv")
    ]
    admitted = [speed for both, speed in pairs if _fits(policy, both)]
    good = [speed for _, speed in pairs if speed >= 0.85]
    assert len(pairs) > 1000
    assert sum(speed >= 0.85 for speed in admitted) / len(admitted) >= 0.981
    assert sum(speed >= 0.85 for speed in admitted) / len(good) >= 0.5


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


def _key(row: dict[str, str], which: str) -> tuple[str, ...]:
    return tuple(row[f"{name}{which}"] for name in ("model", "dataset", "batchsize", "amp"))


def _fits(policy: Lucid, both: list[dict[str, str]]) -> bool:
    halves = [
        Candidate(Config(1, 1, shared=True), Estimate(1, 1, 1, 1, float(row["gmem"]), float(row["gpu_util"]), 1))
        for row in both
    ]
    memory = MEM_SAFETY * sum(half.estimate.mem_bytes for half in halves) <= 24_576  # MiB of an RTX 3090
    return memory and sum(map(policy.score, halves)) <= policy.options.gss
