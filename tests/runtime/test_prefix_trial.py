"""Networks in which the prefix cache may not take the prefix's place: said early, and never wrong in silence."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from icefrog.runtime import LayerElastic
from icefrog.runtime.prefix_cache import PrefixCache


class Chain(nn.Module):
    """Three layers and a head, called by the root's own forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def between(self, x: torch.Tensor, block: nn.Module) -> torch.Tensor:
        return torch.tanh(block(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.between(x, block)
        return self.head(x)


class FunctionalDropout(Chain):
    """Rarely drops anything."""

    def between(self, x: torch.Tensor, block: nn.Module) -> torch.Tensor:
        return F.dropout(torch.tanh(block(x)), 1e-4, self.training)


class StochasticDepth(Chain):
    """Rarely leaves a layer out, for the whole batch."""

    def draw(self) -> float:
        return random.random()

    def between(self, x: torch.Tensor, block: nn.Module) -> torch.Tensor:
        left_out = self.training and self.draw() < 0.02
        return torch.tanh(block(x)) * (0.0 if left_out else 1.0)


class NumpyDepth(StochasticDepth):
    def draw(self) -> float:
        return float(np.random.rand())  # noqa: NPY002


class Skip(Chain):
    """Each layer's input is added to its output, outside of the layer."""

    def between(self, x: torch.Tensor, block: nn.Module) -> torch.Tensor:
        return x + torch.tanh(block(x))


class DropsBehind(Chain):
    """Random behind the prefix only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[:2]:
            x = self.between(x, block)
        return self.head(self.between(F.dropout(x, 0.3, self.training), self.blocks[2]))


@pytest.fixture
def cached() -> Iterator[Callable[..., tuple[LayerElastic, PrefixCache]]]:
    opened: list[LayerElastic] = []

    def make(kind: type[nn.Module], depth: int = 2) -> tuple[LayerElastic, PrefixCache]:
        model = kind()
        elastic = LayerElastic(model, torch.optim.SGD(model.parameters(), lr=0.1), rule="none", env={})
        opened.append(elastic)
        cache = elastic.cache_prefix()
        elastic.freeze(depth)
        return elastic, cache

    yield make
    for elastic in opened:
        elastic.close()


def step(elastic: LayerElastic, batch: int) -> None:
    generator = torch.Generator().manual_seed(batch)
    x, y = torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)
    F.cross_entropy(elastic.model(x), y).backward()
    elastic.optimizer.step()
    elastic.optimizer.zero_grad()


@pytest.mark.parametrize("kind", [FunctionalDropout, StochasticDepth, NumpyDepth])
def test_a_random_prefix_is_found_however_rarely_it_differs(cached: Any, kind: type[nn.Module]) -> None:
    elastic, cache = cached(kind)
    step(elastic, 0)
    assert "random numbers are drawn" in cache.off_reason
    assert cache.hits == 0


def test_one_frozen_layer_has_nothing_random_before_its_output(cached: Any) -> None:
    elastic, cache = cached(FunctionalDropout, depth=1)
    for batch in (0, 1, 0, 1):
        step(elastic, batch)
    assert (cache.hits, cache.off_reason) == (2, "")


def test_random_numbers_behind_the_prefix_do_no_harm(cached: Any) -> None:
    elastic, cache = cached(DropsBehind)
    for batch in (0, 1, 0, 1):
        step(elastic, batch)
    assert (cache.hits, cache.off_reason) == (2, "")


def test_a_skip_connection_is_said_before_any_sample_was_seen_twice(cached: Any) -> None:
    elastic, cache = cached(Skip)
    step(elastic, 0)
    assert "reads more of the prefix" in cache.off_reason


@pytest.mark.parametrize("kind", [Chain, DropsBehind, Skip, StochasticDepth, NumpyDepth])
def test_trying_out_draws_no_numbers_from_the_users_generators(cached: Any, kind: type[nn.Module]) -> None:
    found = []
    for use in (False, True):
        elastic, cache = cached(kind)
        if not use:
            cache.off_reason = "switched off"
            cache._settle = lambda: None  # type: ignore[method-assign]
        torch.manual_seed(1), random.seed(1), np.random.seed(1)  # noqa: NPY002
        for batch in (0, 1, 0, 1):
            step(elastic, batch)
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002
        found.append((drawn, [param.tolist() for param in elastic.model.parameters()]))
    assert found[0] == found[1]
