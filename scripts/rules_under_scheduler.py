"""Jobs of the local executor under `icefrog`, the same job by two rules side by side: which reaches its target sooner?

    python scripts/rules_under_scheduler.py run --out runs/rules --data DIR [--tasks cnn] [--seeds 1-3] [--rules tuner,none]
    python scripts/rules_under_scheduler.py report --out runs/rules

A run is one home with two slots and one job a rule, each on a slot of its own from start to end; what others do on the
machine meets both alike. Times are CPU seconds of the job's process in its training loop, decisions included; those of the
digits with validation. A home that is finished is passed over.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from icefrog.events import JobFinished, ProgressReported
from icefrog.home import Home
from icefrog.live import submit_all, up
from icefrog.spec import JobSpec

ROOT = Path(__file__).resolve().parent.parent

# script, options, batch, accuracy wanted, largest number of epochs. The demo's jobs; one that is fine-tuned on as many
# images as it had learnt from before; two of the evidence: fine-tuned, and from scratch on images that are not augmented.
TASKS = {
    "cnn": ("examples/digits_cnn.py", "", 64, 0.97, 40),
    "transformer": ("examples/digits_transformer.py", "", 64, 0.95, 40),
    "cnn-wide": ("examples/digits_cnn.py", "--width 32", 64, 0.97, 40),
    "digits-transfer": ("scripts/finetuned_digits.py", "", 64, 0.95, 40),
    "minilm-lists": ("scripts/evidence/as_job.py", "minilm-lists --data {data}", 16, 0.83, 8),
    "resnet-mnist": ("scripts/evidence/as_job.py", "resnet-mnist --data {data}", 32, 0.965, 25),
}
_CPU = re.compile(r"\(\s*([0-9.]+) s CPU\)")


def job(task: str, seed: int, rule: str, data: Path) -> JobSpec:
    """One job of the table above."""
    script, options, batch, target, epochs = TASKS[task]
    words = [word.format(data=data) for word in options.split()]
    fields: dict[str, Any] = {
        "name": f"{task}-{seed}-{rule}",
        "command": ["python", script, "--epochs", "{max_epochs}", "--seed", str(seed), *words],
        "gpus": (1,),
        "batch": {"global": batch},
        "target": {"value": target},
        "max_epochs": epochs,
        "share": False,
        "freeze": {"rule": rule},
    }
    return JobSpec.model_validate(fields)


@dataclass(frozen=True)
class Found:
    """How one job went."""

    task: str
    seed: int
    rule: str
    reached: bool
    cpu_s: float
    epochs: int
    metric: float
    depths: tuple[int, ...]  # in force one after the other

    def row(self) -> str:
        """For the page."""
        missed = "" if self.reached else " (missed)"
        depths = " ".join(map(str, self.depths))
        cells = (
            self.task,
            self.rule,
            self.seed,
            f"{self.cpu_s:.1f}{missed}",
            self.epochs,
            f"{self.metric:.3f}",
            depths,
        )
        return f"| {' | '.join(map(str, cells))} |"


def read(home: Home) -> Iterator[Found]:
    """The jobs of a finished home."""
    with home.open_log() as log:
        records = list(log.read_all())
    for end in (one for one in records if isinstance(one, JobFinished)):
        reports = [one for one in records if isinstance(one, ProgressReported) and one.job_id == end.job_id]
        depths = [report.frozen_layers for report in reports]
        changes = tuple(depth for place, depth in enumerate(depths) if place == 0 or depth != depths[place - 1])
        words = (home.jobs_dir / end.job_id / f"attempt-{end.attempt}" / "log").read_text()
        task, seed, rule = end.job_id.rsplit("-", 2)
        yield Found(
            task=task,
            seed=int(seed),
            rule=rule,
            reached=end.outcome == "completed",
            cpu_s=float(_CPU.findall(words)[-1]),
            epochs=reports[-1].epoch,
            metric=end.metric if end.metric is not None else math.nan,
            depths=changes,
        )


def finished(home: Home, jobs: int) -> bool:
    """Whether that many jobs of it came to their end."""
    if not home.db.exists():
        return False
    with home.open_log() as log:
        return sum(isinstance(one, JobFinished) for one in log.read_all()) == jobs


def run(out: Path, tasks: list[str], seeds: list[int], rules: list[str], data: Path) -> None:
    """What is missing; seeds outside, so that a broken-off series has all tasks."""
    for seed in seeds:
        for task in tasks:
            home = Home(out.absolute() / f"{task}-{seed}")
            if finished(home, len(rules)):
                continue
            submit_all(home, [job(task, seed, rule, data) for rule in rules], cwd=ROOT)
            if up(home, policy="icefrog", slots=len(rules), until_idle=True).why == "signal":
                raise SystemExit(130)
            for found in read(home):
                print(found.row(), flush=True)


def report(out: Path) -> None:
    """The table of ratios, and every run."""
    found = [one for path in sorted(out.iterdir()) if Home(path).db.exists() for one in read(Home(path))]
    rules = sorted({one.rule for one in found})
    print(f"| task | seeds | {rules[0]}: CPU s over {rules[1]}'s | each | reached |\n|---|---|---|---|---|")
    for task in TASKS:
        pairs = [
            (first, second)
            for first in found
            for second in found
            if (first.task, first.rule, second.rule) == (task, rules[0], rules[1])
            and (second.task, second.seed) == (task, first.seed)
        ]
        if not pairs:
            continue
        ratios = [first.cpu_s / second.cpu_s for first, second in pairs]
        mean = float(np.exp(np.mean(np.log(ratios))))
        reached = [sum(one.reached for one in column) for column in zip(*pairs, strict=True)]
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"| {task} | {len(pairs)} | {mean:.2f} | {each} | {reached[0]} and {reached[1]} of {len(pairs)} |")
    print("\n| task | rule | seed | CPU s | epochs | last accuracy | depths |\n|---|---|---|---|---|---|---|")
    for one in sorted(found, key=lambda one: (one.task, one.rule, one.seed)):
        print(one.row())


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "report"])
    parser.add_argument("--out", type=Path, required=True, help="a folder; each run gets a home in it")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seeds", default="1-3", help="from-to")
    parser.add_argument("--rules", default="tuner,progress", help="of job files; the first is compared with the second")
    parser.add_argument("--data", type=Path, default=Path("data"), help="for tasks of the evidence, see there")
    args = parser.parse_args()
    if args.what == "report":
        report(args.out)
        return
    first, _, last = args.seeds.partition("-")
    seeds = list(range(int(first), int(last or first) + 1))
    run(args.out, args.tasks.split(","), seeds, args.rules.split(","), args.data.absolute())


if __name__ == "__main__":
    main()
