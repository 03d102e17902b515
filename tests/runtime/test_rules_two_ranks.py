"""Freezing rules over two ranks: rank 0 decides, both obey, and parameters stay equal to the bit."""

from __future__ import annotations

import models
import pytest
import torch
from torch import nn
from two_ranks import Ranks

from icefrog.runtime import LayerElastic, Pipeline
from icefrog.runtime.rules import AutoFreeze, Egeria, Fixed, FreezeOut, FreezingRule, Linear, Proposal, Situation


class TrainedLoss(FreezingRule):
    """Says what it was told of the loss."""

    def propose(self, now: Situation) -> Proposal:
        return now.stay(f"{now.train_loss}")


def rule_named(name: str) -> FreezingRule:
    return {
        "fixed": lambda: Fixed(2),
        "linear": lambda: Linear(0.0, 1.0),
        "freezeout": lambda: FreezeOut(0.3),
        "freezeout-tuned": FreezeOut,
        "autofreeze": AutoFreeze,
        "egeria": lambda: Egeria(evaluate_every=2, window=2, tolerance=0.9, warmup_share=0.0),
        "loss": TrainedLoss,
    }[name]()


def train(name: str) -> tuple[list[int], list[str], dict[str, bytes]]:
    model = models.mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    elastic = LayerElastic(model, optimizer, rule=rule_named(name), global_batch=16)
    sampler = elastic.sampler(64)
    x, y = models.data()
    depths, reasons = [], []
    for _ in elastic.epochs(10):
        for rows in sampler:
            loss = nn.functional.cross_entropy(elastic.model(x[rows]), y[rows])
            loss.backward()
            elastic.note_loss(float(elastic.rank))
            optimizer.step()
            optimizer.zero_grad()
        decision = elastic.end_epoch(metric=0.1)  # compares the ranks' parameters
        depths.append(decision.frozen_layers)
        reasons.append(decision.reason)
    found = models.bytes_of(model)
    elastic.close()
    return depths, reasons, found


@pytest.mark.parametrize("name", ["fixed", "linear", "freezeout", "freezeout-tuned", "autofreeze", "egeria"])
def test_both_ranks_freeze_the_same_layers_and_stay_equal(ranks: Ranks, name: str) -> None:
    first, second = ranks.run(train, name)
    assert first == second
    if not name.endswith("tuned"):  # that depends on measured times
        assert first[0][-1] > 0


def test_the_loss_is_the_mean_over_the_ranks(ranks: Ranks) -> None:
    for _, reasons, _ in ranks.run(train, "loss"):
        assert reasons == ["0.5"] * 10


def anneal(spread: str) -> tuple[dict[str, list[float]], list[str]]:
    """Six of ten epochs under a schedule whose first layer ends at nine tenths: rates fall, and nothing freezes yet."""
    model = models.mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    pipeline = Pipeline(nn.functional.cross_entropy, micro_batches=2)
    parallel = {"pipeline": pipeline, "fsdp": "fsdp"}.get(spread, "auto")
    elastic = LayerElastic(model, optimizer, rule=FreezeOut(0.9), global_batch=16, parallel=parallel)
    sampler = elastic.sampler(64)
    x, y = models.data()
    reasons = []
    for epoch in elastic.epochs(10):
        for rows in sampler:
            elastic.train_step(x[rows], y[rows], nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
        reasons.append(elastic.end_epoch(metric=0.1).reason)
        if epoch == 5:
            break
    found = {name: value.tolist() for name, value in elastic.state_dict()["model"].items()}
    elastic.close()
    return found, reasons


@pytest.mark.parametrize("spread", ["ddp", "fsdp", "pipeline"])
def test_rates_by_layer_are_the_same_however_the_model_is_spread(ranks: Ranks, spread: str) -> None:
    alone, reasons = anneal("alone")
    assert len(set(reasons)) == 6
    for params, told in ranks.run(anneal, spread):
        assert told == reasons
        for name, value in params.items():
            torch.testing.assert_close(torch.tensor(value), torch.tensor(alone[name]), rtol=1e-4, atol=1e-5)
