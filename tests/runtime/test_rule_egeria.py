"""Egeria: the loss and the slopes by hand; hooks, reference model and checkpoints on real training."""

from __future__ import annotations

import math
from dataclasses import replace

import models
import pytest
import torch
from torch import nn

from icefrog.errors import UserError
from icefrog.runtime import LayerElastic
from icefrog.runtime.rules import Egeria
from icefrog.runtime.rules.egeria import Track, similarity_loss
from icefrog.testing.rules import situation


def test_similarity_loss_by_hand() -> None:
    ours = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # two samples that have nothing in common: G = identity
    theirs = torch.tensor([[1.0, 0.0], [1.0, 0.0]])  # two equal ones: rows of G are (1, 1) / sqrt(2)
    expected = (2 * (1 - 1 / math.sqrt(2)) ** 2 + 2 * (1 / math.sqrt(2)) ** 2) / 4
    assert similarity_loss(ours, theirs) == pytest.approx(expected)
    assert similarity_loss(ours, 7 * ours) == pytest.approx(0.0)  # scale says nothing
    assert similarity_loss(ours.reshape(2, 1, 2), ours.reshape(2, 2, 1)) != similarity_loss(ours, ours)  # NaN


def test_a_layer_whose_averages_are_flat_for_a_window_is_stationary() -> None:
    track = Track()
    for value in (0.0, 2.0, 4.0, 6.0):  # W = 2: averages 1, 3, 5, slopes 2, 2
        track.take(value, 2, 0.2)
    assert (track.steepest, track.stale) == (pytest.approx(2.0), 0)
    for value, stale in ((6.2, 0), (6.2, 1), (6.3, 2), (float("nan"), 2), (9.0, 0)):  # slopes 1.1, .1, .05, -, 1.4
        track.take(value, 2, 0.2)
        assert track.stale == stale


def drive(rule: Egeria, frozen: int, evaluations: list[list[float]]) -> None:
    for values in evaluations:
        rule.take(frozen, 4, values)


def test_the_front_freezes_and_a_drop_of_the_learning_rate_opens_it() -> None:
    rule = Egeria(window=2, warmup_share=0.0)
    now = situation(learning_rates=(0.1, 0.01))
    rising = [float(step) for step in range(4)]
    # The first two layers level off, the third does not; a flat layer behind it would not matter.
    drive(rule, 0, [[v, v, v] for v in rising] + [[3.0, 3.0, 3.0 + v] for v in range(1, 5)])
    frozen = rule.propose(now)
    assert frozen.frozen_layers == 2
    assert "2 more layers" in frozen.reason
    deep = situation(frozen_layers=2, learning_rates=(0.1, 0.01))
    assert rule.propose(deep).frozen_layers == 2
    assert rule.propose(replace(deep, learning_rates=(0.02, 0.002))).frozen_layers == 2
    opened = rule.propose(replace(deep, learning_rates=(0.01, 0.001)))
    assert opened.frozen_layers == 0
    assert "learning rate" in opened.reason
    assert rule.propose(replace(now, learning_rates=(0.01, 0.001))).frozen_layers == 0  # once


def test_the_last_layer_stays_open_and_bounds_hold() -> None:
    rule = Egeria(window=2, warmup_share=0.0)
    drive(rule, 0, [[float(v)] * 3 for v in range(4)] + [[3.0] * 3] * 4)
    assert rule.propose(situation()).frozen_layers == 3
    assert rule.propose(replace(situation(), bounds=replace(situation().bounds, max_frozen=1))).frozen_layers == 1


def make(rule: Egeria, model: nn.Module, lr: float = 0.1):  # type: ignore[no-untyped-def]
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return LayerElastic(model, optimizer, rule=rule, samples_per_epoch=64, max_fraction=1.0, env={}), optimizer


def run(elastic, optimizer, max_epochs: int, epochs: int) -> list[int]:  # type: ignore[no-untyped-def]
    x, y = models.data()
    depths = []
    for _ in elastic.epochs(max_epochs):
        for at in range(0, 64, 16):
            nn.functional.cross_entropy(elastic.model(x[at : at + 16]), y[at : at + 16]).backward()
            optimizer.step()
            optimizer.zero_grad()
        depths.append(elastic.end_epoch(metric=0.1).frozen_layers)
        if len(depths) == epochs:
            break
    return depths


def test_it_watches_without_touching_training() -> None:
    """The same bits as without the rule, batch normalisation and dropout's random numbers included; no hook is left."""
    results = []
    for rule in (Egeria(evaluate_every=3, window=2, warmup_share=0.0, tolerance=1e-9), "none"):
        torch.manual_seed(3)
        model = models.bn_net()
        hooks = sum(len(module._forward_hooks) for module in model.modules())
        elastic, optimizer = make(rule, model)  # type: ignore[arg-type]
        run(elastic, optimizer, 10, 6)
        if isinstance(rule, Egeria):
            assert rule.state_dict()["evaluations"] == 8  # steps 0, 3, ... 21
            assert all(track[2] > 0 for track in rule.state_dict()["tracks"][:-1])
            assert rule._look is None or not rule._look.outputs
        elastic.close()
        assert sum(len(module._forward_hooks) for module in model.modules()) == hooks
        results.append(models.bytes_of(model))
    assert results[0] == results[1]


def test_layers_freeze_in_real_training() -> None:
    elastic, optimizer = make(Egeria(evaluate_every=2, window=2, warmup_share=0.0, tolerance=0.5), models.mlp())
    depths = run(elastic, optimizer, 40, 30)
    assert depths[0] == 0
    assert depths == sorted(depths)
    assert depths[-1] > 0


def test_a_resumed_job_goes_on_with_the_same_reference() -> None:
    """A stop between the decision and the evaluation, at a step that is to be evaluated: the same state later."""

    def rule() -> Egeria:
        return Egeria(evaluate_every=4, window=2, warmup_share=0.0, tolerance=0.5)

    whole, straight = rule(), models.mlp()
    elastic, optimizer = make(whole, straight)
    depths = run(elastic, optimizer, 40, 12)

    model = models.mlp()
    elastic, optimizer = make(rule(), model)
    first = run(elastic, optimizer, 40, 5)
    state = elastic.state_dict()
    resumed = rule()
    other = models.mlp()
    elastic, optimizer = make(resumed, other)
    elastic.load_state_dict(state)
    assert first + run(elastic, optimizer, 40, 7) == depths
    assert resumed.state_dict() == whole.state_dict()
    assert models.bytes_of(other) == models.bytes_of(straight)


def test_settings_are_checked() -> None:
    with pytest.raises(UserError, match="is not a rule"):
        Egeria(window=1)


def test_layers_that_the_optimizer_does_not_train_do_not_stop_the_boundary() -> None:
    model = models.mlp(depth=4)
    optimizer = torch.optim.SGD([*model[2].parameters(), *model[3].parameters()], lr=0.05)
    rule = Egeria(evaluate_every=1, window=2, warmup_share=0.0)
    elastic = LayerElastic(model, optimizer, rule=rule, env={}, samples_per_epoch=64)
    elastic.begin(20)
    elastic.decide()
    models.train(elastic, optimizer, 3)
    decision = elastic.decide()
    assert decision.frozen_layers == 2, decision.reason
    again = Egeria(evaluate_every=1, window=2, warmup_share=0.0)
    again.load_state_dict(rule.state_dict())
    assert again.propose(situation()).frozen_layers == 2
    elastic.close()
