"""F14: what freezing saves is measured by whole steps: a graph that computes on, a loader that cannot follow, are seen."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from icefrog.estimate.throughput import throughput
from icefrog.runtime import LayerElastic
from icefrog.runtime.profiling import SKIPPED_STEPS, PointKey, Profiler
from icefrog.runtime.rules import Guards, Tuner
from icefrog.runtime.savings import Saving
from icefrog.runtime.timing import StepTimes
from icefrog.testing.rules import situation

LAYERS = 4
FULL = StepTimes(step_s=1.0, fwd_s=0.25, bwd_s=0.6, sync_s=0.05, ready_s=(0.6, 0.45, 0.3, 0.15))
HALF = StepTimes(step_s=0.7, fwd_s=0.25, bwd_s=0.3, sync_s=0.05, ready_s=(np.nan, np.nan, 0.3, 0.15))


def profiler_of(frozen: StepTimes, num_gpus: int = 1, **options: Any) -> tuple[Profiler, PointKey]:
    """After steps with no layer frozen, and steps like ``frozen`` with two."""
    profiler = Profiler("p", [(str(i), 100.0) for i in range(LAYERS)], "cpu", **options)
    key = PointKey(num_gpus, 1, 16, 1, 0)
    for depth, times in ((0, FULL), (2, frozen)):
        profiler.moved()
        for _ in range(SKIPPED_STEPS + 5):
            profiler.observe(key._replace(frozen_layers=depth), times)
    return profiler, key._replace(frozen_layers=2)


def speeds(profiler: Profiler, num_gpus: int = 1) -> np.ndarray:
    """T(l) / T(0) for l = 0..L-1, as tuner and scheduler are told."""
    profile = profiler.profile(640, 16)
    assert profile is not None
    found = throughput(profile, num_gpus, 1, 16, np.arange(LAYERS))
    return np.asarray(found / found[0])


def slower(times: StepTimes, factor: float) -> StepTimes:
    values = {name: getattr(times, name) * factor for name in ("step_s", "fwd_s", "bwd_s", "sync_s")}
    return replace(times, **values, ready_s=tuple(factor * ready for ready in times.ready_s))


def test_a_kept_promise() -> None:
    profiler, key = profiler_of(HALF)
    saving = profiler.saving(key)
    assert saving is not None
    assert not saving.absent
    assert saving.predicted == pytest.approx(0.7)
    assert saving.measured == pytest.approx(0.7)
    assert speeds(profiler) == pytest.approx(1 / np.array([1.0, 0.85, 0.7, 0.55]), rel=0.02)


@pytest.mark.parametrize(
    "broken",
    [
        replace(HALF, step_s=1.0, sync_s=0.35),  # computes on behind the last gradient
        replace(HALF, step_s=1.0, bwd_s=0.6),  # before it
        replace(HALF, step_s=1.0),  # the next batch was not there yet
    ],
    ids=["behind", "before", "loader"],
)
@pytest.mark.parametrize("num_gpus", [1, 2])
def test_a_broken_promise(broken: StepTimes, num_gpus: int) -> None:
    profiler, key = profiler_of(broken, num_gpus)
    saving = profiler.saving(key)
    assert saving is not None
    assert saving.absent
    assert saving.measured == pytest.approx(1.0)
    gain = speeds(profiler, num_gpus) - 1.0
    assert gain[2] == pytest.approx(0.0, abs=0.03)
    assert np.all(gain < 0.06)  # depths that were not tried are not believed either


def test_half_a_promise_is_counted_as_such() -> None:
    profiler, _ = profiler_of(replace(HALF, step_s=0.85, sync_s=0.2))
    assert speeds(profiler)[2] == pytest.approx(1 / 0.85, rel=0.02)
    assert not Saving(0.7, 0.84).absent
    assert Saving(0.7, 0.86).absent
    assert not Saving(0.96, 1.0).absent  # too little to tell from noise


def test_a_machine_that_became_slower_is_not_a_broken_promise() -> None:
    profiler, key = profiler_of(slower(HALF, 1.5))
    saving = profiler.saving(key)
    assert saving is not None
    assert saving.measured == pytest.approx(0.7)
    assert profiler.steps_by_depth(key) == pytest.approx({0: 1.0, 2: 0.7})


def test_filling_a_prefix_cache_is_not_a_broken_promise_but_computing_on_is() -> None:
    filling = replace(HALF, step_s=0.95, fwd_s=0.5)
    profiler, key = profiler_of(filling, fills_cache=lambda: True)
    saving = profiler.saving(key)
    assert saving is not None
    assert saving.measured == pytest.approx(0.7)
    profiler, key = profiler_of(replace(filling, step_s=1.25, sync_s=0.35), fills_cache=lambda: True)
    saving = profiler.saving(key)
    assert saving is not None
    assert saving.absent


def test_several_batch_sizes_do_not_hide_a_broken_promise() -> None:
    """Times that grow in proportion to the batch leave no part of backward that freezing could not remove."""
    profiler, _ = profiler_of(replace(HALF, step_s=1.0, sync_s=0.35))
    profiler.moved()
    for _ in range(SKIPPED_STEPS + 5):
        profiler.observe(PointKey(1, 1, 32, 1, 0), slower(FULL, 2.0))
    assert speeds(profiler)[2] == pytest.approx(1.0, abs=0.03)


def test_what_was_measured_survives_a_checkpoint() -> None:
    profiler, key = profiler_of(slower(HALF, 1.5))
    other = Profiler("p", profiler.layers, "cpu")
    other.load_state_dict(profiler.state_dict())
    assert other.saving(key) == profiler.saving(key)
    state = profiler.state_dict()
    state["points"] = [point[:3] for point in state["points"]]  # written before forward times were kept
    other.load_state_dict(state)
    assert other.saving(key) is not None


def test_the_tuner_does_not_hold_on_to_a_depth_that_saves_nothing() -> None:
    """Opening the layers gains less than the hysteresis, but keeping them frozen gains nothing at all."""
    now = situation([1.0, 1.0, 49.0, 49.0], 2, steps_s={0: 0.048, 1: 0.048, 2: 0.048, 3: 0.048})
    rule = Tuner(Guards(warmup_share=0, dwell_steps=0, hysteresis=0.05))
    assert rule.propose(now).frozen_layers == 2  # psi = .98
    proposal = rule.propose(replace(now, saving=Saving(0.7, 1.0)))
    assert proposal.frozen_layers == 0


# --- real steps


class ComputesOn(torch.autograd.Function):
    """A frozen block whose backward pass is done all the same, and thrown away."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, _anchor: torch.Tensor, block: nn.Module) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.block = block
        return block(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        linear = ctx.block[0]
        leaves = [value.detach().requires_grad_(True) for value in (x, linear.weight, linear.bias)]
        for _ in range(3):  # so plainly that no noise of the machine's hides it
            with torch.enable_grad():
                out = torch.tanh(nn.functional.linear(*leaves))
            found = torch.autograd.grad(out, leaves, grad)[0]
        return found, torch.zeros(1), None


class Net(nn.Module):
    def __init__(self, computes_on: bool) -> None:
        super().__init__()
        self.computes_on = computes_on
        self.anchor = torch.zeros(1, requires_grad=True)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(192, 192), nn.Tanh()) for _ in range(5))
        self.head = nn.Linear(192, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            stopped = not next(block.parameters()).requires_grad
            x = ComputesOn.apply(x, self.anchor, block) if stopped and self.computes_on else block(x)
        return self.head(x)


def trained(computes_on: bool) -> tuple[LayerElastic, Any]:
    """22 whole steps, then a dozen with three of six layers frozen. CPU time counts, so a busy machine does not decide."""
    torch.manual_seed(0)
    model = Net(computes_on)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    elastic = LayerElastic(model, optimizer, rule=Tuner(Guards(0, 0, 0, 0)), env={})
    x, y = torch.randn(256, 192), torch.arange(256) % 3

    def train(steps: int) -> None:
        for _ in range(steps):
            nn.functional.cross_entropy(elastic.model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(2)
    elastic._engine.timer.clock = time.thread_time
    elastic._engine.timer.reset()
    elastic._engine.profiler.moved()
    train(22)
    elastic.freeze(3)
    train(12)
    saving = elastic._engine.profiler.saving(elastic._engine.point())
    decision = elastic.decide()
    elastic.close()
    assert saving is not None
    assert saving.predicted < 0.85
    return decision, saving


def test_a_graph_that_computes_on_is_noticed_and_nothing_stays_frozen() -> None:
    decision, saving = trained(computes_on=True)
    assert saving.absent
    assert decision.frozen_layers == 0
    assert (
        f"3 frozen: predicted {saving.predicted:.2f} of a full step, measured {saving.measured:.2f}" in decision.reason
    )


def test_a_normal_model_keeps_its_promise() -> None:
    decision, saving = trained(computes_on=False)
    assert not saving.absent
    assert saving.measured < saving.predicted + 0.1  # the optimizer and forward are cheaper, too, which nobody promised
    assert "of a full step" not in decision.reason
