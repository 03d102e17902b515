"""What users and other code do to a model, under sharding: DDP's results to the bit, in orders drawn at random."""

from __future__ import annotations

import copy
import random
from typing import Any

import models
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from two_ranks import Ranks

from icefrog.runtime import LayerElastic


class Crooked(nn.Module):
    """Declared in another order than it runs; a shared activation, a recomputed block, a loose parameter, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(6, 3)
        self.block = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))
        self.norm = nn.BatchNorm1d(6)
        self.act = nn.Tanh()
        self.first = nn.Linear(6, 6)
        self.user_frozen = nn.Linear(6, 6)
        self.user_frozen.requires_grad_(False)
        self.shift = nn.Parameter(torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.act(self.first(x)))
        hidden = self.act(self.user_frozen(hidden)) + self.shift
        if self.training:
            hidden = hidden + checkpoint(self.block, hidden, use_reentrant=False)
        else:
            hidden = hidden + self.block(hidden)
        return self.head(self.act(hidden))


def odd_run(parallel: str, seed: int) -> dict[str, Any]:
    model = Crooked()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    elastic = LayerElastic(model, optimizer, rule="none", parallel=parallel, global_batch=16)
    x, y = models.data()
    draw = random.Random(seed)
    at = 0

    def forward() -> torch.Tensor:
        start = at % 3 * 16 + elastic.rank * 8
        return nn.functional.cross_entropy(elastic.model(x[start : start + 8]), y[start : start + 8])

    states: list[dict[str, Any]] = []
    orders = set()
    trace: list[Any] = []  # where the two kinds part, if they do
    for _ in range(30):
        action = draw.choice(["freeze", "freeze", "validate", "unused", "reset", "open", "save", "load", "end", "late"])
        if action == "freeze":
            elastic.freeze(draw.randrange(len(elastic.layers)))
        elif action == "validate":
            elastic.model.eval()
            with torch.no_grad():
                elastic.model(x)
            elastic.model.train()
        elif action == "unused":
            forward()  # its loss is thrown away
        elif action == "reset":  # F8
            model.first.requires_grad_(True)
        elif action == "open":
            model.user_frozen.requires_grad_(True)
        elif action == "save":
            states.append(copy.deepcopy(elastic.state_dict()))
        elif action == "load" and states:
            state = draw.choice(states)
            if state["layers"] == [layer.name for layer in elastic.layers]:
                elastic.load_state_dict(state)
        elif action == "end":
            elastic.end_epoch()
        before = copy.deepcopy(elastic.state_dict()["model"])
        frozen = [name for layer in elastic.layers[: elastic.frozen_layers] for name in layer.params]
        loss = forward()
        loss.backward()
        if action == "late":  # F7: between backward and step
            elastic.freeze(draw.randrange(len(elastic.layers)))
            frozen = [name for layer in elastic.layers[: elastic.frozen_layers] for name in layer.params]
        boundary = elastic.frozen_layers
        optimizer.step()
        optimizer.zero_grad()
        at += 1
        after = elastic.state_dict()["model"]
        if elastic.frozen_layers == boundary:
            assert all(torch.equal(after[name], before[name]) for name in frozen), action
        trace.append((action, boundary, loss.item(), sum(value.double().sum().item() for value in after.values())))
        orders.add(tuple(layer.name for layer in elastic.layers))
    state = elastic.state_dict()
    found = {
        "model": {name: value.tolist() for name, value in state["model"].items()},
        "optimizer": {
            name: [value.tolist() for value in entry.values()] for name, entry in state["optimizer"]["state"].items()
        },
        "trace": trace,
        "orders": sorted(orders),
    }
    elastic.close()
    return found


@pytest.mark.parametrize("seed", [2, pytest.param(7, marks=pytest.mark.slow)])
def test_random_orders_end_like_ddp(ranks: Ranks, seed: int) -> None:
    """Also loads states that were loaded and trained on before."""
    ddp = ranks.run(odd_run, "ddp", seed)
    fsdp = ranks.run(odd_run, "fsdp", seed)
    for rank in range(2):
        assert fsdp[rank]["trace"] == ddp[rank]["trace"]
        assert fsdp[rank] == ddp[rank]
    assert fsdp[0]["optimizer"] == fsdp[1]["optimizer"]
    assert any(order[0] == "first" for order in fsdp[0]["orders"])
