"""Measures how forward and backward get shorter when a prefix of the layers is frozen, against Eq. 6 of the model.

Networks of ``split_tasks.py``, frozen by :class:`icefrog.runtime.LayerElastic`; CPU seconds of one thread (so that a busy
machine matters little), depths taken in turns, medians over rounds. FLOPs of each unit are counted, not assumed. Prints
theta, what was measured, and the exponent that fits T_bwd(l) = T_bwd(0) theta^gamma best. A CPU has no launch cost to
speak of, so that alpha_flop cannot be seen here.

    OMP_NUM_THREADS=1 python scripts/measure_freezing_speed.py --data DATA [TASK ...]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from split_tasks import STUDIES, TASKS, Task
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from icefrog.profile import FloatArray
from icefrog.runtime import LayerElastic


def unit_flops(task: Task, inputs: torch.Tensor) -> FloatArray:
    """FLOPs of the forward pass by unit."""
    model = task.build()
    names = {id(module): name for name, module in model.named_modules()}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(inputs)
    counts = counter.get_flop_counts()
    root = type(model).__name__

    def of(module: Any) -> float:
        return float(sum(counts.get(f"{root}.{names[id(module)]}", {}).values()))

    return np.array([sum(of(module) for module in unit) for unit in task.units(model)])


def measure(task: Task, data: Path, rounds: int) -> dict[str, Any]:
    """Medians of forward and backward CPU seconds by depth, and theta by depth."""
    torch.manual_seed(0)
    x, labels = task.data(data, 0).train
    batch = task.augment(x[: task.batch], np.random.default_rng(0))
    target = labels[: task.batch].flatten()
    model = task.build()
    optimizer = task.optimizer(model)
    elastic = LayerElastic(model, optimizer, task.units(model), rule="none", stats_every=10**9, env={})
    depths = range(len(elastic.layers))
    spent = np.zeros((rounds + 1, len(depths), 2))
    model.train()
    for turn in range(rounds + 1):
        for depth in depths:
            elastic.freeze(depth)
            start = time.process_time()
            loss = F.cross_entropy(elastic.model(batch).flatten(0, -2), target)
            middle = time.process_time()
            loss.backward()
            spent[turn, depth] = middle - start, time.process_time() - middle
            optimizer.zero_grad()
    forward, backward = np.median(spent[1:], axis=0).T  # the first round warms up
    flops = unit_flops(task, batch)
    theta = np.cumsum(flops[::-1])[::-1] / flops.sum()
    use = (theta < 0.97) & (theta > 0.05)
    gamma = float(np.sum(np.log(theta[use]) * np.log(backward[use] / backward[0])) / np.sum(np.log(theta[use]) ** 2))
    return {
        "forward_s": [round(float(v), 4) for v in forward],
        "backward_s": [round(float(v), 4) for v in backward],
        "theta": [round(float(v), 3) for v in theta],
        "backward_ratio": [round(float(v), 3) for v in backward / backward[0]],
        "gamma": round(gamma, 3),
    }


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="*", default=["cnn", "finetune", "decoder"])
    parser.add_argument("--data", type=Path, required=True, help="folder of the unpacked data packages")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.tasks:
        print(json.dumps({name: measure({**TASKS, **STUDIES}[name], args.data, args.rounds)}), flush=True)


if __name__ == "__main__":
    main()
