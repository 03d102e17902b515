"""A layer that is opened after others have stepped gets momentum under SGD's fused kernel, too."""

import pytest
import torch
from torch import nn

from icefrog.runtime import LayerElastic


def train(fused: bool, *, nesterov: bool = False, dampening: float = 0.0) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=nesterov, dampening=dampening, fused=fused
    )
    elastic = LayerElastic(model, optimizer, [[model[0]], [model[2]], [model[4]]], rule="none", env={})
    data = torch.randn(6, 4, 6)
    elastic.freeze(2)
    for step, x in enumerate(data):
        if step in (2, 4):
            elastic.freeze(4 - step)  # 2, then 0: momentum starts for one layer after the other
        if step == 3:
            elastic.freeze(1)
        elastic.model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    elastic.close()
    assert not optimizer._optimizer_step_pre_hooks  # the optimizer is given back as it was
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_fused_kernel_trains_as_the_plain_one(nesterov: bool) -> None:
    fused, plain = train(True, nesterov=nesterov), train(False, nesterov=nesterov)
    for name, value in plain.items():
        torch.testing.assert_close(fused[name], value, msg=name)


def test_with_dampening_it_does_not_end_in_an_error() -> None:
    assert all(value.isfinite().all() for value in train(True, dampening=0.1).values())
