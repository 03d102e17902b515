"""P0 can be used up in the middle of an epoch, since frozen steps count less: that epoch is trained to its end even so."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
import torch
from torch import nn

from icefrog.runtime import LayerElastic
from icefrog.runtime.rules import Proposal, Situation


def train(folder: Path, stop_after: int | None) -> int:
    """Steps after an epoch of 4 steps worth 0.8 each; P0, one epoch, is used up by the fifth."""
    torch.manual_seed(0)
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def rule(_now: Situation) -> Proposal:
        return Proposal(1, "always", worth=0.8)

    elastic = LayerElastic(
        model, optimizer, rule=rule, env={}, checkpoint_dir=folder, checkpoint_every_steps=1, global_batch=8
    )
    x, y = models.data(32)
    sampler = elastic.sampler(32)
    for _ in elastic.epochs(1):
        for rows in sampler:
            if elastic._at.step == stop_after:
                elastic.close()
                return elastic._at.step
            nn.functional.cross_entropy(elastic.model(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
        elastic.end_epoch()
    elastic.close()
    return elastic._at.step


@pytest.mark.parametrize("stop_after", [5, 6, 7])
def test_a_job_that_resumes_in_its_last_epoch_trains_that_to_its_end(tmp_path: Path, stop_after: int) -> None:
    assert train(tmp_path / "whole", None) == 8
    train(tmp_path / "stopped", stop_after)
    assert train(tmp_path / "stopped", None) == 8
    assert train(tmp_path / "stopped", None) == 8  # and then it is over
