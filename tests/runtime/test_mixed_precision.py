"""bfloat16 and float16 with a GradScaler, in the unchanged loop, against PyTorch's own recipe."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from two_ranks import Ranks

from icefrog.errors import UserError
from icefrog.runtime import LayerElastic, Stopped, protocol

DEPTHS = (0, 2, 3, 0, 1, 0)  # of the boundary, two optimizer steps each


def scaler(init: float = 2.0**12, growth_interval: int = 3) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=init, growth_interval=growth_interval)


def half_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    with torch.autocast("cpu", dtype=dtype):
        return nn.functional.cross_entropy(model(x), y)


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.Adam(model.parameters(), lr=0.01, fused=kind == "fused")


def recipe(kind: str, dtype: torch.dtype, accum: int, world: int, init: float) -> tuple[nn.Module, float]:
    """PyTorch's recipe for accumulation: the sum un-scaled, averaged, clipped, stepped and updated once.

    Averaged then, not by dividing each loss: whether a backward pass overflows is to be the same in both.
    """
    model = models.mlp()
    optimizer, amp = optimizer_of(kind, model), scaler(init) if dtype == torch.float16 else None
    x, y = models.data()
    count = 0
    for depth in DEPTHS:
        for index, block in enumerate(model):
            block.requires_grad_(index >= depth)
        for _ in range(2):
            for _ in range(accum * world):
                at = count * 8 % 64
                loss = half_loss(model, x[at : at + 8], y[at : at + 8], dtype)
                (amp.scale(loss) if amp else loss).backward()
                count += 1
            if amp:
                amp.unscale_(optimizer)
            for param in model.parameters():
                if param.grad is not None:
                    param.grad /= accum * world
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if amp:
                amp.step(optimizer)
                amp.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
    return model, amp.get_scale() if amp else 1.0


def unchanged_loop(kind: str, dtype: torch.dtype, accum: int, init: float) -> dict[str, Any]:
    model = models.mlp()
    optimizer, amp = optimizer_of(kind, model), scaler(init) if dtype == torch.float16 else None
    elastic = LayerElastic(
        model, optimizer, rule="none", accum_steps=accum, grad_scaler=amp, max_grad_norm=0.5, env=dict(os.environ)
    )
    x, y = models.data()
    count, steps = 0, []
    for depth in DEPTHS:
        elastic.freeze(depth)
        for _ in range(2 * accum):
            at = (count * elastic.world_size + elastic.rank) * 8 % 64
            loss = half_loss(elastic.model, x[at : at + 8], y[at : at + 8], dtype)
            if amp:
                amp.scale(loss).backward()
                amp.step(optimizer)
                amp.update()
            else:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
            count += 1
            steps.append(elastic.stepped)
    elastic.close()
    return {
        "params": {name: value.clone() for name, value in model.state_dict().items()},
        "scale": amp.get_scale() if amp else 1.0,
        "stepped": sum(steps),
        "counted": elastic._at.step,
        "samples": elastic._at.samples,
    }


def agree(found: dict[str, torch.Tensor], model: nn.Module, atol: float = 1e-6) -> bool:
    return all(torch.allclose(found[name], value, atol=atol) for name, value in model.state_dict().items())


@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize(("kind", "dtype"), [("sgd", torch.float16), ("fused", torch.float16), ("sgd", torch.bfloat16)])
def test_the_unchanged_loop_is_pytorchs_recipe(kind: str, dtype: torch.dtype, accum: int) -> None:
    found = unchanged_loop(kind, dtype, accum, 2.0**12)
    model, scale = recipe(kind, dtype, accum, 1, 2.0**12)
    assert agree(found["params"], model)
    assert found["scale"] == scale
    assert found["stepped"] == found["counted"] == 12


@pytest.mark.parametrize("accum", [1, 2])
def test_steps_that_overflow_are_skipped_and_are_no_progress(accum: int) -> None:
    found = unchanged_loop("sgd", torch.float16, accum, 2.0**22)
    model, scale = recipe("sgd", torch.float16, accum, 1, 2.0**22)
    assert agree(found["params"], model)
    assert found["scale"] == scale
    assert 4 < found["stepped"] == found["counted"] < 12
    assert found["samples"] == 8 * accum * found["counted"]


@pytest.mark.parametrize("init_scale", [2.0**12, 2.0**22, float("inf")])
def test_steps_that_overflow_cost_no_further_epoch(init_scale: float) -> None:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = scaler(init_scale)
    elastic = LayerElastic(model, optimizer, rule="none", grad_scaler=amp, env={})
    x, y = models.data(32)
    epochs = 0
    for epoch in elastic.epochs(3):
        for rows in torch.arange(32).split(8):
            amp.scale(half_loss(elastic.model, x[rows], y[rows], torch.float16)).backward()
            amp.step(optimizer)
            amp.update()
            optimizer.zero_grad()
        elastic.end_epoch()
        epochs += 1
        assert epoch < 3, "such a job never ends"
    assert epochs == 3
    assert (elastic._at.step == 12) == (init_scale == 2.0**12)
    elastic.close()


@pytest.mark.parametrize("accum", [1, 2])
def test_two_ranks_are_one_process(ranks: Ranks, accum: int) -> None:
    first, second = ranks.run(unchanged_loop, "sgd", torch.float16, accum, 2.0**22)
    model, scale = recipe("sgd", torch.float16, accum, 2, 2.0**22)
    assert agree(first["params"], model, 1e-5)
    assert all(torch.equal(value, second["params"][name]) for name, value in first["params"].items())
    assert first["scale"] == second["scale"] == scale
    assert first["counted"] == second["counted"] < 12


def overflow_on_one_rank() -> dict[str, Any]:
    """Parameters outside of DDP's care (here: a loss weight of the user's own) overflow on rank 1 alone."""
    model = models.mlp()
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), weight], lr=0.1)
    amp = scaler()
    elastic = LayerElastic(model, optimizer, rule="none", grad_scaler=amp)
    x, y = models.data()
    for step in range(4):
        loss = nn.functional.cross_entropy(elastic.model(x[:8]), y[:8])
        amp.scale(loss + (weight * float("inf") if elastic.rank == 1 and step == 2 else 0.0)).backward()
        amp.step(optimizer)
        amp.update()
        optimizer.zero_grad()
    found = {"step": elastic._at.step, "scale": amp.get_scale(), "params": bytes(models.bytes_of(model)["0.0.weight"])}
    elastic.close()
    return found


def test_ranks_skip_together(ranks: Ranks) -> None:
    first, second = ranks.run(overflow_on_one_rank)
    assert first == second
    assert first["step"] == 3
    assert first["scale"] == 2.0**11


def spread(kind: str, accum: int) -> dict[str, Any]:
    """Eight steps with clipping; layers freeze in the middle, and the third overflows on rank 1."""
    model = models.mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    amp = scaler()
    elastic = LayerElastic(
        model, optimizer, rule="none", parallel=kind, accum_steps=accum, grad_scaler=amp, max_grad_norm=0.1
    )
    x, y = models.data()
    scales = []
    for step in range(8 * accum):
        elastic.freeze(2 if step >= 4 * accum else 0)
        rows = slice((8 * step + 4 * elastic.rank) % 64, (8 * step + 4 * elastic.rank) % 64 + 4)
        loss = nn.functional.cross_entropy(elastic.model(x[rows]), y[rows])
        overflows = elastic.rank == 1 and step // accum == 2
        amp.scale(loss * float("inf") if overflows else loss).backward()
        amp.step(optimizer)
        amp.update()
        optimizer.zero_grad()
        scales.append(amp.get_scale())
    found = {"model": elastic.state_dict()["model"], "scales": scales, "step": elastic._at.step}
    found["model"] = {name: value.tolist() for name, value in found["model"].items()}
    elastic.close()
    return found


@pytest.mark.parametrize("accum", [1, 2])
def test_fsdp_is_ddp(ranks: Ranks, accum: int) -> None:
    ddp, fsdp = (ranks.run(spread, kind, accum)[0] for kind in ("ddp", "fsdp"))
    assert fsdp["step"] == ddp["step"] == 7
    assert fsdp["scales"] == ddp["scales"]
    for name, value in ddp["model"].items():
        assert torch.allclose(torch.tensor(fsdp["model"][name]), torch.tensor(value), atol=1e-6), name


def variance(scaled: bool, accum: int) -> np.ndarray:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    amp = scaler(2.0**126, growth_interval=2) if scaled else None  # float32: half of the first steps overflow
    elastic = LayerElastic(model, optimizer, rule="none", accum_steps=accum, grad_scaler=amp, env={})
    x, y = models.data()
    while elastic._at.step < 24:
        at = elastic._at.step * accum % 4 * 16
        for part in range(accum):
            here = slice((at + 16 * part) % 64, (at + 16 * part) % 64 + 16)
            loss = nn.functional.cross_entropy(elastic.model(x[here]), y[here])
            if amp:
                amp.scale(loss).backward()
                if accum == 1:
                    amp.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                amp.step(optimizer)
                amp.update()
            else:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
    elastic.close()
    return elastic._engine.tracker.variance


@pytest.mark.parametrize("accum", [1, 2])
def test_statistics_are_of_unscaled_unclipped_gradients_while_the_scale_moves(accum: int) -> None:
    """The scale doubles after two steps, overflows, halves: successive gradients come at different scales."""
    plain = variance(False, accum)
    assert plain.min() > 0
    # A step whose predecessor overflowed is not measured with R = 1, so the averages are over other steps of the four.
    assert variance(True, accum) == pytest.approx(plain, rel=1e-3 if accum == 2 else 0.2)


def test_clipping_in_the_loop_needs_a_whole_gradient() -> None:
    model = models.mlp()
    optimizer, amp = optimizer_of("sgd", model), scaler()
    LayerElastic(model, optimizer, rule="none", accum_steps=2, grad_scaler=amp, env={})
    x, y = models.data()
    amp.scale(half_loss(model, x, y, torch.float16)).backward()
    with pytest.raises(UserError, match="unscale_"):
        amp.unscale_(optimizer)


def test_a_scaler_that_is_not_given_is_refused() -> None:
    model = models.mlp()
    optimizer = optimizer_of("sgd", model)
    LayerElastic(model, optimizer, rule="none", accum_steps=2, env={})
    x, y = models.data()
    for amp, expected in (
        (torch.amp.GradScaler("cpu", enabled=False), contextlib.nullcontext()),
        (scaler(), pytest.raises(UserError, match="does not know")),
    ):
        amp.scale(nn.functional.cross_entropy(model(x), y)).backward()
        with expected:
            amp.step(optimizer)


def test_close_gives_the_scaler_back() -> None:
    model = models.mlp()
    amp = scaler()
    elastic = LayerElastic(model, optimizer_of("sgd", model), grad_scaler=amp, env={})
    assert "step" in vars(amp)
    elastic.close()
    assert not {"step", "unscale_", "update"} & set(vars(amp))


def resumable(folder: Path, attempt: str, stop_at: int | None, seen: list[int]) -> dict[str, Any] | None:
    """Overflows, growth, freezing, accumulation; the stop file appears at one step."""
    (folder / attempt).mkdir(parents=True)
    env = {protocol.ENV_ATTEMPT_DIR: str(folder / attempt), protocol.ENV_CHECKPOINT_DIR: str(folder / "kept")}
    model = models.mlp()
    optimizer, amp = optimizer_of("sgd", model), scaler(2.0**20)
    elastic = LayerElastic(model, optimizer, rule="none", global_batch=16, accum_steps=2, grad_scaler=amp, env=env)
    x, y = models.data(61)
    loader = DataLoader(TensorDataset(torch.arange(61), x, y), batch_sampler=elastic.sampler(61))
    try:
        for epoch in elastic.epochs(1000):
            elastic.freeze((0, 2, 1)[epoch])
            for index, part, label in loader:
                if elastic._at.step == stop_at:
                    (folder / attempt / "stop").touch()
                amp.scale(half_loss(elastic.model, part, label, torch.float16)).backward()
                seen += index.tolist()
                amp.step(optimizer)
                amp.update()
                optimizer.zero_grad()
            elastic.end_epoch()
            if epoch == 2:
                break
    except Stopped:
        return None
    finally:
        elastic.close()
    return {
        "params": models.bytes_of(model),
        "scaler": amp.state_dict(),
        "step": elastic._at.step,
        "effective": elastic._at.effective_samples,
    }


def test_the_scaler_is_in_the_checkpoint_and_no_sample_is_seen_twice(tmp_path: Path) -> None:
    whole_seen: list[int] = []
    whole = resumable(tmp_path / "whole", "a", None, whole_seen)
    assert whole is not None
    assert sorted(whole_seen) == sorted(3 * list(range(61)))
    assert whole["step"] < 12  # some overflowed
    seen: list[int] = []
    assert resumable(tmp_path / "parts", "a", 2, seen) is None
    assert resumable(tmp_path / "parts", "b", 6, seen) is None
    last = resumable(tmp_path / "parts", "c", None, seen)
    assert last == whole
    assert seen == whole_seen
