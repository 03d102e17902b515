"""What the meter of rule ``progress`` makes of models and optimizers that are not plain."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from icefrog.runtime import LayerElastic
from icefrog.runtime.layers import Layer
from icefrog.runtime.rules import Hands, Progress
from icefrog.runtime.rules.signal import SignalMeter, _sample
from icefrog.testing.rules import situation

MakeOptimizer = Callable[..., torch.optim.Optimizer]


def learnt() -> torch.Tensor:
    """A matrix with one strong direction, (16, 16)."""
    return torch.randn(16, 16) + 2.0 * torch.outer(torch.arange(16.0).cos(), torch.arange(16.0).sin())


class DeclaredBackwards(nn.Module):
    """As declared the normalisation is a layer of its own, as run it belongs to the layer before it: 4 layers, then 3."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.third, self.second, self.first = (nn.Linear(16, 16) for _ in range(3))
        self.first.weight.data = learnt()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.norm(self.second(self.first(x).tanh())))  # type: ignore[no-any-return]


class Unused(nn.Module):
    """Its second layer is never called, as a pooler of which nobody reads the output."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.pooler, self.head = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x).tanh())  # type: ignore[no-any-return]


def train(model: nn.Module, make: MakeOptimizer = torch.optim.Adam, steps: int = 8) -> LayerElastic:
    """So many steps under the default rule."""
    optimizer = make(model.parameters(), lr=1e-3)
    elastic = LayerElastic(model, optimizer, env={})
    for _ in elastic.epochs(1):
        for _ in range(steps):
            elastic.model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        elastic.end_epoch()
    elastic.close()
    return elastic


def meter_of(elastic: LayerElastic) -> SignalMeter:
    assert isinstance(elastic.rule, Progress)
    return elastic.rule._meter


def test_layers_that_run_in_another_order_than_declared() -> None:
    torch.manual_seed(0)
    elastic = train(DeclaredBackwards())
    meter = meter_of(elastic)
    assert [layer.name for layer in elastic.layers] == ["first", "second", "third"]
    assert [value > 1.05 for value in meter.structure] == [True, False, False]
    signal = meter.progress()
    assert signal is not None
    assert len(signal) == 3


@pytest.mark.parametrize("make", [torch.optim.Adamax, torch.optim.Adafactor, torch.optim.NAdam])
def test_optimizers_of_any_state_are_measured(make: MakeOptimizer) -> None:
    torch.manual_seed(0)
    signal = meter_of(train(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)), make)).progress()
    assert signal is not None
    assert sum(signal) > 0


def test_a_layer_that_is_not_used_adds_nothing() -> None:
    torch.manual_seed(0)
    signal = meter_of(train(Unused())).progress()
    assert signal is not None
    assert [value > 0 for value in signal] == [True, False, True]


def hands(step: int, params: list[nn.Parameter], own: list[nn.Parameter] | None = None) -> Hands:
    layers = [Layer(str(i), [], {str(i): param}) for i, param in enumerate(params)]
    return Hands(step, nn.Identity(), layers, 0, torch.optim.SGD(own or params, lr=1.0))


def with_gradients(weights: list[torch.Tensor]) -> list[nn.Parameter]:
    params = [nn.Parameter(value) for value in weights]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


def test_weights_of_a_job_that_trained_under_another_rule_say_nothing() -> None:
    """What they have learnt there is not what they had learnt before the job."""
    params = with_gradients([learnt() for _ in range(4)])
    for first in (0, 100):
        rule = Progress(margin=0.0)
        for step in range(first, first + 8):
            rule.observe(hands(step, params))
        assert math.isnan(rule._meter.structure[0]) == (first > 0)
        assert (rule.propose(situation(share_done=0.05)).frozen_layers > 0) == (first == 0)


def test_a_checkpoint_of_an_earlier_version_is_started_from_afresh() -> None:
    rule = Progress()
    kept = rule.state_dict()
    kept["meter"] = {"structure": [1.0], "first": 0, "last_step": 5, "ema": [1.0], "weight": [1.0], "pairs": 5}
    rule.load_state_dict(kept)
    assert rule._meter.progress() is None
    params = with_gradients([learnt() for _ in range(2)])
    for step in range(6, 14):
        rule.observe(hands(step, params))
    assert rule._meter.progress() is not None


def test_memory_is_strict_json_and_keeps_what_the_weights_told() -> None:
    meter, again = SignalMeter(), SignalMeter()
    params = with_gradients([learnt(), torch.ones(3)])
    for step in range(3):
        meter.observe(hands(step, params))
        again.load_state_dict(json.loads(json.dumps(meter.state_dict(), allow_nan=False)))
        assert again.structure[0] == meter.structure[0] > 1.05
        assert math.isnan(again.structure[1])


def test_a_trained_embedding_in_front_of_fresh_layers_does_not_freeze_them() -> None:
    """On average the first half had learnt: in the warm-up no layer behind the last that had is frozen, later it may be."""
    torch.manual_seed(0)
    params = with_gradients([4.0 * learnt(), *(torch.randn(16, 16) for _ in range(7))])
    for param, share in zip(params, [0.01] * 4 + [1.0] * 4, strict=True):
        assert param.grad is not None
        param.grad *= share
    rule = Progress(margin=0.0)
    for step in range(8):
        rule.observe(hands(step, params))
    early = situation([1.0] * 8, share_done=0.05)
    assert sum(rule._meter.structure[:4]) / 4 > 1.05
    assert rule.propose(early).frozen_layers == 1
    assert rule.propose(situation([1.0] * 8, 1, share_done=0.5)).frozen_layers > 1


def test_layers_of_another_optimizer_alone_are_no_measurement() -> None:
    meter = SignalMeter()
    params = with_gradients([torch.ones(16, 16), torch.ones(16, 16)])
    assert params[1].grad is not None
    params[1].grad *= math.inf
    for step in range(10):
        meter.observe(hands(step, params, own=params[1:]))
    assert meter.state_dict()["pairs"] == 0


@pytest.mark.parametrize("rows", [50, 5000])
def test_sparse_gradients_are_sampled_as_dense_ones(rows: int) -> None:
    tables = [nn.Embedding(rows, 16, sparse=sparse) for sparse in (False, True)]
    tokens = torch.arange(0, rows, 2).repeat(2)
    for table in tables:
        table.weight.data.fill_(0.5)
        (table(tokens) * torch.arange(1.0, len(tokens) + 1)[:, None]).sum().backward()
    dense, sparse = (table.weight.grad for table in tables)
    assert dense is not None
    assert sparse is not None
    assert sparse.is_sparse
    assert torch.equal(_sample(sparse), _sample(dense))


@pytest.mark.parametrize("accum_steps", [1, 2])
def test_sparse_gradients_train_as_without_us(accum_steps: int) -> None:
    """Statistics of the gradient are taken from them, too."""
    results = []
    for elastic_too in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(40, 8, sparse=True), nn.Flatten(), nn.Linear(24, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = {"accum_steps": accum_steps, "stats_every": 1, "env": {}}
        elastic = LayerElastic(model, optimizer, **given) if elastic_too else None
        for step in range(10):
            (model(torch.randint(0, 40, (4, 3))).square().mean() / (1 if elastic_too else accum_steps)).backward()
            if elastic_too or step % accum_steps == accum_steps - 1:
                optimizer.step()
                optimizer.zero_grad()
        results.append([param.detach().clone() for param in model.parameters()])
        if elastic is not None:
            variance = elastic._engine.tracker.variance
            assert variance[0] > 0
            elastic.close()
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain)
