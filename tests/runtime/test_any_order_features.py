"""Property: the same of jobs that keep their prefix's outputs, are compiled, or are frozen by a rule that has a memory.

A job runs three times: plainly; with the cache and compiled, as its seed draws; and so again, dying at random places of its
loop. All must be equal to the bit. (Rows that the cache computes in a
smaller batch are equal to rounding only, by intention; that is switched off here.)
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_any_order import MODELS, Job, differences
from test_prefix_cache_networks import InPlace, TwiceBetween
from torch import nn

from icefrog.runtime import LayerElastic
from icefrog.runtime.prefix_cache import PrefixCache
from icefrog.runtime.rules import FreezeOut, FreezingRule, Proposal, Situation
from icefrog.runtime.rules.base import Hands


class Wander(FreezingRule):
    """Goes where its memory sends it: a count, and a sum of gradients."""

    def __init__(self, seed: int, forgets: bool) -> None:
        self.seed, self.forgets, self.asked = seed, forgets, 0
        self.sum = torch.zeros(1)

    def propose(self, now: Situation) -> Proposal:
        self.asked += 1
        bits = int(self.sum.view(torch.int32)) % 1000
        drawn = int(np.random.default_rng([self.seed, self.asked, bits]).integers(now.num_layers))
        depth = now.bounds.clamp(drawn)
        return Proposal(depth, f"drawn, {self.asked}", worth=0.7 if depth else None, forget_momentum=self.forgets)

    def observe(self, hands: Hands) -> None:
        grad = list(hands.layers[-1].params.values())[-1].grad
        if grad is not None:
            self.sum += grad.abs().sum()

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.asked = state["asked"]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"sum": self.sum}

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        self.sum = tensors["sum"].clone()


class Featured(Job):
    """What a seed draws besides."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        rng = np.random.default_rng([seed, 1])
        kinds = (*MODELS, lambda: InPlace(lambda x: nn.functional.leaky_relu(x, 0.2, inplace=True)), TwiceBetween)
        self.model = kinds[rng.integers(len(kinds))]
        self.rule = str(rng.choice(["none", "wander", "freezeout", "egeria"]))
        self.forgets = bool(rng.random() < 0.5)
        self.tune_every_steps = int(rng.choice([3, 4, 7]))
        self.cache = rng.choice(["memory", "disk", ""])
        self.budget_bytes = float(rng.choice([2e9, 600.0]))
        self.compiled = bool(self.cache == "" and rng.random() < 0.7)  # the cache stays off in a compiled model
        if self.rule != "none":
            self.plan = {}
        self.featured = False

    def make_elastic(self, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> LayerElastic:
        rules: dict[str, Any] = {"wander": Wander(len(self.plan), self.forgets), "freezeout": FreezeOut(t_0=0.3)}
        if self.featured and self.compiled:
            torch.compiler.reset()
            model = torch.compile(model, backend="eager")  # type: ignore[assignment]
        elastic = LayerElastic(
            model,
            optimizer,
            rule=rules.get(self.rule, self.rule),
            env={},
            tune_every_steps=self.tune_every_steps,
            **options,
        )
        if self.featured and self.cache:
            elastic.cache_prefix(self.cache, budget_bytes=self.budget_bytes)  # type: ignore[arg-type]
        return elastic


def three_ways(job: Featured, folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What is left of it plain, with its features, and with these and its deaths."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = copy.deepcopy(job.run(folder / "plain", []))
        job.featured = True
        featured = copy.deepcopy(job.run(folder / "featured", []))
        return plain, featured, job.run(folder / "died", job.deaths)


def check(seed: int, folder: Path) -> None:
    job = Featured(seed)
    plain, featured, died = three_ways(job, folder)
    assert list(differences(plain, featured)) == [], (seed, vars(job))
    assert list(differences(featured, died)) == [], (seed, vars(job))


@pytest.fixture(autouse=True)
def _whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "_fill", lambda *_: False)


@pytest.mark.parametrize("seed", [3])
def test_a_job_with_features_that_dies_is_the_plain_one_that_never_did(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 40))
def test_more_jobs_with_features(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)
