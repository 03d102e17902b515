"""Fresh weights and weights that have learnt are told apart by their largest singular value."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from icefrog.runtime.rules.spectrum import LEARNT, structure

INITS: dict[str, Callable[[torch.Tensor], object]] = {
    "normal": nn.init.normal_,
    "uniform": nn.init.uniform_,  # its mean is not zero
    "truncated": nn.init.trunc_normal_,
    "xavier": nn.init.xavier_uniform_,
    "kaiming": nn.init.kaiming_normal_,
    "orthogonal": nn.init.orthogonal_,
}


@pytest.mark.parametrize("shape", [(64, 64), (16, 300), (1500, 40), (32, 16, 3, 3)])
@pytest.mark.parametrize("init", INITS)
def test_fresh_weights_have_no_structure(init: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    param = torch.empty(shape)
    INITS[init](param)
    assert 0.3 < structure([param]) < LEARNT


@pytest.mark.parametrize("kind", [nn.Linear, nn.Embedding])
def test_default_layers_are_fresh(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    assert structure(kind(200, 100).parameters()) < LEARNT


def test_it_is_the_largest_singular_value_against_the_edge() -> None:
    """A spike of three times the edge, by hand: 3 (sqrt(40) + sqrt(60)) s u v^T in unit noise."""
    noise = torch.randn(40, 60, generator=torch.Generator().manual_seed(0))
    u, v = torch.ones(40) / 40**0.5, torch.arange(60.0).sin()
    edge = math.sqrt(40) + math.sqrt(60)
    weights = noise + 3 * edge * torch.outer(u, v / v.norm())
    centred = weights - weights.mean()
    exact = float(torch.linalg.matrix_norm(centred, 2)) / (float(centred.std()) * edge)
    assert structure([torch.zeros(3), weights]) == pytest.approx(exact, rel=1e-3)
    assert exact > 2.0


def test_training_leaves_structure() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 32)
    y = (x[:, :4].sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    before = structure(model[0].parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert before < LEARNT < structure(model[0].parameters())


def test_what_has_no_matrix_tells_nothing() -> None:
    assert math.isnan(structure([torch.ones(5), torch.zeros(20, 20), torch.ones(4, 4), torch.ones(9, 9).long()]))
    assert math.isnan(structure([torch.empty(0, 9), torch.empty(9, 0)]))
