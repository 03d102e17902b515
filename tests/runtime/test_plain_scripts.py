"""Other people's training scripts, rebuilt in their usual shapes, with and without the three lines."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel
from torch.utils.data import DataLoader, TensorDataset

from icefrog.errors import UserError
from icefrog.runtime import LayerElastic

EPOCHS = 3


class Net(nn.Module):
    """The digit classifier of many tutorials: layers as attributes, functional activations, dropout and normalisation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 8, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(8 * 4, 16)
        self.fc2 = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.max_pool2d(torch.relu(self.conv2(x)), 2)
        x = torch.relu(self.fc1(self.dropout(x.flatten(1))))
        return torch.log_softmax(self.fc2(x), 1)


def images() -> TensorDataset:
    x = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.mean((1, 2, 3)).argsort().argsort() * 3 // 64)


def script(
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    elastic_lines: bool,
    *,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    scheduler_first: bool = True,
    per_step: bool = False,
    set_to_none: bool = True,
    clip: float | None = None,
    accumulate: int = 1,
    closure: bool = False,
    double: bool = False,
    freeze: dict[int, int] | None = None,
) -> tuple[list[float], nn.Module, LayerElastic | None]:
    """``train()`` and ``test()`` an epoch each, as in PyTorch's own examples."""
    model = Net()
    torch.manual_seed(3)
    optimizer = make_optimizer(model)
    if double:
        model.double()  # behind the optimizer: the parameters are the same objects
    schedule = scheduler(optimizer) if scheduler and scheduler_first else None
    elastic = LayerElastic(model, optimizer, env={}, rule="none") if elastic_lines else None
    if scheduler and not scheduler_first:
        schedule = scheduler(optimizer)
    loader = DataLoader(images(), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(2))
    losses: list[float] = []

    def train() -> None:
        model.train()
        for index, (x, y) in enumerate(loader):
            x = x.double() if double else x

            def backward(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                loss = nn.functional.nll_loss(model(x), y) / accumulate
                loss.backward()
                losses.append(float(loss.detach()))
                return loss

            if index % accumulate == 0:
                optimizer.zero_grad(set_to_none=set_to_none)
            if closure:
                optimizer.step(backward)
                continue
            backward()
            if (index + 1) % accumulate == 0:
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                if schedule is not None and per_step:
                    schedule.step()

    def test() -> float:
        model.eval()
        right = 0
        with torch.no_grad():
            for x, y in DataLoader(images(), batch_size=64):
                right += int((model(x.double() if double else x).argmax(1) == y).sum())
        return right / 64

    for epoch in elastic.epochs(EPOCHS) if elastic is not None else range(EPOCHS):
        if elastic is not None and freeze:
            elastic.freeze(freeze.get(epoch, elastic.frozen_layers))
        train()
        accuracy = test()
        if schedule is not None and not per_step:
            schedule.step()
        if elastic is not None:
            elastic.end_epoch(metric=accuracy)
        if freeze and elastic is not None and epoch == EPOCHS - 1:
            break
    return losses, model, elastic


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [p]} for p in model.parameters()], lr=1e-2)


@pytest.mark.parametrize(
    ("make_optimizer", "options"),
    [
        (sgd, {}),
        (adamw, {}),
        (sgd, {"set_to_none": False}),
        (sgd, {"clip": 0.1}),
        (sgd, {"accumulate": 2}),
        (sgd, {"closure": True}),
        (adamw, {"double": True}),
        (sgd, {"scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)}),
        (sgd, {"scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5), "scheduler_first": False}),
        (adamw, {"scheduler": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 12), "per_step": True}),
        (
            adamw,
            {
                "scheduler": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 12),
                "per_step": True,
                "scheduler_first": False,
            },
        ),
    ],
)
def test_with_nothing_frozen_a_script_does_the_same_to_the_bit(
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        without, plain, _ = script(make_optimizer, False, **options)
        with_it, model, elastic = script(make_optimizer, True, **options)
    assert with_it == without
    assert len(with_it) == EPOCHS * 4
    assert models.bytes_of(model) == models.bytes_of(plain)
    assert elastic is not None
    assert elastic.effective_samples == EPOCHS * 64


@pytest.mark.parametrize("options", [{"set_to_none": False}, {"clip": 0.1, "accumulate": 2}, {"closure": True}])
@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_a_frozen_prefix_stays_whatever_the_script_does(
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    _, before, _ = script(make_optimizer, True, freeze={0: 2}, **options)
    _, after, elastic = script(make_optimizer, True, freeze={0: 2, 1: 2}, **options)
    first, start = models.bytes_of(after), models.bytes_of(Net())
    assert elastic is not None
    names = [name for name in start if name.split(".")[0] in ("conv1", "bn1", "conv2")]
    assert len(names) == 9
    assert all(first[name] == start[name] for name in names)
    assert first["fc2.weight"] != start["fc2.weight"]
    assert models.bytes_of(before) == first
    losses, opened, _ = script(make_optimizer, True, freeze={0: 2, 2: 0}, **options)
    assert models.bytes_of(opened)["conv1.weight"] != start["conv1.weight"]
    assert all(loss == loss for loss in losses)


def test_a_copy_and_a_pickle_of_the_whole_model(tmp_path) -> None:  # type: ignore[no-untyped-def]
    _, model, elastic = script(sgd, True, freeze={1: 2})
    x = images().tensors[0]
    model.eval()
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for other in (copy.deepcopy(model), loaded):
        assert torch.equal(other(x), model(x))
        other.train()
        other(x).sum().backward()  # free of the boundary: its normalisation moves, ours does not
        assert not torch.equal(other.bn1.running_mean, model.bn1.running_mean)
    assert elastic is not None
    assert elastic.frozen_layers == 2


def test_a_wrapped_model_is_refused() -> None:
    model = Net()
    with pytest.raises(UserError, match="plain model") as caught:
        LayerElastic(DataParallel(model), sgd(model), env={})
    assert "model.module" in caught.value.hint
