"""Worked examples of optimus and pollux, and of the places they give."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icefrog.policies.optimus import marginal_gain
from icefrog.policies.packing import Packer
from icefrog.policies.pollux import fitness, knapsack, restart_penalty
from icefrog.policies.spreading import Spread
from icefrog.testing.builders import candidate
from icefrog.types import Candidate, GpuId


def curve(*remaining_s: float) -> list[Candidate]:
    """Remaining times on 1, 2, 3, ... GPUs."""
    options = [candidate(count, left_s) for count, left_s in enumerate(remaining_s, 1)]
    return [replace(c, estimate=replace(c.estimate, remaining_s=c.estimate.tta_s)) for c in options]


def counts(curves: list[list[Candidate]], num_gpus: int) -> list[int]:
    chosen, _ = marginal_gain(curves, lambda job, option: option.estimate.remaining_s or 0.0, num_gpus)
    return [0 if at is None else curves[job][at].config.num_gpus for job, at in enumerate(chosen)]


def test_marginal_gains_by_hand() -> None:
    """Gains of A: 40, 20, 5; of B: 30, 10; so five GPUs go one each, then to A (40), B (30), A (20)."""
    a, b = curve(100.0, 60.0, 40.0, 35.0), curve(60.0, 30.0, 20.0)
    assert counts([a, b], 5) == [3, 2]


def test_of_equal_gains_the_earlier_job_comes_first() -> None:
    assert counts([curve(10.0, 5.0), curve(10.0, 5.0)], 3) == [2, 1]


def test_no_gain_no_gpu() -> None:
    """The third GPU makes it slower: the fourth, which would help, is never reached."""
    assert counts([curve(10.0, 8.0, 9.0, 2.0)], 8) == [2]


def test_without_enough_gpus_the_later_jobs_wait() -> None:
    assert counts([curve(10.0, 5.0)] * 3, 2) == [1, 1, 0]


def test_steps_of_several_gpus_gain_per_gpu() -> None:
    """A job that accepts 1 and 4: 30 s for three GPUs, 10 each, against 12 for one."""
    wide = [curve(60.0, 0.0, 0.0, 30.0)[0], curve(60.0, 0.0, 0.0, 30.0)[3]]
    assert counts([wide, curve(40.0, 28.0)], 6) == [4, 2]
    assert counts([wide, curve(40.0, 28.0)], 5) == [1, 2]


def test_spreading_takes_from_the_emptiest_node() -> None:
    """Free 2, 4, 3: five GPUs are all four of node 1 and one of node 2; then of 2, 0, 2 the first comes first."""
    places = Spread((4, 4, 4), [(GpuId(0, 0), GpuId(0, 1)), (GpuId(2, 3),)])
    assert places.take(5) == (GpuId(1, 0), GpuId(1, 1), GpuId(1, 2), GpuId(1, 3), GpuId(2, 0))
    assert places.take(3) == (GpuId(0, 2), GpuId(0, 3), GpuId(2, 1))
    assert places.take(2) is None
    assert places.take(1) == (GpuId(2, 2),)


def test_restart_penalty_by_hand() -> None:
    """A job of 600 s that has restarted twice, 30 s each, keeps 540 of 630 s after another restart."""
    assert restart_penalty(600.0, 30.0, 2) == pytest.approx(540.0 / 630.0)
    assert restart_penalty(20.0, 30.0, 1) == 0.0


def test_fitness_is_a_harmonic_mean_that_a_waiting_job_does_not_make_zero() -> None:
    assert fitness([0.999, 0.249]) == pytest.approx(2.0 / (1.0 / 1.0 + 1.0 / 0.25))
    assert fitness([0.0, 1e9]) == pytest.approx(2e-3)


@given(st.lists(st.lists(st.floats(0.1, 100.0), min_size=1, max_size=4), min_size=1, max_size=4), st.integers(0, 9))
def test_the_knapsack_is_exact(costs: list[list[float]], num_gpus: int) -> None:
    """Against all combinations; option i of a job takes i x (1 + job % 2) GPUs."""
    jobs = [(np.arange(len(row)) * (1 + job % 2), np.array(row)) for job, row in enumerate(costs)]
    best = min(
        sum(row[at] for row, at in zip(costs, pick, strict=True))
        for pick in itertools.product(*(range(len(row)) for row in costs))
        if sum(int(jobs[job][0][at]) for job, at in enumerate(pick)) <= num_gpus
    )
    chosen = knapsack(jobs, num_gpus)
    assert sum(int(jobs[job][0][at]) for job, at in enumerate(chosen)) <= num_gpus
    assert sum(costs[job][at] for job, at in enumerate(chosen)) == pytest.approx(best)


def test_packing_prefers_one_node_then_several_then_fewer_gpus() -> None:
    """Free 2, 1, 1, 0. Three GPUs go over nodes 0 and 1; two more would have to share node 0 or 1 with them: one is left."""
    packer = Packer((4, 4, 4, 4))
    assert packer.keep("x", (GpuId(0, 0), GpuId(0, 1)))
    assert packer.keep("y", tuple(GpuId(1, d) for d in range(3)))
    assert packer.keep("z", tuple(GpuId(2, d) for d in range(3)))
    assert packer.keep("w", tuple(GpuId(3, d) for d in range(4)))
    packer.place_all({"b": 2, "a": 3}, lambda job, count: count - 1 if count > 1 else None)
    assert packer.gpus["a"] == (GpuId(0, 2), GpuId(0, 3), GpuId(1, 3))
    assert packer.gpus["b"] == (GpuId(2, 3),)


def test_a_job_does_not_stay_on_a_node_that_is_out_of_service() -> None:
    packer = Packer((0, 4))
    assert not packer.keep("x", (GpuId(0, 0),))
    assert packer.keep("y", (GpuId(1, 0),))
