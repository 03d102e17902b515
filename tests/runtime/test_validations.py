"""The best validation metric, and how long ago it was: told, or as it looks."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from typing import Any

import models
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from icefrog.errors import UserError
from icefrog.runtime import LayerElastic
from icefrog.runtime.rules import FreezingRule, Proposal, Situation
from icefrog.runtime.validations import Validations
from icefrog.spec import Mode, Target

METRICS = st.lists(st.floats(-1e6, 1e6) | st.sampled_from([0.5, 0.75, math.inf, -math.inf]), max_size=12)


def seen(mode: Mode | None, metrics: list[float]) -> Validations:
    found = Validations(mode)
    for metric in metrics:
        assert found.see(metric) == math.isfinite(metric)
    return found


@given(METRICS, st.sampled_from(["max", "min"]))
def test_the_best_one_and_what_came_since(metrics: list[float], mode: Mode) -> None:
    found = seen(mode, metrics)
    finite = [metric for metric in metrics if math.isfinite(metric)]
    assert found.metrics == finite
    best = (max if mode == "max" else min)(finite, default=None)
    assert found.best == best
    assert found.stalled == (len(metrics) if best is None else len(metrics) - 1 - metrics.index(best))


@given(METRICS)
def test_the_two_ways_mirror_each_other(metrics: list[float]) -> None:
    up, down = seen("max", metrics), seen("min", [-metric for metric in metrics])
    assert (up.stalled, up.best) == (down.stalled, None if down.best is None else -down.best)


@given(METRICS, st.sampled_from(["max", "min", None]), st.integers(0, 12))
def test_one_that_is_read_back_goes_on(metrics: list[float], mode: Mode | None, at: int) -> None:
    whole, part = seen(mode, metrics), seen(mode, metrics[:at])
    again = Validations(mode)
    again.load_state_dict(json.loads(json.dumps(part.state_dict())))
    for metric in metrics[at:]:
        again.see(metric)
    assert again.state_dict() == whole.state_dict()
    assert again.mode == whole.mode


@pytest.mark.parametrize(
    ("metrics", "mode", "stalled"),
    [
        ([], "max", 0),
        ([2.3], "max", 0),
        ([2.3, 1.9], "min", 0),
        ([2.3, 1.9, 1.5, 1.6, 1.2], "min", 0),
        ([0.3, 0.28, 0.29, 0.29, 0.5, 0.7], "min", 4),  # overfits, far above its first value
        ([0.5, 0.4, 0.45, 0.6], "max", 0),  # an accuracy that dipped: looked at again
        ([0.5, 0.4, 0.45, 0.6, 0.55], "max", 1),
        ([0.5, 0.5, 0.5], "max", 2),
    ],
)
def test_a_metric_that_only_fell_is_taken_for_a_loss(metrics: list[float], mode: Mode, stalled: int) -> None:
    found = seen(None, metrics)
    assert (found.mode, found.stalled) == (mode, stalled)
    assert (found.news(5, True) is not None) == ((mode == "min" and len(metrics) >= 4) or not metrics)
    assert found.news(5, True) is None  # once


class Watching(FreezingRule):
    name = "watching"

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self.told: list[tuple[str, int]] = []

    def propose(self, now: Situation) -> Proposal:
        self.told.append((now.mode, now.stalled))
        return now.at(self.depth, "watching")


def told(metrics: Sequence[float | None], depth: int = 0, **options: Any) -> list[tuple[str, int]]:
    model, rule = models.mlp(), Watching(depth)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = LayerElastic(model, optimizer, rule=rule, env={}, **options)
    x, y = models.data(8)
    elastic.begin(100)
    for metric in metrics:
        nn.functional.cross_entropy(elastic.model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        elastic.end_epoch(metric)
    elastic.close()
    return rule.told[-len(metrics) :]


LOSSES = [2.0, 1.5, 1.25, 1.0, 0.75]


def test_a_falling_loss_without_a_target_is_progress() -> None:
    with pytest.warns(UserWarning, match="less of it is taken to be better"):
        assert told(LOSSES) == [("max", 0), *[("min", 0)] * 4]


@pytest.mark.parametrize(
    ("options", "mode", "stalled"),
    [
        ({"mode": "min"}, "min", 0),
        ({"mode": "max"}, "max", 4),
        ({"target": Target(metric="loss", value=0.1, mode="min")}, "min", 0),
        ({"target": Target(metric="score", value=9.0)}, "max", 4),
    ],
)
def test_what_is_said_counts(options: dict[str, Any], mode: Mode, stalled: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert told(LOSSES, **options)[-1] == (mode, stalled)


def test_layers_that_nothing_would_open_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="no validation metric is given") as warned:
        told([None] * 5, depth=1)
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        told([None] * 5)
        told([None, 0.5, None, None], depth=1)


def test_a_mode_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match="mode"):
        told(LOSSES, mode="less")
