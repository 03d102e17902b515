"""A program: a job with batch normalisation and an average of weights is killed, and resumed at another number of ranks.

    python averaged_jobs.py FOLDER LIVES SEED

Ranks normalise their own part of a batch, so such a job learns something else at another number of ranks; but a kill must
change nothing. A first job lives many lives of one or two ranks, in each of which it is killed with SIGKILL at a random
moment; the step that is found on disk then ends that life. A second job lives the same lives, each of which ends by
itself at that step. What they leave on disk must be equal to the bit: weights, buffers, average, moments, schedule and
place. Jobs are forked from this process, so that PyTorch is loaded once.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import killed_jobs
import models
import torch
from resized_jobs import start
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from icefrog.runtime import LayerElastic
from icefrog.runtime.checkpoint import CheckpointStore, load

SAMPLES, BATCH = 45, 8  # the last global batch has five
MOST_STEPS = 10
KINDS = {1: "single", 2: "auto"}


def job(plan: dict[int, int], folder: Path, last_step: int | None, up: int | None) -> None:
    """Train from the newest checkpoint on, until ``last_step`` is saved: when the next step begins."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    elastic = LayerElastic(
        model, optimizer, rule="none", env={}, global_batch=BATCH, checkpoint_dir=folder, checkpoint_every_steps=1
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5)
    elastic.register("schedule", schedule)
    elastic.register("average", average)
    loader = DataLoader(TensorDataset(*models.data(SAMPLES)), batch_sampler=elastic.sampler(SAMPLES, seed=2))
    for _ in elastic.epochs(10**6):
        for x, y in loader:
            if elastic._at.step in plan:
                elastic.freeze(plan[elastic._at.step])
            loss = nn.functional.cross_entropy(elastic.model(x), y)
            if elastic._at.step == last_step:
                elastic.close()
                return
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            average.update_parameters(model)
            if up is not None:
                os.write(up, b".")
        elastic.end_epoch()


def on_disk(folder: Path) -> tuple[int, dict[str, str]]:
    """(Step, digests) of the newest checkpoint."""
    path = CheckpointStore(folder).newest_valid()
    if path is None:
        return 0, {}
    state = load(path, torch.device("cpu"))
    counters = state["counters"]
    place = counters["epoch"] * SAMPLES + counters["cursor"]  # the end of an epoch is the start of the next one
    found = {
        "model": digest(state["model"]),
        "optimizer": digest(state["optimizer"]["state"]),
        "average": digest(state["registered"]["average"]),
        "rest": repr([place, counters["samples"], state["registered"]["schedule"]]),
    }
    return int(counters["step"]), found


def digest(state: Any) -> str:
    """Of every bit of the tensors."""
    if isinstance(state, torch.Tensor):
        return hashlib.sha256(state.contiguous().numpy().tobytes()).hexdigest()
    if isinstance(state, dict):
        return hashlib.sha256("".join(f"{key}{digest(state[key])}" for key in sorted(state)).encode()).hexdigest()
    return repr(state)


def killed(world: int, plan: dict[int, int], folder: Path, draw: random.Random) -> None:
    """One life, which SIGKILL ends."""
    ready, up = os.pipe()
    pids = start(KINDS[world], lambda: job(plan, folder, None, up))
    os.close(up)
    for _ in range(draw.randint(1, MOST_STEPS) * world):
        assert os.read(ready, 1), "a rank ended by itself"
    time.sleep(draw.choice([0.0, 0.005, 0.01]))
    for pid in draw.sample(pids, world):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os.close(ready)


def main(folder: Path, lives: int, seed: int) -> None:
    draw = random.Random(seed)
    plan = {draw.randrange(lives * 6): draw.randrange(5) for _ in range(lives * 2)}
    log: list[tuple[int, int]] = []
    states = []
    for _ in range(lives):
        world = draw.choice([1, 2])
        killed(world, plan, folder / "killed", draw)
        step, found = on_disk(folder / "killed")
        log.append((world, step))
        states.append(found)
    for (world, step), expected in zip(log, states, strict=True):
        if step > on_disk(folder / "ended")[0]:
            killed_jobs.end(start(KINDS[world], lambda: job(plan, folder / "ended", step, None)))  # noqa: B023
        assert on_disk(folder / "ended") == (step, expected), f"after {world} ranks: {log}"
    print(json.dumps(log))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
