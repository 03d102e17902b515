"""Step times of sharded, pipelined and hybrid jobs: worked values, and what must hold for any parameters."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from icefrog.estimate.full_layers import full_step_s
from icefrog.estimate.stages import balanced_split
from icefrog.estimate.throughput import step_s, throughput
from icefrog.profile import (
    ComputeCurve,
    LayerCost,
    Link,
    Pipelined,
    Profile,
    Replicated,
    Sharded,
    SyncCurve,
    ThroughputParams,
)
from icefrog.testing.builders import profile

seconds = st.floats(1e-6, 10.0)
curves = st.builds(ComputeCurve, alpha_s=seconds, beta_s=seconds, smooth=st.sampled_from([1.0, 2.5]))
syncs = st.builds(
    SyncCurve, intra_alpha_s=seconds, intra_beta_s=seconds, inter_alpha_s=seconds, inter_beta_s=seconds,
    pair_beta_s=seconds,
)  # fmt: skip
params = st.builds(
    ThroughputParams,
    fwd=curves,
    bwd=curves,
    sync=syncs,
    overlap_gamma=st.floats(1.0, 20.0),
    flop_alpha_s=seconds,
    flop_gamma=st.floats(0.2, 2.0),
    straggler=st.floats(0.0, 2.0),
    sync_alpha_s=seconds,
)
shardings = st.builds(Sharded, gather=syncs, gather_alpha_s=seconds, gather_gamma=st.floats(1.0, 20.0))
links = st.builds(
    Link, intra_alpha_s=seconds, intra_s_per_byte=seconds, inter_alpha_s=seconds, inter_s_per_byte=seconds
)
pipelines = st.builds(
    Pipelined, num_stages=st.sampled_from([None, 1, 2, 3, 4]), micro_batches=st.integers(1, 8), link=links
)
layers = st.lists(
    st.builds(
        LayerCost,
        name=st.just("x"),
        flops=st.sampled_from([0.0, 1.0, 3.0, 50.0]),
        param_bytes=st.sampled_from([1.0, 4.0, 100.0]),
        activation_bytes=st.sampled_from([0.0, 1.0, 7.0]),
    ),
    min_size=4,
    max_size=9,
)
counts = st.sampled_from([1, 2, 3, 4, 8, 16])


@given(
    params, st.one_of(shardings, pipelines), layers, counts, st.integers(1, 4), st.integers(1, 256), st.integers(1, 4)
)
def test_freezing_deeper_is_never_slower_and_time_is_positive(values, kind, costs, gpus, nodes, m, k):
    job = profile(throughput=values, parallel=kind, layers=tuple(costs))
    steps = step_s(job, gpus, nodes, m, np.arange(len(costs) + 1), k)
    assert np.all(np.isfinite(steps) & (steps > 0))
    assert np.all(np.diff(steps) <= 1e-9 * steps[0])


@given(params, syncs, layers, counts, st.integers(1, 4), st.integers(1, 256), st.integers(1, 4))
def test_without_a_gather_shards_are_replicas(values, sync, costs, gpus, nodes, m, k):
    costs = tuple(costs)
    depths = np.arange(len(costs) + 1)
    plain = step_s(profile(throughput=values, layers=costs), gpus, nodes, m, depths, k)
    sharded = profile(throughput=values, layers=costs, parallel=Sharded())
    np.testing.assert_array_equal(step_s(sharded, gpus, nodes, m, depths, k), plain)
    gathering = profile(throughput=values, layers=costs, parallel=Sharded(gather=sync))
    np.testing.assert_array_equal(step_s(gathering, 1, nodes, m, depths, k), step_s(sharded, 1, nodes, m, depths, k))


@given(params, links, layers, counts, st.integers(1, 4), st.integers(1, 256), st.integers(1, 4))
def test_a_pipeline_of_one_stage_is_replicas(values, link, costs, gpus, nodes, m, k):
    costs = tuple(costs)
    depths = np.arange(len(costs))
    plain = step_s(profile(throughput=values, layers=costs), gpus, nodes, m, depths, k)
    staged = profile(throughput=values, layers=costs, parallel=Pipelined(num_stages=1, link=link))
    np.testing.assert_allclose(step_s(staged, gpus, nodes, m, depths, k), plain, rtol=1e-12)


@given(params, st.one_of(shardings, pipelines), layers)
def test_one_call_prices_a_grid_as_single_calls_do(values, kind, costs):
    job = profile(throughput=values, parallel=kind, layers=tuple(costs))
    gpus, batch = np.array([1, 2, 4, 8]).reshape(-1, 1, 1), np.array([8, 16]).reshape(1, -1, 1)
    grid = step_s(job, gpus, 2, batch, np.arange(3), 2)
    assert grid.shape == (4, 2, 3)
    assert grid[3, 1, 2] == pytest.approx(float(step_s(job, 8, 2, 16, 2, 2)))
    assert full_step_s(job, 4, 2, 8, 2) == float(step_s(job, 4, 2, 8, 0, 2))
    assert float(throughput(job, 4, 2, 8, 1, 2)) == pytest.approx(64 / float(step_s(job, 4, 2, 8, 1, 2)))


def four_layers(**changes: object) -> Profile:
    """FLOPs 1:1:2:4, bytes 1:1:1:5; forward 8 s and backward 16 s for eight samples, 1 s for the all-reduce of two."""
    costs = [
        LayerCost(name=n, flops=f, param_bytes=b, activation_bytes=a)
        for n, f, b, a in (("a", 1, 1, 10), ("b", 1, 1, 20), ("c", 2, 1, 30), ("d", 4, 5, 0))
    ]
    values = ThroughputParams(
        fwd=ComputeCurve(alpha_s=0, beta_s=1), bwd=ComputeCurve(alpha_s=0, beta_s=2), sync=SyncCurve(intra_alpha_s=8)
    )
    return profile(**{"layers": tuple(costs), "throughput": values, **changes})


def test_equations_9_and_10_by_hand():
    # 2 GPUs, m = 8: forward 8, gather 6 -> (8^2 + 6^2)^(1/2) = 10; backward 16, gather 12 -> 20; reduce-scatter 8.
    sharded = Sharded(gather=SyncCurve(intra_alpha_s=6), gather_gamma=2)
    assert float(step_s(four_layers(parallel=sharded), 2, 1, 8)) == pytest.approx(10 + np.hypot(16, 6) + 8)
    # l = 2: theta = 6/8 -> backward 12; omega = 6/8 -> gather 1 + 5 * 0.75 = 4.75 with 1 s that stays, reduce-scatter 6.
    stays = sharded.model_copy(update={"gather_alpha_s": 1.0})
    assert float(step_s(four_layers(parallel=stays), 2, 1, 8, 2)) == pytest.approx(10 + np.hypot(12, 4.75) + 6)
    # Two micro-steps gather twice and reduce once.
    twice = 2 * 10 + 2 * np.hypot(16, 6) + 8
    assert float(step_s(four_layers(parallel=sharded), 2, 1, 8, 0, 2)) == pytest.approx(twice)


def test_equations_11_and_12_by_hand():
    # Two stages: {a, b, c} and {d}, each half of the FLOPs. A replica of 2 GPUs with m = 4 gets 8 samples: forward 4 + 4,
    # backward 8 + 8; stage 0 sends 30 bytes a sample: 1 + 0.01 * 30 * 8 = 3.4, and gets as much back.
    link = Link(intra_alpha_s=1, intra_s_per_byte=0.01)
    job = four_layers(parallel=Pipelined(link=link))
    assert float(step_s(job, 2, 1, 4)) == pytest.approx(8 + 3.4 + 16 + 3.4)
    # l = 2: a and b are half of stage 0's FLOPs; its backward halves, the gradient still comes.
    assert float(step_s(job, 2, 1, 4, 2)) == pytest.approx(8 + 3.4 + 4 + 8 + 3.4)
    # l = 3: stage 0 is frozen whole: no backward there, and no gradient sent to it.
    assert float(step_s(job, 2, 1, 4, 3)) == pytest.approx(8 + 3.4 + 8)


def test_micro_batches_add_the_slowest_stage():
    # mu = 4: micro-batches of 2 samples; once 2 + 4, sends of 1 + 0.6 each way; both stages take 1 + 2 + 1.6.
    link = Link(intra_alpha_s=1, intra_s_per_byte=0.01)
    job = four_layers(parallel=Pipelined(link=link, micro_batches=4))
    assert float(step_s(job, 2, 1, 4)) == pytest.approx(2 + 1.6 + 4 + 1.6 + 3 * 4.6)


def test_equation_13_by_hand():
    # d = 2 replicas of p = 2 stages; m = 4: each replica gets 8 samples. Stage bytes 3:5 of 8; all-reduce of 2 replicas 8 s.
    job = four_layers(parallel=Pipelined(num_stages=2))
    assert float(step_s(job, 4, 1, 4)) == pytest.approx(8 + 16 + (3 + 5))
    assert float(step_s(job, 4, 1, 4, 2)) == pytest.approx(8 + 4 + 8 + (1 + 5))
    assert float(step_s(job, 4, 1, 4, 3)) == pytest.approx(8 + 8 + 5)
    # Replicas wait for each other and overlap like plain ones (Eq. 5).
    squared = job.throughput.model_copy(update={"overlap_gamma": 2.0})
    assert float(step_s(four_layers(parallel=Pipelined(num_stages=2), throughput=squared), 4, 1, 4)) == pytest.approx(
        8 + np.hypot(16, 8)
    )


def test_a_pipeline_that_spans_nodes_sends_over_the_network():
    job = four_layers(parallel=Pipelined(num_stages=2, link=Link(intra_alpha_s=1, inter_alpha_s=7)))
    assert float(step_s(job, 4, 2, 4)) == pytest.approx(8 + 1 + 16 + 1)  # each node's two GPUs hold a pipeline
    assert float(step_s(job, 2, 2, 4)) == pytest.approx(8 + 7 + 16 + 7)


def test_stages_of_ones_own():
    job = four_layers(parallel=Pipelined(num_stages=2, stage_layers=(1, 3)))
    assert float(step_s(job, 2, 1, 4, 1)) == pytest.approx(8 + 16 * 7 / 8)
    with pytest.raises(ValidationError, match="stages of"):
        four_layers(parallel=Pipelined(num_stages=2, stage_layers=(1, 2)))


def test_balanced_splits():
    assert balanced_split([1, 1, 2, 4], 2) == (3, 1)
    assert balanced_split([4, 2, 1, 1], 2) == (1, 3)
    assert balanced_split([1] * 7, 3) == (2, 2, 3)
    assert balanced_split([0, 0, 0], 3) == (1, 1, 1)
    with pytest.raises(ValueError, match="3 layers"):
        balanced_split([1, 1, 1], 4)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=7), st.integers(1, 4))
def test_no_split_is_better_balanced(costs, stages):
    stages = min(stages, len(costs))
    found = balanced_split(costs, stages)
    assert len(found) == stages
    assert sum(found) == len(costs)
    assert min(found) > 0
    weights = costs if any(costs) else [1] * len(costs)

    def worst(ends: tuple[int, ...]) -> int:
        cuts = (0, *ends, len(costs))
        return max(sum(weights[i:j]) for i, j in pairwise(cuts))

    ends = tuple(np.cumsum(found)[:-1].tolist())
    assert worst(ends) == min(worst(cut) for cut in combinations(range(1, len(costs)), stages - 1))


def test_files_from_before_there_were_kinds_are_replicas():
    job = profile()
    text = job.model_dump_json(by_alias=True, exclude={"parallel"})
    assert Profile.model_validate_json(text).parallel == Replicated()
    for kind in (Sharded(gather_gamma=2.0), Pipelined(num_stages=2, micro_batches=4)):
        held = profile(parallel=kind)
        assert Profile.model_validate_json(held.model_dump_json(by_alias=True)) == held
