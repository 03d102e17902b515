"""Learning-rate factors by layer: the same as that learning rate in the layer's own group, for every common optimizer."""

from __future__ import annotations

import models
import pytest
import torch
from torch import nn

from icefrog.runtime import LayerElastic
from icefrog.runtime.layer_rates import scaled_step
from icefrog.runtime.layers import find_pieces, group_pieces
from icefrog.runtime.rules import FreezeOut

OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups),
    "momentum": lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda groups: torch.optim.Adam(groups, weight_decay=0.01),
    "adamw": lambda groups: torch.optim.AdamW(groups, weight_decay=0.1),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.5),
    "adagrad": lambda groups: torch.optim.Adagrad(groups),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, step) -> None:  # type: ignore[no-untyped-def]
    x, y = (value.double() if value.is_floating_point() else value for value in models.data())
    for index in range(steps):
        at = 16 * index % 64
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[at : at + 16]), y[at : at + 16]).backward()
        step(index)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_factor_is_a_learning_rate(name: str) -> None:
    rates = [0.0, 0.25, 0.8, 1.0]
    grouped = models.mlp().double()
    groups = [{"params": list(child.parameters()), "lr": 0.01} for child in grouped]
    reference = OPTIMIZERS[name](groups)

    def with_groups(index: int) -> None:
        for group, rate in zip(reference.param_groups, rates, strict=True):
            group["lr"] = 0.01 * rate * (0.9**index)
        reference.step()

    train(grouped, reference, 12, with_groups)

    model = models.mlp().double()
    start = models.bytes_of(model)
    layers = group_pieces(model, find_pieces(model))
    optimizer = OPTIMIZERS[name]([{"params": list(model.parameters()), "lr": 0.01}])

    def with_factors(index: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.01 * 0.9**index
        scaled_step(optimizer.step, layers, rates)

    train(model, optimizer, 12, with_factors)
    for ours, theirs in zip(model.parameters(), grouped.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    assert models.bytes_of(model)["0.0.weight"] == start["0.0.weight"]  # rate 0: to the bit


def test_factors_of_one_cost_nothing_and_change_nothing() -> None:
    plain, model = models.mlp(), models.mlp()
    layers = group_pieces(model, find_pieces(model))
    for net in (plain, model):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        models_loss = net(models.data()[0]).square().sum()
        models_loss.backward()
        if net is model:
            scaled_step(optimizer.step, layers, [1.0] * 4)
        else:
            optimizer.step()
    assert models.bytes_of(plain) == models.bytes_of(model)


def test_freezeout_anneals_step_by_step_and_freezes_at_zero() -> None:
    """Against the schedule computed by hand: 4 layers, t_0 = 0.4, so that t_i = 0.4, 0.6, 0.8, 1."""
    model, steps = models.mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    elastic = LayerElastic(
        model, optimizer, rule=FreezeOut(0.4), samples_per_epoch=64, tune_every_steps=1, max_fraction=1.0, env={}
    )
    x, y = models.data()
    for _ in elastic.epochs(5):
        for at in range(0, 64, 16):
            before = [param.detach().clone() for param in model.parameters()]
            nn.functional.cross_entropy(model(x[at : at + 16]), y[at : at + 16]).backward()
            grads = [None if param.grad is None else param.grad.clone() for param in model.parameters()]
            share = elastic.effective_samples / (5 * 64)
            optimizer.step()
            optimizer.zero_grad()
            moved = [
                0.0 if grad is None else float(((old - param.detach()) / grad).nanmedian())
                for old, param, grad in zip(before, model.parameters(), grads, strict=True)
            ]
            steps.append((share, moved[::2], elastic.frozen_layers))
        elastic.end_epoch(metric=0.1)
    for share, moved, _ in steps:
        for rate, end in zip(moved, (0.4, 0.6, 0.8, 1.0), strict=True):
            by_hand = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * min(share / end, 1.0))).item())
            assert rate == pytest.approx(by_hand, abs=2e-3)
    assert [depth for _, _, depth in steps][-1] == 3
    assert len({depth for _, _, depth in steps}) == 4
