"""S2: the learning rate when the global batch changes, and LR schedulers through freezing, resizes and resumption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from icefrog.errors import UserError
from icefrog.runtime import LayerElastic, Stopped, protocol
from icefrog.runtime.lr_rules import adascale_gain, check_rule, lr_factor

positive = st.floats(1e-6, 1e6)


@given(st.integers(1, 512), st.integers(1, 64), positive, positive)
def test_the_gain_lies_between_one_and_the_ratio_of_batches(
    base: int, times: int, variance: float, signal: float
) -> None:
    gain = adascale_gain(base * times, base, variance, signal)
    assert gain * (1 + 1e-9) >= 1.0
    assert gain <= times * (1 + 1e-9)
    assert gain <= adascale_gain(2 * base * times, base, variance, signal) * (1 + 1e-9)


def test_known_values() -> None:
    assert adascale_gain(64, 16, 0.0, 1.0) == 1.0  # no noise: a larger batch is worth nothing
    assert adascale_gain(64, 16, 1.0, 0.0) == 4.0  # nothing but noise: linear
    assert adascale_gain(64, 16, 16.0, 1.0) == pytest.approx(2.0 / 1.25)
    assert adascale_gain(64, 16, 0.0, 0.0) == 1.0
    assert lr_factor("linear", 64, 16, 0.0, 0.0) == 4.0
    assert lr_factor("sqrt", 64, 16, 0.0, 0.0) == 2.0
    assert lr_factor("none", 64, 16, 1.0, 0.0) == 1.0
    with pytest.raises(UserError, match="cubic"):
        check_rule("cubic")


def steps(lr: float, **options: Any) -> tuple[dict[str, bytes], list[float]]:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    scheduler = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    elastic = LayerElastic(model, optimizer, rule="none", env={}, **options)
    rates = []
    for depth in (0, 2, 0):
        elastic.freeze(depth)
        for _ in range(2):
            models.train(elastic, optimizer, 1, batch=32)
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
            assert optimizer.param_groups[0]["lr"] == rates[-1]
    return models.bytes_of(model), rates


def test_a_rule_is_a_larger_rate_for_the_step_alone() -> None:
    """Rates are powers of two here, so that the products are exact."""
    plain, rates = steps(0.25)
    assert steps(0.25, lr_rule="linear") == (plain, rates)  # M0: that of the first step
    doubled, own_rates = steps(0.125, lr_rule="linear", base_batch=16)
    assert doubled == plain
    assert own_rates == [rate / 2 for rate in rates]
    assert steps(0.125, lr_rule="sqrt", base_batch=8)[0] == plain
    adapted, own_rates = steps(0.125, lr_rule="adascale", base_batch=16)
    assert adapted not in (plain, steps(0.125)[0])
    assert own_rates == [rate / 2 for rate in rates]


KINDS = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step),
    "one_cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.3, total_steps=40),
    "step": lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.5),
}


def scheduled(kind: str, folder: Path, attempt: str, accum: int, stop_at: int | None, batch: int = 16) -> Any:
    """(learning rate of each optimizer step, parameters); epochs are 3 steps of 16 samples."""
    (folder / attempt).mkdir(parents=True)
    env = {protocol.ENV_ATTEMPT_DIR: str(folder / attempt), protocol.ENV_CHECKPOINT_DIR: str(folder / "kept")}
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    elastic = LayerElastic(
        model, optimizer, rule="none", global_batch=batch, accum_steps=accum, lr_rule="linear", env=env
    )
    scheduler: LRScheduler = KINDS[kind](optimizer)
    elastic.register("scheduler", scheduler)
    loader = DataLoader(TensorDataset(*models.data(48)), batch_sampler=elastic.sampler(48))
    used: list[float] = []
    real_step = elastic._gate._step

    def seen() -> Any:
        used.append(optimizer.param_groups[0]["lr"])
        return real_step()

    elastic._gate._step = seen
    try:
        for epoch in elastic.epochs(1000):
            elastic.freeze((0, 2, 1, 0)[epoch])
            for x, y in loader:
                if elastic._at.step == stop_at:
                    (folder / attempt / "stop").touch()
                nn.functional.cross_entropy(elastic.model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if elastic.stepped and kind != "step":
                    scheduler.step()
            if kind == "step":
                scheduler.step()
            elastic.end_epoch()
            if epoch == 3:
                break
    except Stopped:
        pass
    finally:
        elastic.close()
    return used, [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("kind", ["step", "lambda", "one_cycle"])
def test_schedulers_survive_freezing_accumulation_and_resumption(kind: str, tmp_path: Path) -> None:
    whole, params = scheduled(kind, tmp_path / "whole", "a", 1, None)
    first, _ = scheduled(kind, tmp_path / "parts", "a", 1, 4)
    second, _ = scheduled(kind, tmp_path / "parts", "b", 2, 8)
    third, last = scheduled(kind, tmp_path / "parts", "c", 1, None)
    assert first + second + third == whole
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(params, last, strict=True))


def test_the_first_batch_is_remembered_in_the_checkpoint(tmp_path: Path) -> None:
    first, _ = scheduled("step", tmp_path, "a", 1, 3)  # asked to stop in the second epoch's first step
    assert first == [0.125] * 4
    rest, _ = scheduled("step", tmp_path, "b", 1, None, batch=24)
    assert rest[0] == 1.5 * 0.125
