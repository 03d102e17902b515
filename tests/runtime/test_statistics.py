"""The estimators fed by training itself, against per-sample brute force; in the limits where both must agree."""

from __future__ import annotations

import models
import numpy as np
import pytest
import torch
from torch import nn

from icefrog.runtime import LayerElastic


def brute_force(model: nn.Module, layers, x, y, scale=None):  # type: ignore[no-untyped-def]
    """Per layer: tr Cov of one sample's gradient (population) and |mean gradient|^2, from one backward per sample."""
    rows = []
    for sample in range(len(x)):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[sample : sample + 1]), y[sample : sample + 1]).backward()
        rows.append([torch.cat([p.grad.reshape(-1) for p in layer.params.values()]) for layer in layers])
    model.zero_grad()
    variance, signal = [], []
    for index in range(len(layers)):
        grads = torch.stack([row[index] for row in rows]).double()
        if scale is not None:
            grads = grads / scale[index]
        variance.append(float(grads.var(0, unbiased=False).sum()))
        signal.append(float(grads.mean(0).square().sum()))
    return np.array(variance), np.array(signal)


class Recorder:
    def __init__(self, elastic: LayerElastic) -> None:
        self.variance: list[np.ndarray] = []
        self.signal: list[np.ndarray] = []
        tracker = elastic._engine.tracker
        original = tracker.observe

        def observe(variance, sqr_norm, every=1):  # type: ignore[no-untyped-def]
            self.variance.append(np.array(variance))
            self.signal.append(np.array(sqr_norm))
            return original(variance, sqr_norm, every)

        tracker.observe = observe  # type: ignore[method-assign]


def run(accum: int, steps: int, batch: int, kind: str = "sgd", scale_loss: float = 1.0):  # type: ignore[no-untyped-def]
    model = models.mlp()
    x, y = models.data(128)
    if kind == "sgd":  # lr 0: the true gradient distribution stays what brute force measures
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9, 0.9999))
    elastic = LayerElastic(model, optimizer, rule="none", accum_steps=accum, stats_every=1, env={})
    recorder = Recorder(elastic)
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps * accum):
        pick = torch.randint(0, len(x), (batch,), generator=generator)
        (scale_loss * nn.functional.cross_entropy(model(x[pick]), y[pick])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return elastic, recorder, model, (x, y), optimizer


@pytest.mark.parametrize("accum", [1, 4])
def test_mean_over_steps_agrees_with_per_sample_brute_force(accum: int) -> None:
    elastic, recorder, model, (x, y), _ = run(accum, steps=400 // accum, batch=8)
    elastic.close()
    variance, signal = brute_force(model, elastic.layers, x, y)
    assert len(recorder.variance) == (399 if accum == 1 else 100)
    assert np.mean(recorder.variance, axis=0) == pytest.approx(variance, rel=0.15)
    assert np.mean(recorder.signal, axis=0) == pytest.approx(signal, abs=0.02 * variance.max())


def test_adam_measures_the_preconditioned_gradient() -> None:
    elastic, recorder, model, (x, y), optimizer = run(1, steps=400, batch=8, kind="adam")
    elastic.close()
    scale = []
    for layer in elastic.layers:
        parts = []
        for param in layer.params.values():
            state = optimizer.state[param]
            parts.append((state["exp_avg_sq"] / (1 - 0.9999 ** float(state["step"]))).sqrt().reshape(-1) + 1e-8)
        scale.append(torch.cat(parts).double())
    variance, _ = brute_force(model, elastic.layers, x, y, scale)
    assert np.mean(recorder.variance[100:], axis=0) == pytest.approx(variance, rel=0.2)


def test_scaling_a_layer_changes_the_raw_but_not_the_preconditioned_share() -> None:
    """Why it is the default under Adam: (10 w) h(0.1 x) is the same function with 100 times the raw variance."""

    class Scaled(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Linear(6, 6)
            self.last = nn.Linear(6, 3)
            self.factor = factor
            with torch.no_grad():
                self.first.weight.mul_(factor)
                self.first.bias.mul_(factor)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh(self.first(x) / self.factor))

    def shares(factor: float, precondition: str) -> np.ndarray:
        model = Scaled(factor)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.0, eps=1e-12)
        elastic = LayerElastic(model, optimizer, rule="none", precondition=precondition, env={})  # type: ignore[arg-type]
        models.train(elastic, optimizer, 40)
        variance = elastic._engine.tracker.variance
        elastic.close()
        return variance / variance.sum()

    assert shares(10.0, "auto") == pytest.approx(shares(1.0, "auto"), rel=1e-3)
    raw = shares(10.0, "raw")[0] / shares(10.0, "raw")[1] / (shares(1.0, "raw")[0] / shares(1.0, "raw")[1])
    assert raw == pytest.approx(0.01, rel=1e-2)


def test_an_element_without_history_does_not_drown_the_others() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    elastic = LayerElastic(model, optimizer, rule="none", env={})
    x, y = models.data()
    x[:, 0] = 0.0  # the first input is dead for a while
    for step in range(30):
        if step == 20:
            x[:, 0] = 1.0
        at = step % 4 * 16
        nn.functional.cross_entropy(model(x[at : at + 16]), y[at : at + 16]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(elastic._engine.tracker.variance.max()) < 1e6  # 1e14 without the bound


def test_rows_that_only_one_micro_batch_uses_have_a_variance() -> None:
    """Rare words: ratios cut off for each micro-batch and for their mean gave such a layer a negative variance, so 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4000, 8), nn.Flatten(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    elastic = LayerElastic(model, optimizer, rule="none", accum_steps=2, stats_every=1, env={})
    words, y = torch.randperm(4000).reshape(-1, 2), torch.arange(2000) % 3  # each word is used once in 125 steps
    for step in range(500):
        at = step * 16 % 2000
        for part in (slice(at, at + 8), slice(at + 8, at + 16)):
            nn.functional.cross_entropy(model(words[part]), y[part]).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step == 124:
            assert elastic._engine.tracker.variance[0] == 0.0  # no row has a history yet
    variance = elastic._engine.tracker.variance
    elastic.close()
    # E[g^2 / v] is near 1 for rare and frequent elements alike, and it is noise: 16 tr Cov is 16 to an element.
    assert variance[0] == pytest.approx(16 * 4000 * 8, rel=0.3)
    assert variance[1] == pytest.approx(16 * 51, rel=0.3)


def test_clipping_does_not_change_what_is_measured() -> None:
    def variance(clip: bool) -> np.ndarray:
        model = models.mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        elastic = LayerElastic(model, optimizer, rule="none", env={})
        x, y = models.data()
        for step in range(12):
            at = step % 4 * 16
            nn.functional.cross_entropy(model(x[at : at + 16]), y[at : at + 16]).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
        elastic.close()
        return elastic._engine.tracker.variance

    plain = variance(False)
    assert plain.min() > 0
    assert variance(True) == pytest.approx(plain, rel=1e-6)


def test_no_extra_forward_or_backward_pass() -> None:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = LayerElastic(model, optimizer, env={})
    passes = {"forward": 0, "backward": 0}
    model[1].register_forward_hook(lambda *_: passes.__setitem__("forward", passes["forward"] + 1))
    model[1].register_full_backward_hook(lambda *_: passes.__setitem__("backward", passes["backward"] + 1))
    models.train(elastic, optimizer, 25)
    elastic.end_epoch()
    assert passes == {"forward": 25, "backward": 25}


def test_stats_every_measures_each_nth_step() -> None:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = LayerElastic(model, optimizer, stats_every=5, env={})
    recorder = Recorder(elastic)
    models.train(elastic, optimizer, 25)
    assert len(recorder.variance) == 5


def test_by_default_a_job_is_ready_soon_and_then_measures_each_tenth_step() -> None:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = LayerElastic(model, optimizer, rule="tuner", env={})
    recorder = Recorder(elastic)
    models.train(elastic, optimizer, 21)
    assert len(recorder.variance) == 20
    assert elastic._engine.tracker.ready
    models.train(elastic, optimizer, 29)
    assert len(recorder.variance) == 23


def test_accumulation_with_unequal_micro_batches_is_the_gradient_of_the_whole_batch() -> None:
    from torch.utils.data import DataLoader, TensorDataset

    results = []
    for accum in (1, 3):
        model = models.mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        elastic = LayerElastic(model, optimizer, rule="none", accum_steps=accum, env={})
        dataset = TensorDataset(*models.data(50))
        loader = DataLoader(dataset, batch_sampler=elastic.sampler(50, global_batch=16))
        for _ in elastic.epochs(2):
            for x, y in loader:
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            elastic.end_epoch()
        assert elastic._at.step == 8 if accum == 1 else 6  # the last 2 samples join a batch where 3 parts are needed
        results.append([p.detach().clone() for p in model.parameters()])
    reference = models.mlp()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    x, y = models.data(50)
    from icefrog.runtime import ElasticSampler

    sampler = ElasticSampler(50, 16, accum_steps=3)
    for epoch in range(2):
        sampler.seek(epoch)
        flat = iter(sampler)
        for parts in zip(flat, flat, flat, strict=True):
            pick = [i for part in parts for i in part]
            nn.functional.cross_entropy(reference(x[pick]), y[pick]).backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(results[1], reference.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
