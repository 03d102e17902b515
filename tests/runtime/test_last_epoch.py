"""P0 can be used up in the middle of an epoch, since frozen steps count less: that epoch is trained to its end even so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import models
import pytest
import torch
from torch import nn

from icefrog.runtime import LayerElastic
from icefrog.runtime.rules import Proposal, Situation


def epochs_of(elastic: LayerElastic, how: str) -> Iterator[int]:
    """One epoch is P0; the loop is ours, or one that is told in two ways when to end."""
    if how == "epochs":
        yield from elastic.epochs(1)
        return
    elastic.begin(1)
    while elastic.outcome is None:
        yield elastic.epoch


def train(folder: Path, stop_after: int | None, how: str = "epochs", dealt: bool = True) -> tuple[int, int]:
    """(Steps, validations) after epochs of 4 steps worth 0.8 each; P0, one epoch, is used up by the fifth step."""
    torch.manual_seed(0)
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def rule(_now: Situation) -> Proposal:
        return Proposal(1, "always", worth=0.8)

    elastic = LayerElastic(
        model, optimizer, rule=rule, env={}, checkpoint_dir=folder, checkpoint_every_steps=1, global_batch=8
    )
    x, y = models.data(32)
    batches = elastic.sampler(32) if dealt else torch.arange(32).split(8)
    for _ in epochs_of(elastic, how):
        for rows in batches:
            if elastic._at.step == stop_after:
                elastic.close()
                return elastic._at.step, elastic.epoch
            nn.functional.cross_entropy(elastic.model(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert elastic.outcome is None
        elastic.end_epoch()
    assert elastic.outcome == "completed"
    elastic.close()
    return elastic._at.step, elastic.epoch


@pytest.mark.parametrize("how", ["epochs", "begin"])
@pytest.mark.parametrize("stop_after", [5, 6, 7])
def test_a_job_that_resumes_in_its_last_epoch_trains_that_to_its_end(tmp_path: Path, stop_after: int, how: str) -> None:
    assert train(tmp_path / "whole", None, how) == (8, 2)
    train(tmp_path / "stopped", stop_after, how)
    assert train(tmp_path / "stopped", None, how) == (8, 2)
    assert train(tmp_path / "stopped", None, how) == (8, 2)  # and then it is over


@pytest.mark.parametrize("how", ["epochs", "begin"])
def test_with_a_loader_of_the_users_own_that_epoch_is_repeated(tmp_path: Path, how: str) -> None:
    assert train(tmp_path / "whole", None, how, dealt=False) == (8, 2)
    stopped = train(tmp_path / "stopped", 7, how, dealt=False)
    assert stopped == (7, 1)
    # The seventh step was not saved yet: a checkpoint is made when the next one begins.
    assert train(tmp_path / "stopped", None, how, dealt=False) == (10, 2)
    assert train(tmp_path / "stopped", None, how, dealt=False) == (10, 2)


def test_a_loop_over_a_stream_that_has_no_epochs_ends_with_p0() -> None:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = LayerElastic(model, optimizer, rule="none", env={}, samples_per_epoch=32)
    elastic.begin(2)
    x, y = models.data(32)
    while elastic.outcome is None and elastic._at.step < 20:
        nn.functional.cross_entropy(elastic.model(x[:8]), y[:8]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert elastic._at.step == 8
    elastic.close()
