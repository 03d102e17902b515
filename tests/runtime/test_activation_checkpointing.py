"""F9: activation checkpointing behind a frozen prefix: works, or is refused with the fix named."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from icefrog.errors import UserError
from icefrog.runtime import LayerElastic


class Checkpointed(nn.Module):
    """Every block's activations are computed again in backward; the head's are kept."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh(), nn.Dropout(0.3)) for _ in range(4)
        )
        self.head = nn.Linear(6, 3)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def make(reentrant: bool | None, rule: Any = "none") -> tuple[LayerElastic, torch.optim.Optimizer]:
    model = Checkpointed(reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return LayerElastic(model, optimizer, rule=rule, env={}), optimizer


def fit(reentrant: bool | None) -> tuple[dict[str, bytes], list[float]]:
    elastic, optimizer = make(reentrant)
    for depth in (0, 2, 4, 1, 0):
        elastic.freeze(depth)
        torch.manual_seed(depth)
        models.train(elastic, optimizer, 3)
    return models.bytes_of(elastic.model), elastic._engine.tracker.variance.tolist()


def test_the_other_kind_is_the_same_to_the_bit_at_every_depth() -> None:
    assert fit(False) == fit(None)


def test_reentrant_checkpointing_trains_unfrozen_and_freezing_is_refused() -> None:
    x, _ = models.data()
    elastic, optimizer = make(True, rule=lambda now: now.at(2 * (now.step > 0), "always"))
    nn.functional.cross_entropy(elastic.model(x.requires_grad_()), torch.zeros(64, dtype=torch.long)).backward()
    with pytest.warns(UserWarning, match="nothing will be frozen.*use_reentrant=False"):
        optimizer.step()
    assert elastic.end_epoch().frozen_layers == 0
    with pytest.raises(UserError, match="loses the gradients"):
        elastic.freeze(1)


def test_reentrant_checkpointing_that_comes_later_is_an_error_not_a_loss_of_gradients() -> None:
    elastic, optimizer = make(None)
    models.train(elastic, optimizer, 1)
    elastic.freeze(2)
    elastic.model.reentrant = True
    x, _ = models.data()
    with pytest.raises(UserError, match=r"layer 'blocks.2.0'"):
        elastic.model(x)
    elastic.model.reentrant = False
    models.train(elastic, optimizer, 1)
