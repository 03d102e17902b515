"""Accumulation over a loader of one's own, whose micro-batches are not all of one size: every sample counts the same."""

from __future__ import annotations

import os

import models
import torch
from torch import nn
from two_ranks import Ranks

from icefrog.errors import UserError
from icefrog.runtime import LayerElastic

PARTS = (6, 6, 2, 3, 5, 8)  # two optimizer steps of three micro-batches


def by_parts(accum: int) -> tuple[dict[str, torch.Tensor], int]:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    elastic = LayerElastic(model, optimizer, rule="none", accum_steps=accum, env=dict(os.environ))
    x, y = models.data(120)
    at = 60 * elastic.rank
    for size in PARTS:
        nn.functional.cross_entropy(elastic.model(x[at : at + size]), y[at : at + size]).backward()
        optimizer.step()
        optimizer.zero_grad()
        at += size
    elastic.close()
    return {name: value.clone() for name, value in model.state_dict().items()}, elastic._at.samples


def whole(world: int) -> dict[str, torch.Tensor]:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = models.data(120)
    for start, stop in ((0, 14), (14, 30)):
        pick = [60 * rank + i for rank in range(world) for i in range(start, stop)]
        nn.functional.cross_entropy(model(x[pick]), y[pick]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_one_process() -> None:
    found, samples = by_parts(3)
    assert samples == 30
    assert all(torch.allclose(found[name], value, atol=1e-6) for name, value in whole(1).items())


def test_two_ranks(ranks: Ranks) -> None:
    (first, samples), (second, _) = ranks.run(by_parts, 3)
    assert samples == 60
    for name, value in whole(2).items():
        assert torch.equal(first[name], second[name])
        assert torch.allclose(first[name], value, atol=1e-6)


def twice_accumulated() -> str:
    model = models.mlp()
    elastic = LayerElastic(model, torch.optim.SGD(model.parameters(), lr=0.1), rule="none", accum_steps=2)
    x, y = models.data()
    try:
        for _ in range(2):
            nn.functional.cross_entropy(elastic.model(x), y).backward()
    except UserError as error:
        return str(error)
    finally:
        elastic.close()
    return "unnoticed"


def test_accumulation_twice_over_is_refused_between_ranks(ranks: Ranks) -> None:
    assert all("several backward passes" in found for found in ranks.run(twice_accumulated))
