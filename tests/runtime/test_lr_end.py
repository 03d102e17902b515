"""Schedules over a fixed number of steps: frozen steps count less, so a job may make more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import models
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, OneCycleLR, StepLR

from icefrog.runtime import LayerElastic
from icefrog.runtime.rules import Proposal, Situation

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "cosine": lambda o: OneCycleLR(o, 0.1, total_steps=8),
    "linear": lambda o: OneCycleLR(o, 0.1, epochs=2, steps_per_epoch=4, anneal_strategy="linear", three_phase=True),
    "chained": lambda o: ChainedScheduler([OneCycleLR(o, 0.1, total_steps=8), StepLR(o, 100)], optimizer=o),
}


def train(kind: str, worth: float, folder: Path | None) -> list[float]:
    """Rates of the steps of two epochs of four steps, or more where a step is worth less."""
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = SCHEDULES[kind](optimizer)

    def rule(_now: Situation) -> Proposal:
        return Proposal(int(worth < 1), "always", worth=worth)

    elastic = LayerElastic(model, optimizer, rule=rule, env={}, checkpoint_dir=folder)
    elastic.register("schedule", schedule)
    x, y = models.data(32)
    rates = []
    for _ in elastic.epochs(2):
        for rows in torch.arange(32).split(8):
            nn.functional.cross_entropy(elastic.model(x[rows]), y[rows]).backward()
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        elastic.end_epoch()
    elastic.close()
    return rates


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_stays_at_its_last_rate(tmp_path: Path, kind: str) -> None:
    rates = train(kind, 1.0, tmp_path / "whole")
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = SCHEDULES[kind](plain)
    expected = []
    for _ in range(8):
        expected.append(plain.param_groups[0]["lr"])
        plain.step()
        schedule.step()
    assert rates == expected
    longer = train(kind, 0.5, tmp_path / "longer")
    assert len(longer) == 16
    assert longer == rates + 8 * rates[-1:]
    assert min(longer) > 0
