"""``nn.Embedding(sparse=True)``: its gradient has the rows that a batch has used. All else is as with a dense one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from two_ranks import Ranks

from icefrog.runtime import LayerElastic

SAMPLES, BATCH, WORDS = 26, 8, 20


def train(sparse: bool, accum: int = 1, folder: Path | None = None, epochs: int = 3) -> dict[str, Any]:
    """Some epochs, the embedding frozen in the second; on as many ranks as there are."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(WORDS, 4, sparse=sparse), nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)
    )
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randint(0, WORDS, (SAMPLES, 3), generator=generator), torch.arange(SAMPLES) % 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    elastic = LayerElastic(model, optimizer, rule="none", accum_steps=accum, stats_every=1, checkpoint_dir=folder)
    loader = DataLoader(TensorDataset(x, y), batch_sampler=elastic.sampler(SAMPLES, global_batch=BATCH))
    sent = []
    for epoch in elastic.epochs(1000):
        elastic.freeze(int(epoch == 1))
        before = elastic._engine.statistics.bytes_reduced
        for part, label in loader:
            nn.functional.cross_entropy(elastic.model(part), label).backward()
            optimizer.step()
            optimizer.zero_grad()
        sent.append(elastic._engine.statistics.bytes_reduced - before)
        elastic.end_epoch()
        if epoch == epochs - 1:
            break
    found = {"variance": elastic._engine.tracker.variance.tolist(), "sent": sent}
    found["params"] = [value.flatten().tolist() for value in elastic.state_dict()["model"].values()]
    elastic.close()
    return found


def same(found: dict[str, Any], other: dict[str, Any]) -> None:
    assert found["variance"] == pytest.approx(other["variance"], rel=1e-4)
    for mine, theirs in zip(found["params"], other["params"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("accum", [1, 2])
def test_two_ranks(ranks: Ranks, accum: int) -> None:
    dense, sparse = (ranks.run(train, kind, accum) for kind in (False, True))
    same(sparse[0], dense[0])
    assert sparse[0]["params"] == sparse[1]["params"]
    first, frozen, last = sparse[0]["sent"]
    assert frozen == dense[0]["sent"][1]  # what the layers behind it need, and nothing of the embedding
    assert frozen < min(first, last)


@pytest.mark.parametrize("accum", [1, 2])
def test_one_rank_with_a_resume(tmp_path: Path, accum: int) -> None:
    dense, sparse = train(False, accum), train(True, accum)
    same(sparse, dense)
    train(True, accum, tmp_path, epochs=1)  # the last gradient of its last step is in the checkpoint
    resumed = train(True, accum, tmp_path)
    assert resumed["params"] == sparse["params"]
    assert resumed["variance"] == sparse["variance"]
