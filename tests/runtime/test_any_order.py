"""Property: a job of any make that freezes, opens, dies at any line of its loop and resumes is the one that never died.

Each seed draws a job: a model (normalisation, dropout, tied weights, a shared module, parameters frozen beforehand), an
optimizer, an LR scheduler, accumulation, mixed precision, clipping, an average of weights, and a boundary that moves as a
plan says. It runs once undisturbed, and once dying at random places of its loop; weights, optimizer, scheduler, average,
statistics and counters must be equal to the bit.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from icefrog.runtime import LayerElastic

EPOCHS, SAMPLES, BATCH = 4, 52, 12  # the last two batches of an epoch are smaller
PLACES = ("loaded", "forward", "backward", "stepped", "scheduled", "validated", "closed")


class Died(Exception):
    """In place of SIGKILL."""


class Shared(nn.Module):
    """A block that runs twice, an activation that all share, and a loose parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.first, self.twice, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(torch.relu(self.first(x * self.scale)))
        x = self.drop(torch.relu(self.twice(x)))
        x = self.twice(torch.relu(self.last(x)))
        return self.head(self.drop(x))


class TiedClasses(models.Tied):
    """Of sequences of six tokens, three classes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x.abs() * 3).long().clamp(max=10)).mean(1)[:, :3]


def partly_frozen() -> nn.Module:
    model = models.bn_net()
    model[0][0].weight.requires_grad_(False)
    model[1][1].requires_grad_(False)
    return model


MODELS: tuple[Callable[[], nn.Module], ...] = (models.bn_net, TiedClasses, Shared, partly_frozen)
OPTIMIZERS: tuple[Callable[..., torch.optim.Optimizer], ...] = (
    lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    lambda p: torch.optim.Adagrad(p, lr=0.05),
    lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    lambda p: torch.optim.Adamax(p, lr=0.01),
    lambda p: torch.optim.Adafactor(p, lr=0.05),
    lambda p: torch.optim.NAdam([{"params": [q], "lr": 0.01 + 0.001 * i} for i, q in enumerate(p)]),
)
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda o: None,
    "step": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "numpy": lambda o: lr_scheduler.LambdaLR(o, lambda step: np.cos(0.05 * step)),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "epoch": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 1), lr_scheduler.ExponentialLR(o, 0.9)], [1]
    ),
}


class Job:
    """What a seed draws."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.model = MODELS[rng.integers(len(MODELS))]
        self.optimizer = OPTIMIZERS[rng.integers(len(OPTIMIZERS))]
        self.schedule = list(SCHEDULERS)[rng.integers(len(SCHEDULERS))]
        self.accum = int(rng.choice([1, 1, 2, 3]))
        self.bfloat16 = bool(rng.random() < 0.25)
        self.scaled = bool(rng.random() < 0.25)
        self.max_grad_norm = 0.5 if rng.random() < 0.4 else None
        self.average = bool(rng.random() < 0.5)
        self.zero_first = bool(rng.random() < 0.5)
        self.set_to_none = bool(rng.random() < 0.7)
        self.stats_every = int(rng.choice([1, 2, 3]))
        self.save_every = int(rng.choice([1, 2, 5]))
        moves = rng.choice(20, 6, replace=False)
        self.plan = {int(step): int(rng.integers(4)) for step in moves}
        self.deaths = [(int(rng.integers(1, 24)), str(rng.choice(PLACES))) for _ in range(4)]

    def run(self, folder: Path, deaths: list[tuple[int, str]]) -> dict[str, Any]:
        """The end of the job; each death comes once."""
        left = list(deaths)
        while True:
            with contextlib.suppress(Died):
                return self.live(folder, left)

    def live(self, folder: Path, deaths: list[tuple[int, str]]) -> dict[str, Any]:
        torch.manual_seed(3)
        model = self.model()
        optimizer = self.optimizer(list(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3) if self.scaled else None
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        elastic = self.make_elastic(
            model,
            optimizer,
            checkpoint_dir=folder,
            checkpoint_every_steps=self.save_every,
            accum_steps=self.accum,
            stats_every=self.stats_every,
            max_grad_norm=self.max_grad_norm,
            grad_scaler=scaler,
        )
        schedule = SCHEDULERS[self.schedule](optimizer)
        if schedule is not None:
            elastic.register("schedule", schedule)
        if self.average:
            elastic.register("average", average)
        try:
            self.loop(elastic, optimizer, schedule, average, scaler, deaths)
            state = elastic.state_dict()
        finally:
            elastic.close()
        kept = ("model", "optimizer", "registered", "frozen_layers", "psi", "tracker", "statistics", "counters", "rng")
        rules = {"rules": state["decider"]["rules"], "rule_tensors": state["rule_tensors"]}
        return {**{key: state[key] for key in kept}, **rules}

    def make_elastic(self, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> LayerElastic:
        """For jobs of more kinds."""
        return LayerElastic(model, optimizer, rule="none", env={}, **options)

    def loop(self, elastic: Any, optimizer: Any, schedule: Any, average: Any, scaler: Any, deaths: list[Any]) -> None:
        def die(place: str) -> None:
            if (elastic._at.step, place) in deaths:
                deaths.remove((elastic._at.step, place))
                raise Died

        x, y = models.data(SAMPLES)
        data = TensorDataset(x, y)
        sampler = elastic.sampler(SAMPLES, global_batch=BATCH, seed=1)
        loader = DataLoader(data, batch_sampler=sampler, generator=torch.Generator())
        for _ in elastic.epochs(EPOCHS):
            elastic.model.train()
            for inputs, labels in loader:
                die("loaded")
                if elastic._at.step in self.plan:
                    elastic.freeze(self.plan[elastic._at.step])
                if self.zero_first:
                    optimizer.zero_grad(set_to_none=self.set_to_none)
                with torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16):
                    loss = nn.functional.cross_entropy(elastic.model(inputs), labels)
                die("forward")
                (scaler.scale(loss) if scaler else loss).backward()
                die("backward")
                if scaler:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
                die("stepped")
                if not self.zero_first:
                    optimizer.zero_grad(set_to_none=self.set_to_none)
                if elastic.stepped:
                    average.update_parameters(elastic.model)
                    if self.schedule in ("step", "numpy"):
                        schedule.step()
                die("scheduled")
            elastic.model.eval()
            with torch.no_grad():
                loss = float(nn.functional.cross_entropy(elastic.model(x), y))
            die("validated")
            if self.schedule in ("plateau", "epoch"):
                schedule.step(*([loss] if self.schedule == "plateau" else []))
            elastic.end_epoch(metric=loss)
            die("closed")


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() | other.keys():
            yield from differences(one.get(key), other.get(key), f"{where}/{key}")
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        for place, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{where}/{place}")
    elif isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or one.numpy().tobytes() != other.numpy().tobytes():
            yield where
    elif isinstance(one, np.ndarray):
        yield from differences(one.tolist(), other.tolist(), where)
    elif type(one) is not type(other) or not (one == other or (one != one and other != other)):
        yield f"{where}: {one!r} {other!r}"


def check(seed: int, folder: Path) -> None:
    job = Job(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        undisturbed = copy.deepcopy(job.run(folder / "undisturbed", []))
        died = job.run(folder / "died", job.deaths)
    assert list(differences(undisturbed, died)) == [], (seed, vars(job))


@pytest.mark.parametrize("seed", range(3))
def test_a_job_that_dies_is_the_one_that_never_did(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 60))
def test_more_jobs(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)
