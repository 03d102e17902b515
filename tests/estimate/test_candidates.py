"""The options of one job: fitting the cluster, Eq. 16, the Pareto set of shared ones, unknown jobs, baselines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icefrog.candidates import PRIOR_REMAINING_S, candidates, min_nodes, pareto_front
from icefrog.estimate.sharing import MEM_SAFETY
from icefrog.profile import OccupancyParams
from icefrog.spec import ClusterSpec, NodeSpec
from icefrog.testing.builders import cluster, job_spec, profile
from icefrog.types import Config, GradientStats, JobView, Pricing

STATS = GradientStats((1.0, 2.0, 30.0, 40.0), (1.0, 1.0, 1.0, 1.0))
SHARED_JOB = profile(occupancy=OccupancyParams(mem_bytes=(1e9, 1e8, 5e9, 2e9), util_pct=(10, 0.1, 40, 5)))


def view(**changes: Any) -> JobView:
    fields: dict[str, Any] = {
        "spec": job_spec(gpus=(1, 2, 4, 8)),
        "profile": profile(),
        "submit_s": 100.0,
        "gpus": (),
        "shared": False,
        "running": False,
        "config": None,
        "effective_samples": 0.0,
        "remaining_samples": 5000.0,
        "frozen_layers": 0,
        "stats": STATS,
        "attained_gpu_s": 0.0,
        "holding_since_s": None,
        "waiting_since_s": 100.0,
        "restart_s": 60.0,
        "num_restarts": 0,
    }
    return JobView(**(fields | changes))


def test_one_exclusive_option_for_each_count_that_fits() -> None:
    options = candidates(view(), cluster(nodes=1, gpus=4), 400.0)
    assert [option.config.num_gpus for option in options] == [1, 2, 4]
    for option in options:
        estimate = option.estimate
        assert estimate.effective_progress == pytest.approx(estimate.psi * estimate.throughput)
        assert estimate.tta_s == pytest.approx(300.0 + 5000.0 / estimate.effective_progress)
        assert estimate.throughput == pytest.approx(option.config.global_batch / estimate.step_s)
        assert option.config.global_batch == 64


def test_counts_that_do_not_divide_the_batch_are_left_out() -> None:
    options = candidates(view(spec=job_spec(gpus=(1, 3, 4))), cluster(), 400.0)
    assert [option.config.num_gpus for option in options] == [1, 4]


def test_several_nodes_cost_more_than_one() -> None:
    one = candidates(view(), cluster(nodes=1, gpus=8), 400.0)[2]
    two = candidates(view(), cluster(nodes=4, gpus=2), 400.0)[2]
    assert one.config.num_gpus == two.config.num_gpus == 4
    assert two.estimate.tta_s > one.estimate.tta_s


def test_fewest_nodes_of_a_mixed_cluster() -> None:
    mixed = ClusterSpec(nodes=(NodeSpec(gpus=4, count=2), NodeSpec(gpus=8, count=1)))
    assert [min_nodes(mixed, count) for count in (1, 8, 9, 12, 13, 16, 17)] == [1, 1, 2, 2, 3, 3, None]


def test_without_freezing_every_option_is_full_training() -> None:
    spec = job_spec(gpus=(1, 2), share=True)
    frozen = candidates(view(spec=spec, profile=SHARED_JOB), cluster(), 400.0)
    plain = candidates(view(spec=spec, profile=SHARED_JOB), cluster(), 400.0, Pricing())
    assert any(option.config.frozen_layers for option in frozen)
    assert not any(option.config.frozen_layers for option in plain)
    assert all(option.estimate.psi == 1.0 for option in plain)


@pytest.mark.parametrize("rule", ["none", "freezeout", "egeria"])
def test_a_job_with_its_own_rule_is_priced_at_the_depth_it_is_in(rule: str) -> None:
    spec = job_spec(gpus=(1, 2), freeze={"rule": rule})
    options = candidates(view(spec=spec, frozen_layers=2), cluster(), 400.0)
    assert {option.config.frozen_layers for option in options} == {2}
    assert options[0].estimate.psi == pytest.approx(70 / 73)
    unpriced = candidates(view(spec=spec, frozen_layers=2, stats=None), cluster(), 400.0)
    assert unpriced[0].estimate.psi == 1.0


def test_shared_options_are_a_pareto_set_within_the_rule() -> None:
    spec = job_spec(gpus=(1, 2), share=True)
    options = candidates(view(spec=spec, profile=SHARED_JOB), cluster(), 400.0)
    alone = next(option for option in options if option.config.num_gpus == 1 and not option.config.shared)
    shared = [option.estimate for option in options if option.config.shared]
    assert len(shared) > 1
    assert shared[0].throughput == pytest.approx(0.9 * alone.estimate.throughput)
    assert shared == sorted(shared, key=lambda estimate: estimate.tta_s)
    for one in shared:
        assert MEM_SAFETY * one.mem_bytes <= 80e9
        assert one.util_pct <= 100
        for other in shared:
            better = other.tta_s <= one.tta_s and other.mem_bytes <= one.mem_bytes and other.util_pct <= one.util_pct
            assert other is one or not better


def test_the_shared_set_is_capped_and_keeps_its_fastest() -> None:
    job = profile(num_layers=30, occupancy=SHARED_JOB.occupancy)
    stats = GradientStats(tuple(np.linspace(0.1, 1.0, 30).tolist()), (1.0,) * 30)
    wide = view(spec=job_spec(gpus=(1,), share=True), profile=job, stats=stats)
    everything = [one for one in candidates(wide, cluster(), 400.0, max_shared=1000) if one.config.shared]
    capped = [one for one in candidates(wide, cluster(), 400.0) if one.config.shared]
    assert len(everything) > 8 == len(capped)
    assert capped[0] == everything[0]
    assert set(capped) <= set(everything)


def test_a_job_that_does_not_share_or_never_fits_offers_nothing_shared() -> None:
    greedy = profile(occupancy=OccupancyParams(mem_bytes=(75e9, 0, 0, 0), util_pct=(50, 0, 0, 0)))
    assert not any(one.config.shared for one in candidates(view(), cluster(), 400.0))
    options = candidates(view(spec=job_spec(share=True), profile=greedy), cluster(), 400.0)
    assert options
    assert not any(one.config.shared for one in options)


def test_a_job_that_has_not_reported_can_start() -> None:
    options = candidates(view(profile=None, remaining_samples=None, stats=None), cluster(), 400.0)
    assert [option.config.num_gpus for option in options] == [1, 2, 4]
    times = [option.estimate.tta_s for option in options]
    assert times[0] == pytest.approx(300 + PRIOR_REMAINING_S)
    assert times == sorted(times, reverse=True)
    assert all(option.config.global_batch == 64 for option in options)
    assert candidates(view(profile=None, spec=job_spec(gpus=(3, 8))), cluster(), 400.0) == ()  # 3 does not divide 64
    assert not any(
        one.config.shared for one in candidates(view(profile=None, spec=job_spec(share=True)), cluster(), 0.0)
    )


def test_what_is_left_is_derived_where_the_job_did_not_say() -> None:
    options = candidates(view(remaining_samples=None, effective_samples=4000.0), cluster(), 100.0)
    first = options[0].estimate
    assert first.tta_s == pytest.approx((10 * 1000 - 4000) / first.effective_progress)


def test_time_to_accuracy_is_positive_even_with_nothing_left() -> None:
    for option in candidates(view(remaining_samples=0.0), cluster(), 0.0):
        assert option.estimate.tta_s > 0


def test_statistics_of_another_shape_count_as_none() -> None:
    options = candidates(view(stats=GradientStats((1.0,), (1.0,))), cluster(), 400.0)
    assert not any(option.config.frozen_layers for option in options)


def test_a_kept_answer_never_outlives_what_it_depends_on() -> None:
    job, nodes = view(spec=job_spec(gpus=(1, 2), share=True), profile=SHARED_JOB), cluster()
    changes: list[dict[str, Any]] = [
        {},
        {"stats": None},
        {"stats": GradientStats((50.0, 2.0, 3.0, 4.0), (1.0,) * 4)},
        {"running": True, "config": Config(1, 64, frozen_layers=1)},
        {"spec": job_spec(gpus=(1, 2), freeze={"max_fraction": 0.3})},
        {"spec": job_spec(gpus=(1, 2), freeze={"rule": "none"}), "frozen_layers": 3},
        {"remaining_samples": 77.0},
    ]
    for change in changes * 2:
        changed = replace(job, **change)
        fresh = replace(changed, profile=SHARED_JOB.model_copy())
        for now_s in (400.0, 500.0):
            assert candidates(changed, nodes, now_s) == candidates(fresh, nodes, now_s)


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3), max_size=30))
def test_pareto_front_agrees_with_the_definition(rows: list[tuple[int, int, int]]) -> None:
    costs = np.array(rows, dtype=float).reshape(-1, 3)
    front = pareto_front(costs).tolist()
    unbeaten = {
        row
        for row in rows
        if not any(other != row and all(a <= b for a, b in zip(other, row, strict=True)) for other in rows)
    }
    assert {rows[index] for index in front} == unbeaten
    assert len(front) == len(unbeaten)
    assert front == sorted(front, key=lambda index: rows[index])
