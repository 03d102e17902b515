"""What the model's input was computed from may want a gradient; frozen layers hand it on."""

from __future__ import annotations

import copy

import models
import pytest
import torch
from torch import nn

from icefrog.runtime import LayerElastic


def made() -> tuple[LayerElastic, torch.optim.Optimizer]:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return LayerElastic(model, optimizer, rule="none", env={}), optimizer


@pytest.mark.parametrize("cached", [False, True])
def test_a_generator_learns_through_a_frozen_discriminator(*, cached: bool) -> None:
    torch.manual_seed(0)
    generator = nn.Linear(4, 6)
    generator_optimizer = torch.optim.SGD(generator.parameters(), lr=0.5)
    elastic, optimizer = made()
    if cached:
        elastic.cache_prefix("memory")
    noise, labels = torch.randn(8, 4), torch.arange(8) % 3
    for depth in (0, 2, 2, 2, 3, 0):
        elastic.freeze(depth)
        plain = copy.deepcopy(elastic.model)
        fake = generator(noise)
        expected = torch.autograd.grad(nn.functional.cross_entropy(plain(fake), labels), fake)[0]
        fake = generator(noise)
        fake.retain_grad()
        nn.functional.cross_entropy(elastic.model(fake), labels).backward()
        assert torch.equal(fake.grad, expected)
        frozen = [param for layer in elastic.layers[:depth] for param in layer.params.values()]
        assert all(param.grad is None for param in frozen)
        generator_optimizer.step()
        generator_optimizer.zero_grad()
        optimizer.zero_grad()
        nn.functional.cross_entropy(elastic.model(generator(noise).detach()), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    elastic.close()


@pytest.mark.parametrize("cached", [False, True])
def test_a_gradient_penalty_and_an_adversarial_example(*, cached: bool) -> None:
    """They ask for the gradient of a leaf, the input itself."""
    elastic, optimizer = made()
    if cached:
        elastic.cache_prefix("memory")
    elastic.freeze(2)
    x, y = models.data()
    for _ in range(3):  # the cache would have the rows from the second time on
        nn.functional.cross_entropy(elastic.model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        plain = copy.deepcopy(elastic.model)
        leaf = x.clone().requires_grad_(True)
        (expected,) = torch.autograd.grad(nn.functional.cross_entropy(plain(leaf), y), leaf)
        nn.functional.cross_entropy(elastic.model(leaf), y).backward()
        assert torch.equal(leaf.grad, expected)
        optimizer.zero_grad()
        (slope,) = torch.autograd.grad(elastic.model(leaf).square().sum(), leaf, create_graph=True)
        slope.square().mean().backward()
        assert elastic.layers[2].params["2.0.weight"].grad is not None
        optimizer.step()
        optimizer.zero_grad()
    assert all(param.grad is None for layer in elastic.layers[:2] for param in layer.params.values())
    elastic.close()
