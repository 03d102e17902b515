"""AutoFreeze: worked intervals by hand, and on real gradients."""

from __future__ import annotations

import models
import pytest
import torch
from torch import nn

from icefrog.errors import UserError
from icefrog.runtime import LayerElastic
from icefrog.runtime.layers import Layer
from icefrog.runtime.rules import AutoFreeze, Hands
from icefrog.testing.rules import situation


def interval(rule: AutoFreeze, norms: list[float], frozen: int = 0) -> None:
    """One interval of two steps, whose gradients add up to these norms (each half in each step)."""
    layers = [Layer(str(i), [], {f"{i}.w": nn.Parameter(torch.zeros(2))}) for i in range(len(norms))]
    for step in range(2):
        for layer, norm in zip(layers[frozen:], norms[frozen:], strict=True):
            for param in layer.params.values():
                param.grad = torch.tensor([norm / 8, -3 * norm / 8])  # |.|_1 of two steps: the norm
        rule.observe(Hands(step, nn.Identity(), layers, frozen))


def test_worked_intervals() -> None:
    rule = AutoFreeze()
    interval(rule, [10.0, 10.0, 10.0, 10.0])
    assert "first interval" in rule.propose(situation()).reason
    interval(rule, [9.0, 11.0, 14.0, 5.0])  # eta .1, .1, .4, .5: the median is .25, so two layers lie below it
    proposal = rule.propose(situation())
    assert proposal.frozen_layers == 2
    assert "2 more layers" in proposal.reason
    interval(rule, [0.0, 0.0, 7.0, 5.0], frozen=2)  # eta .5, 0: the front one is not below the median of .25
    assert rule.propose(situation(frozen_layers=2)).frozen_layers == 2
    interval(rule, [0.0, 0.0, 7.0, 10.0], frozen=2)  # eta 0, 1
    assert rule.propose(situation(frozen_layers=2)).frozen_layers == 3
    interval(rule, [0.0, 0.0, 0.0, 10.0], frozen=3)  # one open layer is left
    assert rule.propose(situation(frozen_layers=3)).frozen_layers == 3


def test_a_steady_layer_behind_a_changing_one_stays_open() -> None:
    rule = AutoFreeze()
    interval(rule, [10.0, 10.0, 10.0, 10.0])
    rule.propose(situation())
    interval(rule, [20.0, 10.0, 10.0, 10.0])
    assert rule.propose(situation()).frozen_layers == 0


def test_gradients_that_cancel_over_the_interval_count_as_their_sum() -> None:
    rule = AutoFreeze()
    param = nn.Parameter(torch.zeros(1))
    layers = [Layer("0", [], {"w": param}), Layer("1", [], {"v": nn.Parameter(torch.zeros(1))})]
    for step, grad in enumerate([3.0, -3.0]):
        param.grad = torch.tensor([grad])
        rule.observe(Hands(step, nn.Identity(), layers, 0))
    rule.propose(situation([1.0, 1.0]))
    assert rule.state_dict()["before"] == [0.0, 0.0]


def test_on_a_real_network_depth_never_falls_and_the_sums_are_the_gradients() -> None:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rule = AutoFreeze()
    elastic = LayerElastic(model, optimizer, rule=rule, samples_per_epoch=64, env={})
    total = torch.zeros(3)
    x, y = models.data()
    depths = []
    for epoch in elastic.epochs(8):
        for at in range(0, 64, 16):
            nn.functional.cross_entropy(elastic.model(x[at : at + 16]), y[at : at + 16]).backward()
            if epoch == 0:
                total += model[-1].bias.grad
            optimizer.step()
            optimizer.zero_grad()
            if epoch == 0 and at == 48:
                torch.testing.assert_close(rule.tensors()["3.bias"], total)
        depths.append(elastic.end_epoch(metric=0.1).frozen_layers)
        if len(depths) == 8:
            break
    assert depths[0] == 0
    assert depths == sorted(depths)
    assert depths[-1] > 0


def test_percentile_is_checked() -> None:
    with pytest.raises(UserError, match="percentile"):
        AutoFreeze(101)


def test_what_the_optimizer_does_not_train_neither_counts_nor_stops_the_boundary() -> None:
    torch.manual_seed(0)
    model = models.mlp(depth=5)
    trained = [*model[1][0].parameters(), *list(model[3].parameters())[:1], *model[4].parameters()]
    elastic = LayerElastic(model, torch.optim.SGD(trained, lr=0.1), rule="none", env={})
    rule = AutoFreeze()
    for norms in ([10.0, 10.0, 10.0], [10.0, 14.0, 5.0]):
        for layer in elastic.layers:
            for param in layer.params.values():
                param.grad = torch.full_like(param, float(torch.rand(())))
        for group, norm in zip((model[1], model[3][0].weight, model[4]), norms, strict=True):
            tensors = [group] if isinstance(group, nn.Parameter) else list(group.parameters())
            for param in tensors:
                param.grad = torch.full_like(param, norm / sum(other.numel() for other in tensors))
        rule.observe(Hands(0, model, elastic.layers, 0, elastic.optimizer))
        proposal = rule.propose(situation((1.0,) * 5))
    assert proposal.frozen_layers == 3  # eta 0, .4, .5 of layers 1, 3, 4; layers 0 and 2 are free
    elastic.close()
