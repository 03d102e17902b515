"""FreezeOut's schedules against hand values, and the choice among them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icefrog.estimate.freezeout import START_GRID, Schedule, choose
from icefrog.profile import FloatArray


def test_layers_end_one_after_the_other_from_t_0_to_1() -> None:
    assert Schedule(0.5).ends(5) == pytest.approx([0.5, 0.625, 0.75, 0.875, 1.0])
    # Cubed: the cube root of 0.125 is 0.5, so the line runs 0.5, 0.75, 1.
    assert Schedule(0.125, "cubed").ends(3) == pytest.approx([0.125, 0.421875, 1.0])
    assert Schedule(0.3).ends(1) == pytest.approx([1.0])


def test_learning_rates_follow_the_cosine_and_end_at_zero() -> None:
    factors = Schedule(0.5).lr_factors(0.25, 3)  # ends at 0.5, 0.75, 1
    assert factors == pytest.approx([0.5, 0.75, 0.5 * (1 + np.cos(np.pi / 4))])
    assert Schedule(0.5).lr_factors(0.5, 3)[0] == 0.0
    assert Schedule(0.5).lr_factors(0.0, 3) == pytest.approx([1.0, 1.0, 1.0])


def test_a_layer_is_frozen_when_its_rate_is_zero_and_the_last_never_is() -> None:
    assert [Schedule(0.5).depth(t, 5) for t in (0.0, 0.49, 0.5, 0.74, 0.75, 1.0)] == [0, 0, 1, 2, 3, 4]


@given(st.sampled_from(START_GRID), st.sampled_from(["linear", "cubed"]), st.integers(1, 40))
def test_ends_rise_from_t_0_to_1(t_0: float, shape: str, num_layers: int) -> None:
    ends = Schedule(t_0, shape).ends(num_layers)  # type: ignore[arg-type]
    assert np.all(np.diff(ends) >= 0)
    assert ends[-1] == pytest.approx(1.0)
    if num_layers > 1:
        assert ends[0] == pytest.approx(t_0)


def flat(*layers: float) -> FloatArray:
    return np.array(layers)


def test_nothing_is_frozen_where_it_does_not_pay() -> None:
    equal = flat(1.0, 1.0, 1.0, 1.0)
    assert choose(np.array([100.0, 105.0, 110.0, 115.0]), lambda _: equal) == Schedule(1.0)


def test_quiet_front_layers_are_frozen_at_once() -> None:
    quiet = flat(1e-6, 1e-6, 1e-6, 1.0)
    assert choose(np.array([100.0, 120.0, 140.0, 160.0]), lambda _: quiet).t_0 == START_GRID[0]


def test_layers_that_settle_late_are_frozen_late() -> None:
    """The front's variance is 1 until half of the training, then nothing: psi would be 2/3 before."""
    chosen = choose(np.array([100.0, 120.0]), lambda t: flat(1.0 if t < 0.5 else 0.0, 1.0, 1.0))
    assert 0.5 <= chosen.t_0 <= 0.6


def test_a_depth_that_the_job_forbids_is_never_counted_on() -> None:
    quiet = flat(1e-6, 1e-6, 1e-6, 1.0)
    assert choose(np.array([100.0]), lambda _: quiet) == Schedule(1.0)  # D = 0: nothing to gain


@pytest.mark.parametrize("t_0", [0.0, -0.1, 1.5, float("nan")])
def test_t_0_is_a_share_of_the_training(t_0: float) -> None:
    with pytest.raises(ValueError, match="t_0"):
        Schedule(t_0)
