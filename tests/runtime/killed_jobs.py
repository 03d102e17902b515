"""A program: a job that saves at every step is killed with SIGKILL again and again; each time what is on disk is checked.

    python killed_jobs.py VARIANT FOLDER KILLS SEED

Variants: ``sync`` writes at the step boundary, ``async`` beside training, ``sharded`` too, by two ranks under FSDP that are
killed one after the other. The job moves its boundary as it goes. A first job is never killed and notes a digest of its
state after each step: every checkpoint found after a kill must be that state, whole. Jobs are forked from this process,
which computes nothing itself, so that PyTorch is loaded once.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import torch
import torch._dynamo  # which the first optimizer step would load in every job
from torch import nn

from icefrog.executors.local.supervisor import free_port
from icefrog.runtime import LayerElastic, sharded
from icefrog.runtime.checkpoint import CheckpointStore, load
from icefrog.runtime.parallel import fsdp  # noqa: F401 - loaded once, too

STEPS_A_KILL = 15
MOST_STEPS = 8
LONGEST_S = 0.02


def digest(state: dict[str, Any]) -> str:
    """Of everything that training depends on; the last gradient, which shows in psi, is not in whole states of two ranks."""
    kept = {"boundary": state["frozen_layers"], "psi": state["psi"], "step": state["counters"]["step"]}
    found = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    optimizer = {f"{name}.{key}": v for name, entry in state["optimizer"]["state"].items() for key, v in entry.items()}
    for tensors in (state["model"], optimizer):
        for name in sorted(tensors):
            found.update(name.encode())
            found.update(tensors[name].contiguous().numpy().tobytes())
    return found.hexdigest()


def job(variant: str, folder: Path | None, steps: int, each_step: Callable[[LayerElastic], None]) -> None:
    """Train until ``steps`` steps are done, from the newest checkpoint on."""
    torch.set_num_threads(1)
    model = models.mlp(dim=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    elastic = LayerElastic(
        model,
        optimizer,
        rule="none",
        env={},
        checkpoint_dir=folder,
        checkpoint_every_steps=None if variant == "sync" else 1,
        parallel="fsdp" if variant == "sharded" else "auto",
    )
    batch = 16 // elastic.world_size
    elastic.begin(10**6)
    x, y = models.data(256, dim=32)
    while (step := elastic._at.step) < steps:
        at = step * 16 % len(x) + elastic.rank * batch
        nn.functional.cross_entropy(elastic.model(x[at : at + batch]), y[at : at + batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 7 == 0:  # a checkpoint is made when the next step begins: the move is in it
            elastic.freeze((step + 1) // 7 % 4)
        if variant == "sync" and folder is not None:
            elastic._keeper.store.save(elastic.state_dict(), {})  # type: ignore[union-attr]
        each_step(elastic)
    elastic.close()


def fork(work: Callable[[], None]) -> int:
    """Do ``work`` in a process of its own."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def start(variant: str, work: Callable[[], None]) -> list[int]:
    """The ranks of one job, each doing ``work``."""
    if variant != "sharded":
        return [fork(work)]
    port = str(free_port())
    found = []
    for rank in "01":
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        found.append(fork(work))
    return found


def end(pids: list[int]) -> None:
    """They end by themselves, and well."""
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * len(pids)


def trajectory(variant: str, steps: int, path: Path) -> list[str]:
    """The digest after each step of the run that is never killed."""

    def work() -> None:
        found: list[str] = []
        job(variant, None, steps, lambda elastic: found.append(digest(elastic.state_dict())))
        if os.environ.get("RANK", "0") == "0":
            path.write_text(json.dumps(found))

    end(start(variant, work))
    found: list[str] = json.loads(path.read_text())
    return found


def check(folder: Path, expected: list[str], least_step: int) -> int:
    """The step that is resumed from."""
    store = CheckpointStore(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a kill leaves nothing that looks like a checkpoint and is none
        path = store.newest_valid()
    if path is None:
        assert least_step == 0, "the checkpoints are gone"
        return 0
    state = sharded.load(path) if path.suffix == ".dcp" else load(path, torch.device("cpu"))
    step = int(state["counters"]["step"])
    assert digest(state) == expected[step - 1], f"{path} is not the state after step {step}"
    assert step >= least_step, f"step {step} after step {least_step} was on disk"
    names = sorted(path.name for path in folder.glob("[!.]*"))
    assert len({int(name[:8]) for name in names}) <= store.keep + 2, f"litter: {names}"
    return step


def main(variant: str, folder: Path, kills: int, seed: int) -> None:
    steps = STEPS_A_KILL * kills
    draw = random.Random(seed)
    expected = trajectory(variant, steps, folder / "trajectory.json")
    saves = folder / "c"
    saves.mkdir()
    at, moved = 0, 0
    for _ in range(kills):
        ready, up = os.pipe()
        pids = start(variant, lambda: job(variant, saves, steps, lambda _: os.write(up, b".") and None))  # noqa: B023
        os.close(up)
        for _ in range(draw.randint(0, MOST_STEPS) * len(pids)):  # steps; none: it is killed while it resumes
            os.read(ready, 1)
        for number, pid in enumerate(draw.sample(pids, len(pids))):
            time.sleep(draw.uniform(0, LONGEST_S))
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            assert os.WIFSIGNALED(status) or number > 0, f"the job ended by itself: {status}"
        os.close(ready)
        now = check(saves, expected, at)
        moved += now > at
        at = now
    end(start(variant, lambda: job(variant, saves, at + 3, lambda _: None)))
    left = sorted(path.suffix for path in saves.glob("[!.]*"))
    print(json.dumps({"kills": kills, "step": at, "moved": moved, "left": left}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
