"""Frozen penalty and gradient statistics: the worked values of section 3, the estimators, the bookkeeping."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icefrog.estimate.penalty import GradientTracker, frozen_penalty, replica_estimate, successive_estimate

variances = st.lists(st.floats(0.0, 1e12), min_size=1, max_size=30)


def test_worked_values() -> None:
    psi = frozen_penalty([20.0, 80.0])
    assert psi[1] == pytest.approx(0.8)
    assert 1000 / psi[1] == pytest.approx(1250)
    assert psi[1] * 140 == pytest.approx(112)
    assert psi[1] * 120 == pytest.approx(96)
    assert frozen_penalty([30.0, 70.0])[1] * 1200 == pytest.approx(840)
    assert frozen_penalty([30.0, 30.0])[1] * 1200 == pytest.approx(600)


@given(variances)
def test_psi_is_a_falling_share_and_one_unfrozen(variance: list[float]) -> None:
    psi = frozen_penalty(variance)
    assert psi.shape == (len(variance) + 1,)
    assert psi[0] == 1.0
    assert np.isnan(psi[-1])
    offered = psi[np.isfinite(psi)]
    assert np.all(offered > 0)
    assert np.all(offered <= 1)
    assert np.all(np.diff(offered) <= 1e-15)


def test_a_depth_without_variance_behind_it_is_not_offered() -> None:
    np.testing.assert_array_equal(np.isnan(frozen_penalty([1.0, 2.0, 0.0])), [False, False, True, True])
    np.testing.assert_array_equal(frozen_penalty([0.0, 0.0]), [1.0, np.nan, np.nan])


@given(variances, st.floats(1e-9, 1e9))
def test_units_do_not_matter(variance: list[float], scale: float) -> None:
    values = np.array(variance)
    values[values < 1e-6] = 0.0  # away from underflow
    np.testing.assert_allclose(frozen_penalty(values * scale), frozen_penalty(values), rtol=1e-9)


@pytest.mark.parametrize("bad", [[], [[1.0]], [-1.0, 2.0], [float("nan")], [float("inf"), 1.0]])
def test_bad_variance_is_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="variance"):
        frozen_penalty(bad)


# -- estimators ------------------------------------------------------------------------------------------------------------


@given(st.integers(2, 6), st.integers(0, 2**31))
def test_replica_estimate_equals_the_definition(replicas: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    gradients = rng.normal(size=(replicas, 2, 5))  # 2 layers of 5 parameters
    samples = rng.integers(1, 9, size=replicas)
    weight = samples / samples.sum()
    mean = np.einsum("r,rlp->lp", weight, gradients)
    trace = np.einsum("r,rlp->l", weight, (gradients - mean) ** 2) / (replicas - 1)
    s, sqr = replica_estimate((gradients**2).sum(axis=2), (mean**2).sum(axis=1), samples)
    np.testing.assert_allclose(s, samples.sum() * trace, rtol=1e-9)
    np.testing.assert_allclose(sqr, (mean**2).sum(axis=1) - trace, rtol=1e-9, atol=1e-12)


def test_both_estimators_find_the_per_sample_variance_whatever_the_batch() -> None:
    rng = np.random.default_rng(1)
    true_mean = np.full(200, 0.5)  # |G|^2 = 50, per-sample tr Cov = 200
    for batch in (32, 128):
        by_replica, by_step = [], []
        previous = None
        for _ in range(400):
            halves = true_mean + rng.normal(size=(2, 200)) / np.sqrt(batch / 2)
            step = halves.mean(axis=0)
            by_replica.append(replica_estimate((halves**2).sum(axis=1)[:, None], [(step**2).sum()], [batch // 2] * 2))
            if previous is not None:
                by_step.append(successive_estimate([((step - previous) ** 2).sum()], [step @ previous], batch))
            previous = step
        for found in (by_replica, by_step):
            s, sqr = np.mean(np.array(found), axis=0)
            assert s[0] == pytest.approx(200, rel=0.03)
            assert sqr[0] == pytest.approx(50, rel=0.03)


def test_estimators_refuse_what_they_cannot_use() -> None:
    with pytest.raises(ValueError, match="at least two replicas"):
        replica_estimate([[1.0]], [1.0], [8])
    with pytest.raises(ValueError, match="shapes do not match"):
        replica_estimate([[1.0], [1.0]], [1.0, 2.0], [8, 8])
    with pytest.raises(ValueError, match="shapes do not match"):
        successive_estimate([1.0], [1.0, 2.0], 8)


# -- bookkeeping -----------------------------------------------------------------------------------------------------------


def fed(tracker: GradientTracker, variance: list[float], steps: int) -> GradientTracker:
    for _ in range(steps):
        tracker.observe(variance, [1.0] * len(variance))
    return tracker


def test_not_ready_before_twenty_steps_and_unbiased_from_the_first() -> None:
    tracker = fed(GradientTracker(2), [3.0, 5.0], 19)
    assert not tracker.ready
    assert tracker.stats() is None
    assert tracker.noise_scale() is None
    np.testing.assert_allclose(tracker.variance, [3.0, 5.0])  # bias-corrected
    fed(tracker, [3.0, 5.0], 1)
    assert tracker.ready
    assert tracker.noise_scale() == pytest.approx(4.0)


def test_a_frozen_layer_keeps_its_last_value_and_a_deeper_boundary_stores_only_the_new_ones() -> None:
    tracker = fed(GradientTracker(3), [4.0, 6.0, 10.0], 30)
    tracker.set_boundary(1)
    fed(tracker, [float("nan"), 1.0, 2.0], 200)  # a frozen layer's entry is not looked at
    assert tracker.skipped_steps == 0
    np.testing.assert_allclose(tracker.variance, [4.0, 1.0, 2.0], rtol=1e-3)
    tracker.set_boundary(2)
    fed(tracker, [0.0, 0.0, 0.5], 200)
    np.testing.assert_allclose(tracker.variance, [4.0, 1.0, 0.5], rtol=1e-3)


def test_a_reopened_layer_uses_the_stored_value_until_enough_fresh_steps() -> None:
    tracker = fed(GradientTracker(2), [4.0, 6.0], 30)
    tracker.set_boundary(1)
    tracker.set_boundary(0)
    fed(tracker, [1.0, 6.0], 19)
    np.testing.assert_allclose(tracker.variance, [4.0, 6.0])
    assert tracker.ready
    fed(tracker, [1.0, 6.0], 1)
    np.testing.assert_allclose(tracker.variance, [1.0, 6.0])  # the EMA was restarted: nothing of the old 4.0 is left


def test_refreezing_a_young_layer_keeps_the_older_stored_value() -> None:
    tracker = fed(GradientTracker(2), [4.0, 6.0], 30)
    tracker.set_boundary(1)
    tracker.set_boundary(0)
    fed(tracker, [100.0, 6.0], 3)
    tracker.set_boundary(1)
    np.testing.assert_allclose(tracker.variance, [4.0, 6.0])


def test_non_finite_steps_are_skipped_and_counted() -> None:
    tracker = GradientTracker(2)
    assert not tracker.observe([float("inf"), 1.0], [1.0, 1.0])
    assert not tracker.observe([1.0, 1.0], [1.0, float("nan")])
    assert tracker.skipped_steps == 2
    assert tracker.observe([1.0, 1.0], [1.0, 1.0])
    np.testing.assert_allclose(tracker.variance, [1.0, 1.0])


def test_sqr_norm_is_clamped_after_smoothing_not_before() -> None:
    tracker = GradientTracker(1, decay=0.0)
    tracker.observe([1.0], [-5.0])
    assert tracker.sqr_norm[0] == 0.0
    smooth = GradientTracker(1)
    for value in (-1.0, 1.0) * 200:
        smooth.observe([1.0], [value])
    assert smooth.sqr_norm[0] < 0.1  # clamping each step would leave about 0.5


@pytest.mark.parametrize("boundary", [-1, 3])
def test_one_layer_always_trains(boundary: int) -> None:
    with pytest.raises(ValueError, match=r"0\.\.2"):
        GradientTracker(3).set_boundary(boundary)


moves = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=8)


@given(moves, st.integers(0, 2**31))
def test_a_checkpoint_taken_anywhere_goes_on_as_if_nothing_had_happened(plan: list[tuple[int, int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    one, other = GradientTracker(4), GradientTracker(4)
    for boundary, steps in plan:
        one.set_boundary(boundary)
        other.set_boundary(boundary)
        for row in rng.exponential(size=(steps, 2, 4)):
            one.observe(*row)
            other.observe(*row)
        restored = GradientTracker(4)
        restored.load_state_dict(json.loads(json.dumps(other.state_dict())))
        other = restored
    np.testing.assert_array_equal(one.variance, other.variance)
    np.testing.assert_array_equal(one.sqr_norm, other.sqr_norm)
    np.testing.assert_array_equal(one.standard_error, other.standard_error)
    assert (one.ready, one.frozen_layers) == (other.ready, other.frozen_layers)


def test_a_checkpoint_from_before_the_standard_error_loads() -> None:
    tracker, restored = GradientTracker(2), GradientTracker(2)
    for value in (1.0, 3.0):
        tracker.observe([value] * 2, [0.0] * 2)
    state = tracker.state_dict()
    del state["squares"], state["sqr_weight"]
    restored.load_state_dict(state)
    np.testing.assert_array_equal(restored.variance, tracker.variance)
    assert np.all(restored.standard_error[0] < 1.0)


def test_state_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 3"):
        GradientTracker(3).load_state_dict(GradientTracker(2).state_dict())


@pytest.mark.parametrize("every", [1, 5])
def test_the_standard_error_is_the_scatter_of_the_average_itself(every: int) -> None:
    """Over many trackers, each after 200 estimates: the reported error against the standard deviation of what they say."""
    rng = np.random.default_rng(0)
    said, errors = [], []
    for _ in range(300):
        tracker = GradientTracker(2)
        for _ in range(200):
            tracker.observe(rng.gamma(2.0, [1.0, 3.0]), rng.normal(0.5, [0.1, 2.0]), every)
        said.append((tracker.variance.tolist(), tracker.sqr_norm.tolist()))
        errors.append(tracker.standard_error)
    spread = np.std(said, axis=0)
    np.testing.assert_allclose(np.mean(errors, axis=0)[0], spread[0], rtol=0.1)
    np.testing.assert_allclose(np.mean(errors, axis=0)[1][0], spread[1][0], rtol=0.1)


def test_a_stored_value_has_no_standard_error() -> None:
    tracker = GradientTracker(3)
    assert np.isnan(tracker.standard_error).all()
    for value in (1.0, 3.0):
        tracker.observe([value] * 3, [0.0] * 3)
    tracker.set_boundary(1)
    assert np.isnan(tracker.standard_error[:, 0]).all()
    # Weights 0.95 and 1, of which two estimates 2 apart: 1.0 times the root of sum w^2 / (sum w)^2 / (1 - that) over.
    weights = np.array([0.95, 1.0]) / 1.95
    scatter = weights @ [1.0, 9.0] - (weights @ [1.0, 3.0]) ** 2
    effective = 1.0 / (weights**2).sum()
    np.testing.assert_allclose(tracker.standard_error[0, 1:], np.sqrt(scatter / (effective - 1.0)))
