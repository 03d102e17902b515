"""An optimizer over a part of the model: what it does not train counts nothing, and costs nothing to freeze."""

from __future__ import annotations

import os
import warnings
from typing import Any

import models
import numpy as np
import pytest
import torch
from torch import nn
from two_ranks import Ranks

from icefrog.errors import UserError
from icefrog.runtime import LayerElastic
from icefrog.runtime.rules.progress import Progress

Kind = type[torch.optim.Optimizer]


def made(kind: Kind, trained: slice, **options: Any) -> tuple[LayerElastic, torch.optim.Optimizer]:
    model = models.mlp()
    optimizer = kind(model[trained].parameters(), lr=0.05)  # type: ignore[call-arg]
    options = {"rule": "none", "env": dict(os.environ)} | options
    return LayerElastic(model, optimizer, **options), optimizer


def fit(
    elastic: LayerElastic, optimizer: torch.optim.Optimizer, steps: int = 30, *others: torch.optim.Optimizer
) -> None:
    x, y = models.data()
    for step in range(steps):
        at = 16 * (step % 3) + 8 * elastic.rank
        nn.functional.cross_entropy(elastic.model(x[at : at + 16]), y[at : at + 16]).backward()
        for each in (optimizer, *others):
            each.step()
            each.zero_grad()


@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_statistics_are_of_what_the_optimizer_trains(kind: Kind, accum: int) -> None:
    elastic, optimizer = made(kind, slice(2, 4), accum_steps=accum)
    fit(elastic, optimizer, 60)
    tracker = elastic._engine.tracker
    assert tracker.ready
    assert np.all(tracker.variance[:2] == 0)
    assert np.all(tracker.variance[2:] > 0)
    elastic.freeze(2)
    assert elastic.psi == 1.0
    elastic.freeze(3)
    assert 0.0 < elastic.psi < 1.0


def test_frozen_before_anything_was_measured() -> None:
    elastic, _ = made(torch.optim.SGD, slice(2, 4))
    elastic.freeze(2)
    assert elastic.psi == 1.0


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_so_is_what_the_progress_rule_measures(kind: Kind) -> None:
    rule = Progress()
    elastic, optimizer = made(kind, slice(2, 4), rule=rule)
    elastic.begin(99)
    fit(elastic, optimizer)
    signal = rule._meter.progress()
    assert signal is not None
    assert signal[:2] == [0.0, 0.0]
    assert max(signal[2:]) > 0.0


def between_ranks() -> list[float]:
    elastic, optimizer = made(torch.optim.AdamW, slice(2, 4))
    fit(elastic, optimizer)
    found: list[float] = elastic._engine.tracker.variance.tolist()
    elastic.close()
    return found


def test_between_ranks(ranks: Ranks) -> None:
    first, second = ranks.run(between_ranks)
    assert first == second
    assert first[:2] == [0.0, 0.0]
    assert min(first[2:]) > 0


def test_something_is_always_left_to_train() -> None:
    elastic, optimizer = made(torch.optim.SGD, slice(0, 2), rule=lambda now: now.at(now.bounds.max_frozen, "deep"))
    with pytest.raises(UserError, match="cannot freeze 2 layers: the optimizer has no parameter") as error:
        elastic.freeze(2)
    assert "at most 1" in error.value.hint
    for _ in elastic.epochs(1):
        fit(elastic, optimizer, 1)
        assert elastic.end_epoch().frozen_layers == 1


def test_layers_of_another_optimizer_are_left_to_it() -> None:
    rule = lambda now: now.at(now.bounds.max_frozen, "deep")  # noqa: E731
    found = []
    for beside in (False, True):
        elastic, optimizer = made(torch.optim.SGD, slice(2, 4), rule=rule)
        others = [torch.optim.SGD(elastic.model[1].parameters(), lr=0.01)] if beside else []
        elastic.begin(3)
        elastic.freeze(0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for accuracy in (0.5, 0.75):
                fit(elastic, optimizer, 3, *others)
                depth = elastic.end_epoch(accuracy).frozen_layers
        found.append((depth, ["trained by another optimizer" in str(item.message) for item in caught]))
    assert found == [(3, []), (1, [True])]


def test_a_group_added_later_counts_from_the_epochs_end() -> None:
    elastic, optimizer = made(torch.optim.SGD, slice(2, 4))
    elastic.begin(9)
    fit(elastic, optimizer)
    optimizer.add_param_group({"params": list(elastic.model[1].parameters())})
    elastic.end_epoch()
    fit(elastic, optimizer)
    assert elastic._engine.tracker.variance[0] == 0
    assert elastic._engine.tracker.variance[1] > 0
