"""A program: of a job's two ranks one is killed with SIGKILL; the other must end by itself, and the job resume.

    python peer_lost.py KIND FOLDER LIVES SEED

``KIND``: ``auto`` (data-parallel), ``fsdp``, ``pipeline``, or ``replicas`` of a pipeline of one stage. The one to be killed
is drawn, after some steps and at a random moment. Prints a line of JSON: for each life, the seconds until the other rank had
ended, its exit status, what it wrote to stderr, and the step that is on disk. Ranks are forked from this process, and end as
programs do, not by ``os._exit``.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import models
import torch
import torch._dynamo  # loaded once
from torch import nn

from icefrog.executors.local.supervisor import free_port
from icefrog.runtime import LayerElastic
from icefrog.runtime.checkpoint import CheckpointStore
from icefrog.runtime.parallel.pipeline import Pipeline

BATCH, STEPS_AN_EPOCH = 16, 5
LIMIT_S = 120.0


def train(kind: str, folder: Path, up: int) -> None:
    """For ever: the boundary moves, epochs end, every step is saved."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model = models.mlp(dim=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    stages = {"pipeline": 2, "replicas": 1}.get(kind)
    spread = Pipeline(nn.functional.cross_entropy, num_stages=stages) if stages else kind
    elastic = LayerElastic(
        model, optimizer, rule="none", env={}, checkpoint_dir=folder / "c", checkpoint_every_steps=1, parallel=spread
    )
    sampler = elastic.sampler(BATCH * STEPS_AN_EPOCH, global_batch=BATCH)
    x, y = models.data(BATCH * STEPS_AN_EPOCH, dim=32)
    for _ in elastic.epochs(10**6):
        for rows in sampler:
            if stages:
                elastic.train_step(x[rows], y[rows])
            else:
                nn.functional.cross_entropy(elastic.model(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            os.write(up, b".")
        with torch.no_grad():
            elastic.model(x[:BATCH])
        elastic.freeze(elastic.epoch % 3)
        elastic.end_epoch()


def start(kind: str, folder: Path, up: int) -> list[int]:
    """The processes of two ranks, by rank; in them it does not return."""
    os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    pids = []
    for rank in "01":
        os.environ.update(RANK=rank, LOCAL_RANK=rank)
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(folder / f"stderr.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            train(kind, folder, up)
        pids.append(pid)
    return pids


def ended(pid: int) -> tuple[float, int | None]:
    """(Seconds until it had ended, its exit status); None: it had to be killed."""
    begin = time.monotonic()
    while (took_s := time.monotonic() - begin) < LIMIT_S:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return took_s, os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return took_s, None


def life(kind: str, folder: Path, draw: random.Random) -> dict[str, Any]:
    """One start of the job, and how it ended."""
    ready, up = os.pipe()
    pids = start(kind, folder, up)
    os.close(up)
    for _ in range(2 * draw.randint(2, 12)):
        assert os.read(ready, 1), [(folder / f"stderr.{rank}").read_text() for rank in "01"]
    time.sleep(draw.uniform(0, 0.05))
    killed = draw.randrange(2)
    os.kill(pids[killed], signal.SIGKILL)
    os.waitpid(pids[killed], 0)
    took_s, status = ended(pids[1 - killed])
    os.close(ready)
    path = CheckpointStore(folder / "c").newest_valid()
    manifest = path / "manifest.json" if path is not None and path.is_dir() else path and path.with_suffix(".json")
    step = json.loads(manifest.read_text())["step"] if manifest is not None else 0
    words = (folder / f"stderr.{1 - killed}").read_text()
    return {"killed": killed, "took_s": took_s, "status": status, "words": words, "step": step}


def main(kind: str, folder: Path, lives: int, seed: int) -> None:
    draw = random.Random(seed)
    found = [life(kind, folder, draw) for _ in range(lives)]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
