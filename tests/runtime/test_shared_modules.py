"""Modules that are called more than once, or not through their layer: freezing must not reach behind a trainable layer."""

from __future__ import annotations

import copy

import models
import pytest
import torch
from torch import nn

from icefrog.runtime import LayerElastic


class Shared(nn.Module):
    """One ``between`` after each of three hidden layers, and the same one each time."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(6, 6)
        self.between = between
        self.b = nn.Linear(6, 6)
        self.c = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        self.changed: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.changed = []
        for layer in (self.a, self.b, self.c):
            before = layer(x)
            x = self.between(before)
            self.changed.append(not torch.equal(before, x))
        return self.head(x)


def make(model: nn.Module, **options):  # type: ignore[no-untyped-def]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return LayerElastic(model, optimizer, rule="none", env={}, **options), optimizer


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    x, y = models.data()
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("between", [nn.Tanh(), nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh())])
def test_every_trainable_layer_keeps_its_exact_gradient(between: nn.Module, settled: bool) -> None:
    model = Shared(copy.deepcopy(between))
    elastic, optimizer = make(model)
    if settled:
        models.train(elastic, optimizer, 1)
    for depth in range(1, len(elastic.layers)):
        elastic.freeze(0)
        whole = gradients(model)
        elastic.freeze(depth)
        found = gradients(model)
        live = {name for layer in elastic.layers[depth:] for name in layer.params}
        assert set(found) == live
        tied = {name for name in live if name.startswith("between")}  # its use in the prefix is a part of the constant
        for name in live - tied:
            assert torch.equal(found[name], whole[name]), (depth, name)


def test_a_shared_module_with_parameters_belongs_to_its_last_use() -> None:
    elastic, optimizer = make(Shared(nn.Linear(6, 6)))
    models.train(elastic, optimizer, 1)
    assert [layer.name for layer in elastic.layers] == ["a", "b", "c", "between", "head"]


@pytest.mark.parametrize("given", [False, True])
def test_shared_dropout_stays_on_behind_trainable_layers(given: bool) -> None:
    model = Shared(nn.Dropout(0.5))
    layers = [[model.a, model.between], model.b, model.c, model.head] if given else None
    elastic, optimizer = make(model, layers=layers)
    models.train(elastic, optimizer, 2)
    elastic.freeze(2)
    for _ in range(2):
        model.train()
        models.train(elastic, optimizer, 1)
        assert model.changed[2]
    elastic.freeze(0)
    assert model.between.training


def test_dropout_shared_between_blocks_stays_on_while_one_of_them_trains() -> None:
    drop = nn.Dropout(0.5)
    model = nn.Sequential(*(Block(drop) for _ in range(3)), nn.Linear(6, 3))
    elastic, optimizer = make(model)
    models.train(elastic, optimizer, 1)
    elastic.freeze(2)
    assert drop.training
    models.train(elastic, optimizer, 1)
    assert drop.training
    elastic.freeze(3)
    assert not drop.training
    model.train()
    models.train(elastic, optimizer, 1)
    assert not drop.training


class Block(nn.Module):
    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.drop = drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.linear(x))


class Direct(nn.Module):
    """Calls the children of its first layer, which itself is never called; declared back to front."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.body = nn.Module()
        self.body.linear, self.body.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body.norm(self.body.linear(x)))


@pytest.mark.filterwarnings("ignore:layers run in another order")
def test_statistics_of_a_frozen_layer_whose_children_are_called_directly_do_not_move() -> None:
    model = Direct()
    elastic, optimizer = make(model)
    models.train(elastic, optimizer, 1)
    assert [layer.name for layer in elastic.layers] == ["body", "head"]
    elastic.freeze(1)
    before = models.bytes_of(elastic.layers[0])
    model.train()
    models.train(elastic, optimizer, 2)
    assert models.bytes_of(elastic.layers[0]) == before


def test_freezing_before_the_first_step_does_not_fix_the_declared_order() -> None:
    model = Direct()
    elastic, optimizer = make(model)
    elastic.freeze(1)
    with pytest.warns(UserWarning, match="another order"):
        models.train(elastic, optimizer, 1)
    assert [layer.name for layer in elastic.layers] == ["body", "head"]
    assert elastic.frozen_layers == 1
    before = models.bytes_of(elastic.layers[0])
    head = model.head.weight.detach().clone()
    model.train()
    models.train(elastic, optimizer, 2)
    assert models.bytes_of(elastic.layers[0]) == before
    assert not torch.equal(model.head.weight, head)
