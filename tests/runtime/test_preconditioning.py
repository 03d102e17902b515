"""By what gradients are divided under each kind of adaptive optimizer, and that statistics become ready under all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from torch import nn

from icefrog.runtime import LayerElastic
from icefrog.runtime.preconditioning import Preconditioner


class AdaQuantised(torch.optim.SGD):
    """Keeps something in 8 bits that nobody but itself can read."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("state2", torch.zeros(3, dtype=torch.uint8))
        return super().step(closure)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    **{name: getattr(torch.optim, name) for name in ("AdamW", "Adamax", "Adafactor", "Adagrad", "NAdam", "RAdam")},
    **{name: getattr(torch.optim, name) for name in ("Adadelta", "RMSprop", "ASGD", "Rprop")},
    "Quantised": lambda params: AdaQuantised(params, lr=0.01),
}


@pytest.mark.parametrize("accum_steps", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_statistics_become_ready(name: str, accum_steps: int) -> None:
    model = models.mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    elastic = LayerElastic(model, optimizer, rule="none", stats_every=1, accum_steps=accum_steps, env={})
    elastic.begin(9)
    models.train(elastic, optimizer, 23 * accum_steps)
    stats = elastic._engine.tracker.stats()
    assert stats is not None
    assert all(value > 0 for value in stats.variance)
    elastic.close()


def divisors(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> list[torch.Tensor]:
    scale = Preconditioner(optimizer, "auto").scale(params)
    assert scale
    return [divisor / correction for divisor, correction in zip(scale.by_element(), scale.corrections, strict=True)]


def test_adagrads_sum_is_measured_like_the_mean_that_it_is() -> None:
    """Its sum over t steps is t times the mean of g^2: elements that differ by less than t keep divisors of their own."""
    weight = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.Adagrad([weight])
    assert Preconditioner(optimizer, "auto").scale([weight]) is None  # a state, of zeros
    grads = torch.tensor([1.0, 0.5, 0.2, 0.001])
    for _ in range(100):
        weight.grad = grads.clone()
        optimizer.step()
    (found,) = divisors(optimizer, [weight])
    assert found[:3].tolist() == pytest.approx([10.0, 5.0, 2.0])
    assert float(found[3]) == pytest.approx(1.0)  # the largest |g|: the quotient is at most the optimizer's own


@pytest.mark.parametrize("name", ["Adamax", "Adafactor"])
def test_the_divisor_is_the_optimizers_own(name: str) -> None:
    """From what one step with a known gradient moves each weight by."""
    torch.manual_seed(0)
    weight, bias = (nn.Parameter(torch.randn(*shape, dtype=torch.float64)) for shape in ((5, 4), (5,)))
    options = {"d": 1e9} if name == "Adafactor" else {"betas": (0.0, 0.999)}  # neither clipped nor averaged
    optimizer = OPTIMIZERS[name]([weight, bias], **options)
    for _ in range(3):
        weight.grad, bias.grad = torch.rand_like(weight) + 0.5, torch.rand_like(bias) + 0.5
        before = [weight.detach().clone(), bias.detach().clone()]
        optimizer.step()
    for param, old, divisor in zip((weight, bias), before, divisors(optimizer, [weight, bias]), strict=True):
        ratio = (old - param.detach()) / (param.grad / divisor)
        assert torch.allclose(ratio, ratio.mean().expand_as(ratio), rtol=1e-3)


def test_an_element_without_history_is_not_measured_under_adamax() -> None:
    param = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adamax([param])
    param.grad = torch.tensor([1.0, 0.0, 2.0])
    optimizer.step()
    assert divisors(optimizer, [param])[0].isinf().tolist() == [False, True, False]


def test_transformers_adafactor_keeps_the_same_under_other_names() -> None:
    torch.manual_seed(0)
    grads = torch.rand(5, 4)
    rows, columns = grads.square().mean(-1), grads.square().mean(-2)
    param = nn.Parameter(torch.zeros(5, 4))
    optimizer = torch.optim.Adafactor([param])
    param.grad = grads
    optimizer.step()
    expected = divisors(optimizer, [param])[0]
    optimizer.state[param] = {"step": 1, "exp_avg_sq_row": rows, "exp_avg_sq_col": columns}
    assert torch.allclose(divisors(optimizer, [param])[0], expected, rtol=1e-4)
