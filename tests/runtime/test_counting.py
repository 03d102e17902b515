"""What one optimizer step is made of: every row of the table in :class:`Counting`, and the weight of each sample."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icefrog.errors import UserError
from icefrog.runtime.counting import Counting
from icefrog.runtime.sampler import ElasticSampler


class Gradient:
    """Of one number, as several replicas and the statistics see it: accumulated, rescaled, averaged."""

    def __init__(self, num_replicas: int = 1) -> None:
        self.num_replicas, self.replica = num_replicas, 0
        self.accumulated = 0.0
        self.weight = self.mean_scale = 1.0

    def scale_gradients(self, factor: float) -> None:
        self.accumulated *= factor

    def rescale_micro(self, factor: float) -> None:
        """Of the statistics: they see the same gradient."""

    def set_weight(self, weight: float, mean_scale: float) -> None:
        self.weight, self.mean_scale = weight, mean_scale


def made(accum_steps: int = 1, num_replicas: int = 1, num_gpus: int | None = None) -> tuple[Counting, Gradient]:
    gradient: Any = Gradient(num_replicas)
    return Counting(accum_steps, gradient, num_gpus or num_replicas, lambda: gradient), gradient


# -- what closes a pass --------------------------------------------------------------------------------------------------


def test_a_step_counts_its_pass() -> None:
    counting, _ = made()
    for samples in (8, 5):
        assert counting.between_steps
        counting.see(samples, backward_ran=False)
        assert not counting.between_steps
        assert counting.end_micro(0) == counting.step_samples == samples
        counting.observed(samples)
        counting.end_step()
    assert counting.batch_per_gpu == 8
    assert not counting.full_step


def test_passes_with_backward_passes_of_their_own_count_together() -> None:
    counting, _ = made()
    counting.see(8, backward_ran=False)
    counting.see(8, backward_ran=True)
    counting.see(4, backward_ran=True)
    assert counting.passes == 3
    assert counting.end_micro(0) == 20
    counting.observed(20)
    assert counting.passes == 1


def test_a_pass_without_a_backward_was_a_look() -> None:
    counting, _ = made()
    counting.see(100, backward_ran=False)
    counting.see(8, backward_ran=False)
    assert (counting.end_micro(0), counting.passes) == (8, 1)


@pytest.mark.parametrize("whole", [False, True])
def test_zero_grad_behind_the_backward_pass_leaves_the_batch_out(whole: bool) -> None:
    counting, _ = made()
    counting.see(8, backward_ran=False)
    counting.see(8, backward_ran=True)
    if whole:
        counting.saw_whole()
    counting.forget_passes(backward_ran=not whole)
    assert counting.between_steps
    counting.see(3, backward_ran=True)
    assert (counting.end_micro(0), counting.passes) == (3, 1)


def test_zero_grad_before_the_backward_pass_leaves_out_those_before_it() -> None:
    counting, _ = made()
    counting.see(8, backward_ran=False)
    counting.see(5, backward_ran=True)
    counting.forget_passes(backward_ran=False)  # the second one's backward is still to come
    assert not counting.between_steps
    assert (counting.end_micro(0), counting.passes) == (5, 1)


def test_passes_of_a_closure_that_runs_again_count_nothing() -> None:
    counting, _ = made()
    counting.see(8, backward_ran=False)
    assert counting.end_micro(0) == 8
    counting.see(8, backward_ran=True)  # LBFGS, inside of its step
    counting.see(8, backward_ran=True)
    counting.end_step()
    counting.see(6, backward_ran=True)
    assert counting.end_micro(0) == 6


# -- micro-steps ---------------------------------------------------------------------------------------------------------


def test_micro_steps_are_counted_and_make_a_step_together() -> None:
    counting, _ = made(accum_steps=3, num_replicas=2, num_gpus=4)
    seen = []
    for samples in (4, 4, 2):
        counting.see(samples, backward_ran=False)
        counting.end_micro(0)
        seen.append((counting.micro, counting.step_samples, counting.waiting_samples))
    assert seen == [(1, 4, 2.0), (2, 8, 4.0), (0, 10, 0.0)]  # two GPUs see the same samples
    assert (counting.nominal_batch, counting.samples_per_gpu, counting.full_step) == (24, 2, False)
    counting.observed(20)
    assert counting.global_batch == 20


def test_what_was_accumulated_can_be_abandoned() -> None:
    counting, _ = made(accum_steps=2)
    counting.see(4, backward_ran=False)
    counting.end_micro(0)
    counting.abandon()
    assert counting.between_steps
    counting.see(3, backward_ran=False)
    counting.end_micro(0)
    assert (counting.micro, counting.step_samples) == (1, 3)


def test_what_ranks_would_not_average_is_refused() -> None:
    counting, _ = made(accum_steps=2, num_replicas=2)
    counting.see(4, backward_ran=False)
    with pytest.raises(UserError, match="several backward passes before one"):
        counting.see(4, backward_ran=True)
    counting, _ = made()
    counting.see(4, backward_ran=False)
    counting.communication_rebuilt(backward_ran=False)
    with pytest.raises(UserError, match="the boundary moved between a forward pass and its backward"):
        counting.end_micro(0)


# -- every sample weighs the same -----------------------------------------------------------------------------------------

sizes = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def averaged(counting: Counting, gradient: Gradient, parts: list[list[float]], cursor: int = 0) -> float:
    """One optimizer step; each part's gradient is the mean over its samples, as a loss makes it."""
    counting.prepare(cursor)
    for part in parts:
        counting.see(len(part), backward_ran=False)
        gradient.accumulated += sum(part) / len(part)
        counting.end_micro(cursor)
        if counting.micro > 0:
            counting.weigh_next(len(part), cursor)
    found, gradient.accumulated = gradient.accumulated * gradient.weight, 0.0
    return found


@given(st.lists(st.floats(-9, 9), min_size=40, max_size=40), sizes)
def test_samples_of_any_loader_weigh_the_same(values: list[float], lengths: list[int]) -> None:
    counting, gradient = made(accum_steps=len(lengths))
    parts = [values[sum(lengths[:i]) : sum(lengths[: i + 1])] for i in range(len(lengths))]
    parts = [part for part in parts if part]
    if len(parts) < len(lengths):
        return
    for _ in range(2):
        flat = [value for part in parts for value in part]
        assert averaged(counting, gradient, parts) == pytest.approx(sum(flat) / len(flat), abs=1e-9)
        assert counting.step_samples == len(flat)


@given(st.integers(1, 4), st.integers(4, 30), st.integers(0, 3))
def test_samples_of_the_elastic_sampler_weigh_the_same(accum: int, batch: int, seed: int) -> None:
    num_samples = 2 * batch + 3
    counting, gradient = made(accum)
    counting.sampler = ElasticSampler(num_samples, batch, rank=0, world_size=1, accum_steps=accum, seed=seed)
    counting.sampler.seek(0, 0)
    places, cursor = list(counting.sampler), 0
    while counting.sampler.next_size(cursor) > 0:
        parts = [[float(place) for place in part] for part in places[:accum]]
        del places[:accum]
        flat = [value for part in parts for value in part]
        assert averaged(counting, gradient, parts, cursor) == pytest.approx(sum(flat) / len(flat))
        cursor += len(flat)
