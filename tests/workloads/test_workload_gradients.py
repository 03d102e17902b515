"""Gradient curves: interpolation on hand-made tables, and the measured tables' own sanity."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icefrog.estimate.penalty import frozen_penalty
from icefrog.workloads import Catalogue, load_catalogue
from icefrog.workloads.gradients import GradientCurves, load_split, load_totals, own_totals

UNITS = 10


def hand_made() -> GradientCurves:
    """Totals fall tenfold; the stem has 20 %, the head 30 %, each inner unit 1/16; freezing halves, deeper more so."""
    inner = [0.5 / 8] * 8
    row = [0.2, *inner, 0.3]
    runs = [
        {
            "start": start,
            "depth": depth,
            "ratio": [[None] * round(depth * UNITS) + [1.0 - depth] * (UNITS - round(depth * UNITS))] * 11,
        }
        for start in (0.25, 0.5, 0.75)
        for depth in (0.2, 0.5, 0.8)
    ]
    family = {"variance_share": [row] * 11, "sqr_share": [[0.1] * 10] * 11, "runs": runs}
    falling = np.logspace(1, 0, 11).tolist()
    rows = [
        {"batch": 100, "variance": falling, "sqr_norm": [1.0] * 11},
        {"batch": 400, "variance": [4 * v for v in falling], "sqr_norm": [0.25] * 11},
    ]
    return GradientCurves(load_totals({"totals": rows}), load_split(family), "test")


def test_totals_interpolate_in_progress_and_log_batch() -> None:
    curves = hand_made()
    assert curves.variance(0.0, 10, 100).sum() == pytest.approx(10.0)
    assert curves.variance(1.0, 10, 100).sum() == pytest.approx(1.0)
    assert curves.variance(0.5, 10, 100).sum() == pytest.approx(10**0.5)
    assert curves.variance(0.05, 10, 100).sum() == pytest.approx(10**0.95)
    assert curves.variance(0.0, 10, 200).sum() == pytest.approx(20.0)  # half way between 100 and 400
    assert curves.variance(0.0, 10, 10_000).sum() == pytest.approx(40.0)  # flat beyond
    assert curves.sqr_norm(0.3, 10, 200).sum() == pytest.approx(0.5)
    assert curves.variance(-1.0, 10, 100).sum() == pytest.approx(10.0)
    assert curves.variance(2.0, 10, 100).sum() == pytest.approx(1.0)


@pytest.mark.parametrize("layers", [3, 7, 10, 34, 200])
def test_stem_and_head_keep_their_share_for_any_depth(layers: int) -> None:
    value = hand_made().variance(0.0, layers, 100)
    assert value.shape == (layers,)
    assert value[0] == pytest.approx(2.0)
    assert value[-1] == pytest.approx(3.0)
    assert value[1:-1] == pytest.approx(5.0 / (layers - 2))


@pytest.mark.parametrize("layers", [1, 2])
def test_very_shallow_models(layers: int) -> None:
    value = hand_made().variance(0.0, layers, 100)
    assert value.shape == (layers,)
    assert value.sum() == pytest.approx(10.0)


def test_frozen_layers_keep_their_value_and_the_rest_follows_the_measured_runs() -> None:
    curves = hand_made()
    frozen = curves.variance(0.9, 10, 100, frozen_start=0.5, frozen_depth=0.5)
    assert frozen[:5] == pytest.approx(curves.variance(0.5, 10, 100)[:5])
    assert frozen[5:] == pytest.approx(curves.variance(0.9, 10, 100)[5:] * 0.5)
    between = curves.variance(0.9, 10, 100, frozen_start=0.6, frozen_depth=0.4)  # between runs at 0.2 and 0.5
    assert between[4:] == pytest.approx(curves.variance(0.9, 10, 100)[4:] * 0.6)
    shallow = curves.variance(0.9, 10, 100, frozen_start=0.6, frozen_depth=0.1)  # between none and 0.2
    assert shallow[1:] == pytest.approx(curves.variance(0.9, 10, 100)[1:] * 0.9)
    assert np.array_equal(curves.variance(0.5, 10, 100, 0.5, 0.5), curves.variance(0.5, 10, 100))


def per_parameter(own: list[float]) -> GradientCurves:
    """S per parameter is 1 in the stem, 2 in the inner units, 4 in the head of a small network with a large stem."""
    params = [0.4, *[0.05] * 8, 0.2]
    density = np.array([1.0, *[2.0] * 8, 4.0])
    share = density * params / (density @ params)
    family = {
        "gradients": "preconditioned",
        "param_share": params,
        "variance_share": [share.tolist()] * 11,
        "sqr_share": [params] * 11,
        "runs": [{"start": s, "depth": d, "ratio": [[1.0] * 10] * 11} for s in (0.25, 0.5) for d in (0.2, 0.5)],
    }
    totals = load_totals({"totals": [{"batch": 8, "variance": [3.0] * 11, "sqr_norm": [1.0] * 11}]})
    return GradientCurves(totals, load_split(family), "test", np.array(own))


@pytest.mark.parametrize("layers", [2, 3, 6, 40])
def test_a_preconditioned_split_follows_the_parameters_of_the_model_itself(layers: int) -> None:
    own = np.arange(1.0, layers + 1)
    own /= own.sum()
    density = np.array([1.0, *[2.0] * (layers - 2), 4.0])
    value = per_parameter(own.tolist()).variance(0.3, layers, 8)
    assert value == pytest.approx(3.0 * own * density / (own @ density))
    assert per_parameter(own.tolist()).sqr_norm(0.3, layers, 8) == pytest.approx(own)


def test_curves_of_a_model_know_its_number_of_layers() -> None:
    with pytest.raises(ValueError, match="3 layers, not 4"):
        per_parameter([0.2, 0.3, 0.5]).bind(4, 8)


def test_own_totals_serve_every_batch() -> None:
    totals = own_totals({"total": [2.0] * 11, "noise_scale": [4.0] * 11, "batch": 64})
    for batch in (1, 64, 4096):
        where = totals.log_batch(batch)
        assert (totals.variance(0.4, where), totals.sqr_norm(0.4, where)) == pytest.approx((2.0, 0.5))


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return load_catalogue()


@given(
    progress=st.floats(0, 1),
    batch=st.integers(1, 20_000),
    start=st.one_of(st.none(), st.floats(0, 1)),
    depth=st.floats(0, 0.9),
    index=st.integers(0, 7),
)
def test_every_workload_gives_statistics_that_price_every_depth(
    catalogue: Catalogue, progress: float, batch: int, start: float | None, depth: float, index: int
) -> None:
    workload = list(catalogue.values())[index]
    layers = workload.profile.num_layers
    bound = workload.curves.bind(layers, batch)
    value, sqr = bound.variance(progress, start, depth), bound.sqr_norm(progress)
    assert value.shape == sqr.shape == (layers,)
    assert np.all(np.isfinite(value))
    assert np.all(value > 0)
    assert np.all(sqr >= 0)
    psi = frozen_penalty(value)
    assert np.all(psi[:layers] > 0)
    assert np.all(np.diff(psi[:layers]) <= 0)


def test_bound_curves_leave_no_trace_in_one_another(catalogue: Catalogue) -> None:
    bound = catalogue["resnet18-cifar10"].curves.bind(10, 128)
    before = bound.variance(0.4)
    bound.variance(0.8, 0.3, 0.5)
    assert np.array_equal(before, bound.variance(0.4))


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    table: dict[str, Any] = json.loads((resources.files("icefrog.workloads") / "layer_split.json").read_text())
    return table


def test_the_measured_split_is_complete_and_its_networks_learned(measured: dict[str, Any]) -> None:
    assert measured["provenance"] == "proxy"
    outputs = {"cnn": 10, "finetune": 2, "decoder": 256}
    for name, family in measured["families"].items():
        split = load_split(family)
        units = len(family["param_share"])
        assert split.ratio.shape == (3, 3, 11, units)
        assert split.variance_share.sum(axis=1) == pytest.approx(np.ones(11), rel=0.01)
        assert (split.param_share is None) == (family["gradients"] == "raw")
        assert family["validation_loss"][0] < 0.65 * np.log(outputs[name.split("-")[0]])  # nothing frozen
        for (s, d), _ in np.ndenumerate(split.ratio[:, :, 0, 0]):
            frozen = round(split.depths[d] * units)
            assert np.isnan(split.ratio[s, d, :, :frozen]).all()
            assert (split.ratio[s, d, :, frozen:] > 0).all()


@pytest.mark.parametrize("other", ["resnet34 1/8", "flat 16", "mobilenetv2 1/4"])
def test_raw_shares_of_one_plan_tell_those_of_another(measured: dict[str, Any], other: str) -> None:
    """What entitles us to carry them over unit by unit; per parameter they would be off by up to 0.5."""
    small, study = measured["studies"]["resnet18 1/8"], measured["studies"][other]
    units = len(study["param_share"])
    runs = [{"start": 0.5, "depth": 0.5, "ratio": [[1.0] * 10] * 11}]
    family = {**small, "gradients": "raw", "sqr_share": small["variance_share"], "runs": runs}
    totals = load_totals({"totals": [{"batch": 8, "variance": [1.0] * 11, "sqr_norm": [1.0] * 11}]})
    carried = GradientCurves(totals, load_split(family), "test")
    for progress in (0.5, 1.0):
        expected = frozen_penalty(np.array(study["variance_share"][round(progress * 10)]))
        got = frozen_penalty(carried.variance(progress, units, 8))
        assert got[:units] == pytest.approx(expected[:units], abs=0.13)
