"""One training run of the evidence: a task under an arm with a seed, timed in CPU seconds of this process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rows import Row
from tasks import TASKS, EvidenceTask, Sets
from torch import nn
from torch.nn import functional as F

from icefrog.estimate.penalty import frozen_penalty
from icefrog.estimate.progress import signal_share
from icefrog.runtime import LayerElastic
from icefrog.runtime.prefix_cache import PrefixCache
from icefrog.runtime.rules import FreezingRule, Hands, Proposal, Situation
from icefrog.runtime.rules.signal import SignalMeter
from icefrog.spec import Target

SMOOTHED_OVER = 3
"""Validations whose mean is held against the target."""
CACHE_BYTES = 1e9
NEVER = 10**9
READS_STATISTICS = ("tuner", "freezeout", "pipetransformer")
"""Rules that need gradient statistics; they get them as often as is the default. For the others they are switched off."""

TRACE = ("steps", "cpu_s", "accuracy", "mean", "validation_loss", "training_loss", "frozen", "cached_steps")


class Watch(FreezingRule):
    """Freezes nothing, and notes at each interval what would be predicted for each depth."""

    def __init__(self) -> None:
        self.meter = SignalMeter()
        self.notes: list[dict[str, Any]] = []

    def observe(self, hands: Hands) -> None:
        """Measure."""
        self.meter.observe(hands)

    def propose(self, now: Situation) -> Proposal:
        """Stay."""
        signal = self.meter.progress()
        if now.gradients is not None and signal is not None:
            psi, share = frozen_penalty(now.gradients.variance)[:-1], signal_share(signal)[:-1]
            rounded = {"psi": np.round(psi, 4).tolist(), "signal_share": np.round(share, 4).tolist()}
            self.notes.append({"steps": now.step} | rounded)
        return now.stay("watching")


class Arm:
    """How a run freezes: ``control`` (the plain loop, no LayerElastic), ``fixed:K`` or ``fixed:K@I`` (K layers from the
    start, or from interval I on), ``watch-raw`` or ``watch-auto`` (nothing; notes what the statistics of plain or
    preconditioned gradients predict), or the name of a rule; ``-nocache`` behind it: without the prefix cache."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.elastic: LayerElastic | None = None
        self.cache: PrefixCache | None = None
        rule, _, _ = name.partition("-nocache")
        self._rule, _, value = rule.partition(":")
        depth, _, when = value.partition("@")
        self._depth, self._interval = int(depth or 0), int(when or 0)
        self._freezes_at = 0
        self.watch = Watch() if rule.startswith("watch-") else None

    def attach(
        self, task: EvidenceTask, model: nn.Module, optimizer: torch.optim.Optimizer, samples_per_epoch: int
    ) -> LayerElastic | None:
        """Make the model layer-elastic."""
        if self._rule == "control":
            return None
        by_hand = self._rule == "fixed"
        elastic = LayerElastic(
            model,
            optimizer,
            task.units(model),
            target=Target(metric="accuracy", value=task.target, mode="max"),
            samples_per_epoch=samples_per_epoch,
            rule=self.watch or ("none" if by_hand else self._rule),
            precondition="raw" if self.name == "watch-raw" else "auto",
            stats_every=1 if self.watch else None if self._rule in READS_STATISTICS else NEVER,
            env={},
        )
        if task.augment is None and not self.name.endswith("-nocache"):
            self.cache = elastic.cache_prefix("memory", budget_bytes=CACHE_BYTES)
        if by_hand:
            self._freezes_at = self._interval * task.interval_steps
            if self._freezes_at == 0:
                elastic.freeze(self._depth)
        self.elastic = elastic
        return elastic

    def stepped(self, steps: int) -> None:
        """After each optimizer step."""
        if self.elastic is not None and self._freezes_at and steps == self._freezes_at:
            self.elastic.freeze(self._depth)

    @property
    def from_cache(self) -> bool:
        """Whether the last step's prefix came from the cache."""
        return self.cache is not None and self.cache.hit


def batches(num_samples: int, batch: int, seed: int) -> Iterator[torch.Tensor]:
    """Indices of whole batches, pass after pass in a new order; what a pass leaves over is dropped."""
    rng = np.random.default_rng([seed, 1])
    while True:
        order = torch.from_numpy(rng.permutation(num_samples))
        yield from order[: num_samples // batch * batch].split(batch)


@torch.no_grad()
def validate(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """(accuracy, mean cross-entropy)."""
    was_training = model.training
    model.eval()
    right, loss = 0, 0.0
    for part, label in zip(x.split(100), y.split(100), strict=True):
        logits = model(part)
        right += int((logits.argmax(1) == label).sum())
        loss += float(F.cross_entropy(logits, label, reduction="sum"))
    model.train(was_training)
    return right / len(y), loss / len(y)


def run_paired(name: str, arms: Sequence[Arm], seed: int, data: Path) -> Iterator[Row]:
    """Train all arms in one process, an interval each in turn, so that a busy machine slows them alike.

    Each arm has its own model, optimizer, cache, and state of torch's generator.

    Yields:
        A row for each arm when it ends: whether and after how many CPU seconds the target was reached, and a trace with one
        entry an interval (TRACE names its columns).
    """
    sets = TASKS[name].data(data, seed)
    torch.manual_seed(seed)
    yield from interleaved([run(name, arm, seed, data, sets) for arm in arms])


def interleaved(trainings: Sequence[Iterator[Row | None]]) -> Iterator[Row]:
    """An interval (until its next None) of each in turn, each with a state of torch's generator of its own; their rows."""
    rng = [torch.get_rng_state()] * len(trainings)
    running = dict(enumerate(trainings))
    while running:
        for place, training in list(running.items()):
            torch.set_rng_state(rng[place])
            row = next(training)
            rng[place] = torch.get_rng_state()
            if row is not None:
                del running[place]
                yield row


def run(name: str, arm: Arm, seed: int, data: Path, sets: Sets) -> Iterator[Row | None]:
    """Train to the target, or to the last interval; yields None after each interval, and the row at last."""
    task = TASKS[name]
    model = task.build(data)
    optimizer = task.optimizer(model)
    one_pass = len(sets.train[0]) // task.batch * task.batch
    elastic = arm.attach(task, model, optimizer, one_pass)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / task.warmup_steps))
    order = batches(len(sets.train[0]), task.batch, seed)
    noise = torch.Generator().manual_seed(seed)
    recent: deque[float] = deque(maxlen=SMOOTHED_OVER)
    trace: list[list[float]] = []
    reasons: list[list[Any]] = []
    cached = steps = 0
    mean, trained_s, validation_s = 0.0, 0.0, 0.0
    model.train()
    most_passes = -(-task.max_intervals * task.interval_steps * task.batch // one_pass)
    for _ in elastic.epochs(most_passes) if elastic else range(task.max_intervals):
        losses, began_s = 0.0, time.process_time()
        for _ in range(task.interval_steps):
            chosen = next(order)
            x = sets.train[0][chosen]
            loss = F.cross_entropy(model(task.augment(x, noise) if task.augment else x), sets.train[1][chosen])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rates.step()
            losses += float(loss.detach())
            steps += 1
            cached += arm.from_cache
            arm.stepped(steps)
        depth = elastic.frozen_layers if elastic else 0
        trained_s += time.process_time() - began_s
        began_s = time.process_time()
        accuracy, held_out_loss = validate(model, *sets.validation)
        validation_s += time.process_time() - began_s
        began_s = time.process_time()
        recent.append(accuracy)
        mean = sum(recent) / SMOOTHED_OVER
        if elastic:
            decision = elastic.end_epoch(metric=mean)
            if not reasons or reasons[-1][1:] != [decision.frozen_layers, decision.reason]:
                reasons.append([steps, decision.frozen_layers, decision.reason])
        trained_s += time.process_time() - began_s
        row = [steps, trained_s, accuracy, mean, held_out_loss, losses / task.interval_steps, depth, cached]
        trace.append([round(float(value), 4) for value in row])
        if mean >= task.target - 1e-9 or len(trace) == task.max_intervals:
            break
        yield None
    if elastic:
        elastic.close()
    yield {
        "task": name,
        "arm": arm.name,
        "seed": seed,
        "target": task.target,
        "reached": mean >= task.target - 1e-9,
        "cpu_s": trace[-1][1],
        "steps": steps,
        "samples": steps * task.batch,
        "accuracy": trace[-1][2],
        "frozen_steps": round(sum(row[6] > 0 for row in trace) * task.interval_steps),
        "cached_steps": cached,
        "validation_s": round(validation_s, 3),
        "trace": trace,
        "reasons": reasons,
    } | ({"predicted": arm.watch.notes} if arm.watch else {})
