"""What stands beside the optimizer, through two ranks, one, and two again: LR schedulers, and averages of weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import models
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset
from two_ranks import Ranks

from icefrog.runtime import LayerElastic, Stopped, protocol

SAMPLES, BATCH, EPOCHS = 48, 16, 5
STEPS = EPOCHS * SAMPLES // BATCH


def life(folder: str, attempt: str, stop_at: int | None) -> dict[str, Any]:
    """From the newest checkpoint to the step ``stop_at``; what was seen on the way."""
    attempt_dir = Path(folder) / attempt
    attempt_dir.mkdir(exist_ok=True)
    env = {**os.environ, protocol.ENV_ATTEMPT_DIR: str(attempt_dir), protocol.ENV_CHECKPOINT_DIR: f"{folder}/kept"}
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS + 1)  # changes the momentum, too
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
    elastic = LayerElastic(model, optimizer, rule="none", global_batch=BATCH, env=env)
    elastic.register("scheduler", scheduler)
    elastic.register("average", average)
    loader = DataLoader(TensorDataset(*models.data(SAMPLES)), batch_sampler=elastic.sampler(SAMPLES))
    rates: dict[int, tuple[float, float]] = {}
    try:
        for epoch in elastic.epochs(100):
            elastic.freeze((0, 2, 1, 3, 0)[epoch])
            for x, y in loader:
                if elastic._at.step == stop_at and elastic.rank == 0:
                    (attempt_dir / "stop").touch()
                nn.functional.cross_entropy(elastic.model(x), y).backward()
                rates[elastic._at.step] = (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"])
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                average.update_parameters(elastic.model)
            elastic.end_epoch()
            if epoch == EPOCHS - 1:
                break
    except Stopped:
        pass
    elastic.close()
    return {
        "rates": rates,
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
        "average": torch.cat([p.detach().flatten() for p in average.parameters()]).tolist(),
        "updates": int(average.n_averaged),
    }


def test_schedulers_and_averages_survive_changes_of_the_world_size(ranks: Ranks, tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole, parts = life(str(tmp_path / "whole"), "a", None), str(tmp_path / "parts")
    lives = [ranks.run(life, parts, "a", 4), [life(parts, "b", 9)], ranks.run(life, parts, "c", None)]
    assert [len(found[0]["rates"]) for found in lives] == [5, 5, 5]
    assert {step: rate for found in lives for step, rate in found[0]["rates"].items()} == whole["rates"]
    first, second = lives[-1]
    assert first == second  # to the bit across ranks
    assert first["updates"] == whole["updates"] == STEPS
    assert torch.allclose(torch.tensor(first["weights"]), torch.tensor(whole["weights"]), atol=1e-5)
    assert torch.allclose(torch.tensor(first["average"]), torch.tensor(whole["average"]), atol=1e-5)
    assert not torch.allclose(torch.tensor(first["average"]), torch.tensor(first["weights"]), atol=1e-3)
