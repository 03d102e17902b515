"""The prefix cache in networks that work in place, mix rows, or vary in length: training is as without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from icefrog.runtime import LayerElastic


class InPlace(nn.Module):
    """What follows the prefix overwrites its output, and not in a way that may be done twice."""

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 3)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.activation(block(x))
        return self.head(x)


class TimeFirst(nn.Module):
    """PyTorch's own layout of sequences, (time, batch, features): the first dimension is none of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x[:, None])
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


class Centred(nn.Module):
    """Each sample less the mean of its batch, which a frozen layer goes on doing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x - x.mean(0)))
        return self.head(torch.tanh(self.second(x)))


class TwiceBetween(nn.Module):
    """A layer that trains runs before the last one of the prefix, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last, self.head = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.last(torch.tanh(self.twice(torch.tanh(self.first(x))))))
        return self.head(torch.tanh(self.twice(x)))


class Positions(nn.Module):
    """Of GPT's kind: positions are looked up once for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 6), nn.Embedding(8, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Pooled(Positions):
    """The prefix's last output has the same shape whatever the length; what comes before it has not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (self.tokens(x) + self.positions(torch.arange(x.shape[1]))).mean(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def vectors() -> list[torch.Tensor]:
    """Six batches of eight out of 24: batches seen again whole, and mixed anew."""
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
    rows = [*torch.arange(24).split(8), *torch.arange(24).split(8)]
    return [x[part] for part in [*rows, torch.tensor([0, 9, 2, 11, 4, 13, 6, 15]), rows[0], torch.arange(0, 24, 3)]]


def texts() -> list[torch.Tensor]:
    """Batches of several lengths, each seen three times, and parts of them."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(11, (6, length), generator=generator) for length in (5, 8, 3, 5)]
    return [*batches, *batches, *(batch[:4] for batch in batches), *batches]


def trained(make: Callable[[], nn.Module], batches: list[torch.Tensor], depth: int, cached: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    elastic = LayerElastic(model, optimizer, rule="none", env={})
    cache = elastic.cache_prefix("memory") if cached else None
    for number, x in enumerate([batches[0], batches[0], *batches]):
        elastic.freeze(depth if number else 0)  # the order of layers is known behind the first step
        F.cross_entropy(elastic.model(x), torch.arange(len(x)) % 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = (
            0.2 if number > 2 else 0.0
        )  # a schedule that warms up: values stand still first
    elastic.close()
    return [param.detach().clone() for param in model.parameters()], cache


IN_PLACE: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: F.relu(x, inplace=True),
    lambda x: F.leaky_relu(x, 0.2, inplace=True),
    lambda x: x.mul_(2.0).tanh(),
]


@pytest.mark.parametrize("activation", IN_PLACE)
def test_what_follows_the_prefix_may_work_in_place(activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    plain, _ = trained(lambda: InPlace(activation), vectors(), 2, cached=False)
    found, cache = trained(lambda: InPlace(activation), vectors(), 2, cached=True)
    assert (cache.off_reason, cache.hits) == ("", 7)
    for mine, reference in zip(found, plain, strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("make", "depth"), [(TimeFirst, 2), (Centred, 1)])
def test_rows_that_depend_on_each_other_are_not_kept(make: Callable[[], nn.Module], depth: int) -> None:
    plain, _ = trained(make, vectors(), depth, cached=False)
    found, cache = trained(make, vectors(), depth, cached=True)
    assert "depends on the samples beside it" in cache.off_reason
    assert all(torch.equal(mine, reference) for mine, reference in zip(found, plain, strict=True))


def test_a_layer_that_trains_before_the_last_output_is_found() -> None:
    plain, _ = trained(TwiceBetween, vectors(), 2, cached=False)
    found, cache = trained(TwiceBetween, vectors(), 2, cached=True)
    assert "a layer that trains runs before" in cache.off_reason
    assert all(torch.equal(mine, reference) for mine, reference in zip(found, plain, strict=True))


@pytest.mark.parametrize("make", [Positions, Pooled])
def test_texts_of_several_lengths(make: Callable[[], nn.Module]) -> None:
    plain, _ = trained(make, texts(), 3, cached=False)
    found, cache = trained(make, texts(), 3, cached=True)
    assert cache.off_reason == ""
    assert cache.hits > 4
    for mine, reference in zip(found, plain, strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=1e-6)
