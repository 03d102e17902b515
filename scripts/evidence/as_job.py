"""A task of the evidence as a job of a scheduler: ``as_job.py TASK --data DIR --seed N``; its grant names the rule.

Prints the CPU seconds of training, decisions included and validation left out, as the examples do.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from running import CACHE_BYTES, Arm, run
from tasks import TASKS, EvidenceTask
from torch import nn

from icefrog.runtime import LayerElastic


class Scheduled(Arm):
    """Everything as it is granted."""

    def __init__(self) -> None:
        super().__init__("scheduled")

    def attach(
        self, task: EvidenceTask, model: nn.Module, optimizer: torch.optim.Optimizer, samples_per_epoch: int
    ) -> LayerElastic:
        """The three lines."""
        self.elastic = LayerElastic(model, optimizer, task.units(model), samples_per_epoch=samples_per_epoch)
        if task.augment is None:
            self.cache = self.elastic.cache_prefix("memory", budget_bytes=CACHE_BYTES)
        return self.elastic


def main() -> None:
    """One run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, help="of the job file; the task's own number of intervals holds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    arm = Scheduled()
    (row,) = (
        row for row in run(args.task, arm, args.seed, args.data, TASKS[args.task].data(args.data, args.seed)) if row
    )
    print(f"{row['steps']} steps ({row['cpu_s']:.1f} s CPU)  accuracy {row['accuracy']:.4f}", flush=True)
    assert arm.elastic is not None
    arm.elastic.finish()


if __name__ == "__main__":
    main()
