"""Optimizers that move weights before they evaluate (SAM), closures, and loops whose steps nobody can see."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from torch import nn
from two_ranks import Ranks

from icefrog.errors import UserError
from icefrog.runtime import LayerElastic
from icefrog.runtime.parallel.pipeline import Pipeline


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation (Foret et al. 2021), in the shape in which most scripts have it."""

    def __init__(self, params: Any, base: Callable[..., torch.optim.Optimizer], rho: float = 0.1, **options: Any):
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    def own(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self) -> None:
        norm = torch.stack([p.grad.norm() for p in self.own()]).norm()  # type: ignore[union-attr]
        for p in self.own():
            self.state[p]["before"] = p.clone()
            p.add_(p.grad, alpha=float(0.1 / norm))  # type: ignore[arg-type]
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.own():
            p.copy_(self.state[p]["before"])
        self.base.step()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.first_step()
        loss = torch.enable_grad()(closure)()
        self.second_step()
        return loss


def sam(model: nn.Module) -> SAM:
    return SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


def trained(*, elastic_lines: bool, boundaries: dict[int, int] | None = None) -> tuple[dict[str, bytes], Any]:
    model = models.mlp()
    optimizer = sam(model)
    elastic = LayerElastic(model, optimizer, rule="none", env={}) if elastic_lines else None
    x, y = models.data()
    for step in range(12):
        if elastic is not None and boundaries and step in boundaries:
            elastic.freeze(boundaries[step])
        rows = slice(step * 16 % 64, step * 16 % 64 + 16)

        def loss_of(rows: slice = rows) -> torch.Tensor:
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            return loss

        loss_of()
        optimizer.step(loss_of)
        optimizer.zero_grad()
    return models.bytes_of(model), elastic


def test_a_job_with_an_optimizer_inside_another_resumes_with_the_momentum_of_both(tmp_path: Path) -> None:
    x, y = models.data()

    def life(folder: Path, steps: int) -> tuple[dict[str, bytes], SAM]:
        model = models.mlp()
        optimizer = sam(model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        elastic = LayerElastic(model, optimizer, rule="none", env={}, checkpoint_dir=folder)
        elastic.register("schedule", schedule)
        for epoch in elastic.epochs(100):

            def loss_of() -> torch.Tensor:
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                return loss

            elastic.freeze(epoch % 3)
            loss_of()
            optimizer.step(loss_of)
            optimizer.zero_grad()
            schedule.step()
            elastic.end_epoch()
            if elastic.epoch == steps:
                break
        elastic.close()
        return models.bytes_of(model), optimizer

    whole, _ = life(tmp_path / "whole", 12)
    for steps in (2, 5, 6):
        life(tmp_path / "parts", steps)
    found, optimizer = life(tmp_path / "parts", 12)
    assert found == whole
    assert optimizer.base.param_groups is optimizer.param_groups


def test_gradients_made_before_the_step_are_those_that_sam_climbs_along() -> None:
    plain, _ = trained(elastic_lines=False)
    found, elastic = trained(elastic_lines=True)
    assert found == plain
    assert (elastic._at.step, elastic._at.samples) == (12, 12 * 16)


def test_under_sam_a_frozen_prefix_stays() -> None:
    before = models.bytes_of(models.mlp())
    found, elastic = trained(elastic_lines=True, boundaries={0: 2})
    frozen = [name for layer in elastic.layers[:2] for name in layer.params]
    assert all(found[name] == before[name] for name in frozen)
    assert all(found[name] != before[name] for name in found if name not in frozen)


def refused(parallel: Any) -> str:
    """What is said where each rank holds a part of the model."""
    model = models.mlp()
    try:
        LayerElastic(model, sam(model), rule="none", parallel=parallel)
    except UserError as error:
        return f"{error.message}; {error.hint}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return ""


def test_where_a_rank_holds_a_part_of_the_model_an_optimizer_inside_another_is_refused(ranks: Ranks) -> None:
    """Its state would be missing in checkpoints."""
    for said in (*ranks.run(refused, "fsdp"), refused(Pipeline(nn.functional.cross_entropy))):
        assert re.match(r"SAM holds another optimizer \(base\).*parallel='ddp'", said), said


def test_two_half_steps_that_nobody_sees_are_named() -> None:
    model = models.mlp()
    optimizer = sam(model)
    elastic = LayerElastic(model, optimizer, rule="none", env={})
    x, y = models.data()

    def loop() -> None:
        for _ in elastic.epochs(2):
            for half in (optimizer.first_step, optimizer.second_step):
                nn.functional.cross_entropy(elastic.model(x), y).backward()
                half()
            elastic.end_epoch()

    with pytest.raises(UserError, match=r"without a step\(\) of the optimizer") as caught:
        loop()
    assert "step(closure)" in caught.value.hint


class Methods(nn.Module):
    """Trained through a method of its own, as many auto-encoders are."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(4, 6)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.decoder(torch.tanh(self.encoder(x))), x)


def test_a_model_that_is_trained_past_its_forward_is_named() -> None:
    model = Methods()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = LayerElastic(model, optimizer, rule="none", env={})
    elastic.model.loss(models.data()[0]).backward()
    with pytest.raises(UserError, match="no forward pass of the model before it") as caught:
        optimizer.step()
    assert "elastic.model(...)" in caught.value.hint


class Several:
    """Steps two optimizers at once; no optimizer itself."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def test_what_is_no_optimizer_is_refused() -> None:
    model = models.mlp()
    several: Any = Several(torch.optim.SGD(model[:2].parameters(), lr=0.1), torch.optim.Adam(model[2:].parameters()))
    with pytest.raises(UserError, match="Several has no param_groups") as caught:
        LayerElastic(model, several, env={})
    assert "wrapper" in caught.value.hint


def accumulated(*, elastic_lines: bool) -> tuple[dict[str, bytes], int]:
    """The loop adds up gradients by itself, and the last pass is in the closure, as Lightning has it."""
    torch.manual_seed(0)
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    elastic = LayerElastic(model, optimizer, rule="none", env={}) if elastic_lines else None
    x, y = models.data()

    def passed(rows: slice) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        return loss

    for _ in range(5):
        passed(slice(0, 8))
        optimizer.step(lambda: passed(slice(8, 24)))
        optimizer.zero_grad()
    samples = 0
    if elastic is not None:
        samples = elastic._at.samples
        elastic.close()
    return {name: value.numpy().tobytes() for name, value in model.state_dict().items()}, samples


def test_a_closure_may_be_the_last_of_several_passes() -> None:
    plain, _ = accumulated(elastic_lines=False)
    elastic, samples = accumulated(elastic_lines=True)
    assert elastic == plain
    assert samples == 5 * 24
