"""A program: one job lives many short lives, each of another kind and number of ranks, and is killed in each of them.

    python resized_jobs.py FOLDER LIVES SEED

A life is drawn: one process, or two ranks data-parallel, sharded, as the stages of a pipeline, or as replicas of one stage;
with or without accumulation. In it the boundary moves as the job's plan says, every step is saved, and after a few steps
its ranks are killed with SIGKILL, one after the other. What is then on disk must be the state of the job that was never
killed, in one process: counters, place in the epoch, learning rate and boundary exactly, weights and moments to rounding,
since ranks add in another order. Jobs are forked from this process, so that PyTorch is loaded once.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import killed_jobs
import models
import torch
from pipeline_jobs import LOSS, parallelism
from torch.utils.data import DataLoader, TensorDataset

from icefrog.runtime import LayerElastic, sharded
from icefrog.runtime.checkpoint import CheckpointStore, load
from icefrog.runtime.parallel import pipeline  # noqa: F401 - loaded once

KINDS = {"single": 1, "auto": 2, "fsdp": 2, "pipeline": 2, "replicas": 2}
SAMPLES, BATCH = 45, 8  # the last global batch has five
MOST_STEPS = 12
TOLERANCE = 1e-4


def job(
    kind: str, accum_steps: int, plan: dict[int, int], folder: Path | None, steps: int, after: Callable[[Any], None]
) -> None:
    """Train until ``steps`` steps are done, from the newest checkpoint on; ``after`` is called behind each step."""
    torch.set_num_threads(1)
    model = models.mlp(depth=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    elastic = LayerElastic(
        model,
        optimizer,
        rule="none",
        env={},
        global_batch=BATCH,
        accum_steps=accum_steps,
        max_grad_norm=1.0,
        checkpoint_dir=folder,
        checkpoint_every_steps=1,
        parallel=kind if kind == "fsdp" else parallelism(kind),
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5)
    elastic.register("schedule", schedule)
    loader = DataLoader(TensorDataset(*models.data(SAMPLES)), batch_sampler=elastic.sampler(SAMPLES, seed=2))
    for _ in elastic.epochs(10**6):
        for x, y in loader:
            if elastic._at.step in plan:
                elastic.freeze(plan[elastic._at.step])
            elastic.train_step(x, y, LOSS)
            optimizer.step()
            optimizer.zero_grad()
            if elastic.stepped:
                schedule.step()
                after(elastic)
                if elastic._at.step == steps:
                    elastic.close()
                    return
        elastic.end_epoch()


def outcome(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What must be equal, and what must be close."""
    counters = state["counters"]
    exact = {
        "step": counters["step"],
        "samples": counters["samples"],
        "place": counters["epoch"] * SAMPLES + counters["cursor"],  # the end of an epoch is the start of the next one
        "boundary": state["frozen_layers"],
        "rates": [group["lr"] for group in state["optimizer"]["groups"]],
    }
    moments = {
        f"{name}.momentum": entry["momentum_buffer"]
        for name, entry in state["optimizer"]["state"].items()
        if entry.get("momentum_buffer") is not None
    }
    return exact, {**state["model"], **moments}


def compare(found: tuple[dict[str, Any], dict[str, torch.Tensor]], expected: dict[int, Any]) -> float:
    """The largest difference of a tensor from the state that should be there."""
    exact, tensors = found
    exact_there, tensors_there = expected[exact["step"]]
    moves = exact_there["boundary"]  # before or behind a move that the loop makes between two steps
    assert {**exact, "boundary": moves} == exact_there, f"{exact} should be {exact_there}"
    assert exact["boundary"] in moves, f"{exact} should be {exact_there}"
    assert tensors.keys() == tensors_there.keys(), tensors.keys() ^ tensors_there.keys()
    gap = max(float((value - tensors_there[name]).abs().max()) for name, value in tensors.items())
    assert gap < TOLERANCE, f"{exact}: a tensor differs by {gap}"
    return gap


def trajectory(plan: dict[int, int], steps: int, path: Path) -> dict[int, Any]:
    """By step, the state of the job that is never killed. It computes in a process of its own: this one is forked again."""
    killed_jobs.end([killed_jobs.fork(lambda: torch.save(undisturbed(plan, steps), path))])
    found: dict[int, Any] = torch.load(path, weights_only=False)
    return found


def undisturbed(plan: dict[int, int], steps: int) -> dict[int, Any]:
    """As above."""
    found: dict[int, Any] = {}

    def note(elastic: LayerElastic) -> None:
        exact, tensors = outcome(elastic.state_dict())
        exact["boundary"] = [exact["boundary"], plan.get(exact["step"], exact["boundary"])]
        found[exact["step"]] = exact, {name: value.clone() for name, value in tensors.items()}

    job("single", 1, plan, None, steps, note)
    return found


def check(folder: Path, expected: dict[int, Any], least_step: int) -> int:
    """The step that is resumed from."""
    path = CheckpointStore(folder).newest_valid()
    if path is None:
        assert least_step == 0, "the checkpoints are gone"
        return 0
    state = sharded.load(path) if path.suffix == ".dcp" else load(path, torch.device("cpu"))
    compare(outcome(state), expected)
    step = int(state["counters"]["step"])
    assert step >= least_step, f"step {step} after step {least_step} was on disk"
    return step


def start(kind: str, work: Callable[[], None]) -> list[int]:
    """The ranks of one life."""
    if KINDS[kind] == 1:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        return [killed_jobs.fork(work)]
    return killed_jobs.start("sharded", work)


def main(folder: Path, lives: int, seed: int) -> None:
    draw = random.Random(seed)
    steps = lives * 6 + 4
    plan = {draw.randrange(steps): draw.randrange(5) for _ in range(steps // 4)}
    expected = trajectory(plan, steps, folder / "trajectory.pt")
    saves = folder / "c"
    saves.mkdir()
    at, log = 0, []
    for _ in range(lives):
        kind, accum = draw.choice(list(KINDS)), draw.choice([1, 1, 2])
        ready, up = os.pipe()
        pids = start(
            kind,
            lambda: job(kind, accum, plan, saves, steps, lambda _: os.write(up, b".") and None),  # noqa: B023
        )
        os.close(up)
        for _ in range(draw.randint(1, MOST_STEPS - 2) * len(pids)):
            assert os.read(ready, 1), f"a rank of {kind} ended by itself after step {at}"
        for pid in draw.sample(pids, len(pids)):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            time.sleep(draw.choice([0.0, 0.0, 0.05]))
        os.close(ready)
        at = check(saves, expected, at)
        log.append([kind, accum, at])
    end = folder / "end.pt"
    kind = draw.choice(list(KINDS))

    def last(elastic: LayerElastic) -> None:
        if elastic._at.step == steps:
            found = outcome(elastic.state_dict())  # of all ranks together
            if elastic.rank == 0:
                torch.save(found, end)

    killed_jobs.end(start(kind, lambda: job(kind, 1, plan, saves, steps, last)))
    gap = compare(torch.load(end, weights_only=False), expected)
    print(json.dumps({"lives": log, "last": kind, "largest_difference": gap}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
