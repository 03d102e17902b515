"""The three estimators in the running loop against per-sample gradients, within their own confidence intervals.

With a learning rate of 0 every step estimates the same two numbers a layer: S, the trace of the covariance of one sample's
gradient, and |G|^2. The mean over steps must lie within four standard errors of the brute force; the standard error comes
from the estimates themselves, so a biased estimator fails however noisy it is, given enough steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset
from two_ranks import Ranks

from icefrog.runtime import LayerElastic

POPULATION = 48


class Images(nn.Module):
    """Convolutions and a head, without batch normalisation: a sample's gradient does not depend on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh()),
            nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Tanh()),
            nn.Flatten(),
            nn.Linear(16, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + self.out((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v)


class Words(nn.Module):
    """A transformer with loose position weights and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(0.1 * torch.randn(5, 8))
        self.embedding = nn.Embedding(9, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) + self.position
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).mean(-2)


def problem(kind: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    if kind == "images":
        return Images(), torch.randn(POPULATION, 1, 6, 6), torch.arange(POPULATION) % 3
    return Words(), torch.randint(0, 9, (POPULATION, 5)), torch.arange(POPULATION) % 9


@dataclass
class Truth:
    """By layer, shape (L,): trace of the population covariance of one sample's gradient, and |mean gradient|^2."""

    variance: np.ndarray
    sqr_norm: np.ndarray


def brute_force(model: nn.Module, layers: Any, x: torch.Tensor, y: torch.Tensor, scale: dict[str, Any]) -> Truth:
    """From every sample's own gradient; ``scale`` is what each parameter's gradient is divided by."""

    def loss(params: dict[str, torch.Tensor], sample: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(functional_call(model, params, (sample.unsqueeze(0),)), label.unsqueeze(0))

    params = {name: param.detach() for name, param in model.named_parameters()}
    grads = vmap(grad(loss), in_dims=(None, 0, 0))(params, x, y)
    variance, sqr_norm = [], []
    for layer in layers:
        rows = torch.cat([(grads[n] / scale.get(n, 1.0)).flatten(1).double() for n in layer.params], dim=1)
        variance.append(float(rows.var(0, unbiased=False).sum()))
        sqr_norm.append(float(rows.mean(0).square().sum()))
    return Truth(np.array(variance), np.array(sqr_norm))


class Recorder:
    """Every step's estimates, as they come to the tracker."""

    def __init__(self, elastic: LayerElastic) -> None:
        self.variance: list[np.ndarray] = []
        self.sqr_norm: list[np.ndarray] = []
        original = elastic._engine.tracker.observe

        def observe(variance: Any, sqr_norm: Any, every: int = 1) -> bool:
            self.variance.append(np.array(variance))
            self.sqr_norm.append(np.array(sqr_norm))
            return original(variance, sqr_norm, every)

        elastic._engine.tracker.observe = observe  # type: ignore[method-assign]

    def rows(self) -> np.ndarray:
        """Shape (2, steps, L)."""
        return np.array([self.variance, self.sqr_norm])

    @classmethod
    def of(cls, rows: np.ndarray) -> Recorder:
        recorder = cls.__new__(cls)
        recorder.variance, recorder.sqr_norm = list(rows[0]), list(rows[1])
        return recorder


def agree(estimates: list[np.ndarray], truth: np.ndarray, factor: float = 1.0) -> bool:
    """Whether the mean over independent steps, times ``factor``, is within four standard errors of the truth."""
    rows = factor * np.array(estimates)
    error = rows.std(0, ddof=1) / np.sqrt(len(rows))
    return bool(np.all(np.abs(rows.mean(0) - truth) <= 4.0 * error))


def check(recorder: Recorder, truth: Truth, wrong_factors: tuple[float, ...], independent: int = 1) -> None:
    """Both estimates agree; wrong factors are caught, in every layer on its own."""
    variance, sqr_norm = recorder.variance[::independent], recorder.sqr_norm[::independent]
    assert agree(variance, truth.variance)
    assert agree(sqr_norm, truth.sqr_norm)
    for factor in wrong_factors:
        for layer in range(len(truth.variance)):
            assert not agree([row[layer] for row in variance], truth.variance[layer], factor)


def fixed_scale(model: nn.Module, preconditioned: bool) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    """An optimizer that moves nothing; preconditioned: with second moments that stay as they are given here."""
    if not preconditioned:
        return torch.optim.SGD(model.parameters(), lr=0.0), {}
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.0, alpha=1.0)  # v = 1 v + 0 g^2
    model.zero_grad()
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    model.zero_grad()
    scale = {}
    for name, param in model.named_parameters():
        moment = torch.rand_like(param) + 0.05
        optimizer.state[param]["square_avg"].copy_(moment)
        scale[name] = moment.sqrt() + 1e-8
    return optimizer, scale


def single(kind: str, preconditioned: bool, steps: int, parts: list[int]) -> tuple[Recorder, Truth]:
    """One process; each optimizer step takes micro-batches of these sizes, drawn with replacement."""
    model, x, y = problem(kind)
    optimizer, scale = fixed_scale(model, preconditioned)
    elastic = LayerElastic(model, optimizer, rule="none", accum_steps=len(parts), stats_every=1, env={})
    recorder = Recorder(elastic)
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        for size in parts:
            pick = torch.randint(0, POPULATION, (size,), generator=generator)
            nn.functional.cross_entropy(elastic.model(x[pick]), y[pick]).backward()
            optimizer.step()
            optimizer.zero_grad()
    elastic.close()
    return recorder, brute_force(model, elastic.layers, x, y, scale)


@pytest.mark.parametrize(
    ("kind", "preconditioned", "parts"),
    [
        ("images", False, [4, 4, 4, 4]),
        pytest.param("words", True, [4, 4, 4, 4], marks=pytest.mark.slow),
        ("images", True, [6, 6, 2]),
        pytest.param("words", False, [2, 5, 7], marks=pytest.mark.slow),
    ],
)
def test_micro_batches(kind: str, preconditioned: bool, parts: list[int]) -> None:
    recorder, truth = single(kind, preconditioned, 150, parts)
    assert len(recorder.variance) == 150
    check(recorder, truth, (len(parts) - 1, 1 / (len(parts) - 1), sum(parts), 1 / sum(parts)))


@pytest.mark.parametrize(
    ("kind", "preconditioned"), [("images", True), pytest.param("words", False, marks=pytest.mark.slow)]
)
def test_successive_steps(kind: str, preconditioned: bool) -> None:
    recorder, truth = single(kind, preconditioned, 401, [8])
    assert len(recorder.variance) == 400
    check(recorder, truth, (2.0, 0.5, 8.0, 1 / 8.0), independent=2)  # neighbours have a gradient in common


def replicas(kind: str, preconditioned: bool, accum: int) -> dict[str, Any]:
    """Two ranks; a sampler deals 13 of 48 samples to a step, and 9 at the end: unequal parts, without replacement."""
    model, x, y = problem(kind)
    optimizer, scale = fixed_scale(model, preconditioned)
    elastic = LayerElastic(model, optimizer, rule="none", accum_steps=accum, stats_every=1)
    recorder = Recorder(elastic)
    loader = DataLoader(TensorDataset(x, y), batch_sampler=elastic.sampler(POPULATION, global_batch=13))
    for epoch in elastic.epochs(1000):
        for part, label in loader:
            nn.functional.cross_entropy(elastic.model(part), label).backward()
            optimizer.step()
            optimizer.zero_grad()
        elastic.end_epoch()
        if epoch == 24:
            break
    elastic.close()
    return {"estimates": recorder.rows(), "truth": brute_force(model, elastic.layers, x, y, scale)}


@pytest.mark.parametrize(
    ("kind", "preconditioned", "accum"), [("images", False, 1), pytest.param("words", True, 2, marks=pytest.mark.slow)]
)
def test_replicas(ranks: Ranks, kind: str, preconditioned: bool, accum: int) -> None:
    first, second = ranks.run(replicas, kind, preconditioned, accum)
    assert np.array_equal(first["estimates"], second["estimates"])
    truth = first["truth"]
    # Different samples of a finite population are negatively correlated: Cov = -Sigma / (N - 1).
    finite = Truth(truth.variance * POPULATION / (POPULATION - 1), truth.sqr_norm - truth.variance / (POPULATION - 1))
    check(Recorder.of(first["estimates"]), finite, (2.0, 0.5, 13.0, 1 / 13.0))


def accumulation_of_the_users_own() -> dict[str, Any]:
    """Three backward passes of a third of the loss each, then one step."""
    model, x, y = problem("images")
    optimizer, scale = fixed_scale(model, True)
    elastic = LayerElastic(model, optimizer, rule="none", stats_every=1)
    recorder = Recorder(elastic)
    generator = torch.Generator().manual_seed(elastic.rank)
    for _ in range(60):
        for _ in range(3):
            pick = torch.randint(0, POPULATION, (4,), generator=generator)
            (nn.functional.cross_entropy(elastic.model(x[pick]), y[pick]) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    elastic.close()
    return {"estimates": recorder.rows(), "truth": brute_force(model, elastic.layers, x, y, scale)}


def test_replicas_under_accumulation_of_the_users_own(ranks: Ranks) -> None:
    found, _ = ranks.run(accumulation_of_the_users_own)
    check(Recorder.of(found["estimates"]), found["truth"], (3.0, 1 / 3.0, 24.0))


@pytest.mark.parametrize(("lr", "biased"), [(1e-4, False), (0.5, True)])
def test_successive_steps_are_biased_up_by_drift_alone(lr: float, biased: bool) -> None:
    """A large batch, so that the noise is small beside what a large step does to the mean gradient."""
    model, x, y = problem("images")
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    elastic = LayerElastic(model, optimizer, rule="none", stats_every=1, env={})
    recorder = Recorder(elastic)
    generator = torch.Generator().manual_seed(5)
    truths = []
    for _ in range(121):
        truths.append(brute_force(model, elastic.layers, x, y, {}).variance)
        pick = torch.randint(0, POPULATION, (96,), generator=generator)
        nn.functional.cross_entropy(elastic.model(x[pick]), y[pick]).backward()
        optimizer.step()
        optimizer.zero_grad()
    elastic.close()
    excess = np.array(recorder.variance)[::2] - np.array(truths[1:])[::2]  # the parameters, and so the truth, move
    error = excess.std(0, ddof=1) / np.sqrt(len(excess))
    assert bool(np.all(excess.mean(0) > 2.5 * error)) is biased
    assert bool(np.all(np.abs(excess.mean(0)) < 4.0 * error)) is not biased
