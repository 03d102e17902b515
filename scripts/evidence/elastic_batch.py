"""Whether a global batch that moves by itself (``elastic_batch``) reaches the target sooner, alone and with freezing.

    python scripts/evidence/elastic_batch.py run --data DIR [--tasks ...] [--seeds 50-52]
    python scripts/evidence/elastic_batch.py report

Tasks, optimizers and targets are those of layer_elasticity.py; here the elastic sampler deals the batches, and validation,
decisions and moves of the batch come once a pass. ``TASK@8`` starts from a batch of 8, its learning rate scaled to it
(linearly under SGD, by the square root under AdamW). A done (task, arm, seed) is not repeated. Set ``OMP_NUM_THREADS=1``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from layer_elasticity import ROOT, machine, seeds_of
from rows import Row
from running import CACHE_BYTES, NEVER, SMOOTHED_OVER, interleaved, validate
from tables import interval
from tasks import TASKS, EvidenceTask, Sets
from torch import nn
from torch.nn import functional as F

from icefrog.runtime import LayerElastic
from icefrog.spec import Target

ROWS = ROOT / "docs/evidence/data/elastic-batch.jsonl"
ARMS = {
    "control": ("none", False),
    "batch": ("none", True),
    "progress": ("progress", False),
    "both": ("progress", True),
}
"""Freezing rule, and whether the batch moves."""


def task_of(name: str) -> EvidenceTask:
    """``TASK`` or ``TASK@M0``."""
    name, _, base = name.partition("@")
    task = TASKS[name]
    if not base:
        return task
    share = int(base) / task.batch

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = task.optimizer(model)
        for group in made.param_groups:
            group["lr"] *= share if isinstance(made, torch.optim.SGD) else share**0.5
        return made

    longer = round(task.interval_steps / share)
    return replace(
        task, batch=int(base), optimizer=optimizer, interval_steps=longer, warmup_steps=round(task.warmup_steps / share)
    )


def elastic_of(task: EvidenceTask, arm: str, data: Path, sets: Sets) -> LayerElastic:
    """The three lines, and the learning-rate rule that fits the optimizer."""
    rule, moves = ARMS[arm]
    model = task.build(data)
    optimizer = task.optimizer(model)
    elastic = LayerElastic(
        model,
        optimizer,
        task.units(model),
        target=Target(metric="accuracy", value=task.target, mode="max"),
        global_batch=task.batch,
        rule=rule,
        elastic_batch=moves,
        lr_rule="adascale" if isinstance(optimizer, torch.optim.SGD) else "sqrt",
        stats_every=None if moves else NEVER,
        env={},
    )
    if rule != "none" and task.augment is None:
        elastic.cache_prefix("memory", budget_bytes=CACHE_BYTES)
    return elastic


def train(name: str, arm: str, seed: int, data: Path, sets: Sets) -> Iterator[Row | None]:
    """One run; yields None after each pass, the row at last."""
    task = task_of(name)
    torch.manual_seed(seed)
    elastic = elastic_of(task, arm, data, sets)
    x, y = sets.train
    sampler = elastic.sampler(len(x), seed=seed)
    rates = torch.optim.lr_scheduler.LambdaLR(elastic.optimizer, lambda step: min(1.0, (step + 1) / task.warmup_steps))
    elastic.register("rates", rates)
    noise = torch.Generator().manual_seed(seed)
    accuracies: list[float] = []
    trace: list[list[Any]] = []
    trained_s, steps, mean = 0.0, 0, 0.0
    most_passes = task.max_intervals * task.interval_steps * task.batch // len(x)
    for _ in elastic.epochs(most_passes):
        began_s = time.process_time()
        for chosen in sampler:
            inputs = x[chosen]
            F.cross_entropy(
                elastic.model(task.augment(inputs, noise) if task.augment else inputs), y[chosen]
            ).backward()
            elastic.optimizer.step()
            elastic.optimizer.zero_grad()
            rates.step()
            steps += 1
        batch, depth = elastic.global_batch, elastic.frozen_layers
        trained_s += time.process_time() - began_s
        accuracies.append(validate(elastic.model, *sets.validation)[0])
        began_s = time.process_time()
        mean = sum(accuracies[-SMOOTHED_OVER:]) / SMOOTHED_OVER
        reason = elastic.end_epoch(metric=mean).reason
        trained_s += time.process_time() - began_s
        trace.append([steps, round(trained_s, 4), accuracies[-1], batch, depth, reason])
        if mean >= task.target - 1e-9 or len(trace) == most_passes:
            break
        yield None
    elastic.close()
    reached = mean >= task.target - 1e-9
    row = {"task": name, "arm": arm, "seed": seed, "reached": reached, "cpu_s": trace[-1][1], "steps": steps}
    yield row | {"passes": len(trace), "batch": trace[-1][3], "trace": trace}


def finished() -> list[Row]:
    """All rows so far."""
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def report() -> None:
    """Markdown: ratios to the control of the same seed."""
    rows = {(row["task"], row["arm"], row["seed"]): row for row in finished()}
    print(
        "| task | arm | reached | times faster in CPU time (95 % interval) | passes against the control | batch at the end |"
    )
    print("|---|---|---|---|---|---|")
    for task in dict.fromkeys(task for task, _, _ in rows):
        for arm in list(ARMS)[1:]:
            both = [(rows[task, "control", seed], row) for (t, a, seed), row in rows.items() if (t, a) == (task, arm)]
            reached = [(control, row) for control, row in both if control["reached"] and row["reached"]]
            cpu = interval([control["cpu_s"] / row["cpu_s"] for control, row in reached])
            passes = interval([row["passes"] / control["passes"] for control, row in reached])
            batches = " ".join(str(row["batch"]) for _, row in both)
            could = sum(control["reached"] for control, _ in both)
            print(f"| {task} | {arm} | {len(reached)} of {could} | {cpu} | {passes} | {batches} |")


def main() -> None:
    """Run or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="train what is missing")
    runs.add_argument("--data", type=Path, required=True)
    runs.add_argument("--tasks", default="cnn-digits,cnn-digits@8,resnet-mnist@8")
    runs.add_argument("--seeds", default="50-52")
    commands.add_parser("report", help="print the table")
    args = parser.parse_args()
    if args.command == "report":
        report()
        return
    torch.set_num_threads(1)
    done = {(row["task"], row["seed"]) for row in finished()}
    for seed in seeds_of(args.seeds):
        for task in args.tasks.split(","):
            if (task, seed) in done:
                continue
            rows = []
            sets = task_of(task).data(args.data, seed)
            for row in interleaved([train(task, arm, seed, args.data, sets) for arm in ARMS]):
                print({key: value for key, value in row.items() if key != "trace"}, flush=True)
                rows.append(json.dumps(row | machine()))
            with ROWS.open("a") as file:
                file.writelines(f"{row}\n" for row in rows)


if __name__ == "__main__":
    main()
