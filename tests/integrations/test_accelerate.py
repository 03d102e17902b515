"""A training loop of accelerate's own tutorial with the three lines. Run by ``make test-adapters``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate", reason="pip install 'icefrog[huggingface]', or make test-adapters")

from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from icefrog.runtime import LayerElastic  # noqa: E402

pytestmark = pytest.mark.adapters


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def script(*, elastic_lines: bool, accumulate: int = 1, **options: Any) -> tuple[dict[str, Any], Any, Any]:
    """The loop of the tutorial; ``freeze``: the depth of each epoch."""
    depths, scale, overflows = (options.pop(name, None) for name in ("freeze", "scale", "overflows"))
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **options)
    if scale is not None:  # fp16 asks for a GPU: what it makes there, in the precision that a CPU computes in
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
        accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1), nn.Tanh()) for _ in range(3)]
    model: Any = nn.Sequential(*blocks, nn.Linear(6, 3))
    x = torch.randn(64, 6)
    loader: Any = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=16, shuffle=True)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule: Any = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    elastic = LayerElastic(model, optimizer, env={}, rule="none", stats_every=1) if elastic_lines else None
    batch = 0
    for epoch in elastic.epochs(6) if elastic is not None else range(6):
        if elastic is not None and depths:
            elastic.freeze(depths[epoch])
        model.train()
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss * torch.inf if batch in (overflows or ()) else loss)
                batch += 1
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        if elastic is not None:
            elastic.end_epoch()
            if epoch == 5:  # skipped steps are no progress: there would be more
                break
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if scale is not None:
        state["scale"] = torch.tensor([accelerator.scaler.get_scale(), schedule.state_dict()["last_epoch"]])
    return state, elastic, optimizer


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"mixed_precision": "bf16", "accumulate": 4}])
def test_with_nothing_frozen_a_script_does_the_same_to_the_bit(options: dict[str, Any]) -> None:
    without, _, _ = script(elastic_lines=False, **options)
    with_it, elastic, _ = script(elastic_lines=True, **options)
    assert all(torch.equal(with_it[name], value) for name, value in without.items())
    assert elastic.effective_samples == 6 * 64
    assert elastic._at.step == 6 * 4 // options.get("accumulate", 1)  # accelerate's own accumulation


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_scaler_of_fp16_is_found_and_skips_the_same_steps(accumulate: int) -> None:
    options: dict[str, Any] = {"scale": 2.0**10, "overflows": (3, 4, 10), "accumulate": accumulate}
    without, _, _ = script(elastic_lines=False, **options)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    with_it, elastic, _ = script(elastic_lines=True, **options)
    assert without.keys() == with_it.keys()
    assert all(torch.equal(with_it[name], value) for name, value in without.items())
    assert elastic._at.step == float(without["scale"][1])  # the schedule skips them, too
    elastic.close()


def test_a_frozen_prefix_stays_and_the_wrapper_is_given_back() -> None:
    model, elastic, optimizer = script(elastic_lines=True, accumulate=2, freeze=[2, 2, 2, 2, 2, 2])
    torch.manual_seed(0)
    start = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6)) for _ in range(3)])
    assert torch.equal(model["0.0.weight"], start[0][0].weight)
    assert torch.equal(model["1.0.weight"], start[1][0].weight)
    assert not torch.equal(model["2.0.weight"], start[2][0].weight)
    elastic.close()
    assert "step" not in vars(optimizer.optimizer) or not hasattr(
        vars(optimizer.optimizer)["step"], "_of_layer_elastic"
    )


def resumable(folder: Path | None, steps: int) -> tuple[LayerElastic, Any, dict[str, Any]]:
    """A loop with ``save_state``: from a folder on, or from the start; the state at its end."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1), nn.Tanh()) for _ in range(3)]
    model: Any = nn.Sequential(*blocks, nn.Linear(6, 3))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    elastic = LayerElastic(model, optimizer, env={}, rule="autofreeze", tune_every_steps=4)
    accelerator.register_for_checkpointing(elastic)
    if folder is not None:
        accelerator.load_state(str(folder))
    elastic.begin(8)
    x = torch.randn(256, 6, generator=torch.Generator().manual_seed(1))
    while elastic._at.step < steps:
        if elastic._at.step == 6 and elastic.frozen_layers == 0:
            elastic.freeze(1)
        for micro in range(2):
            at = (elastic._at.step * 2 + micro) * 8 % 256
            with accelerator.accumulate(model):
                logits = elastic.model(x[at : at + 8])
                accelerator.backward(nn.functional.cross_entropy(logits, x[at : at + 8, :3].argmax(1)))
                optimizer.step()
                optimizer.zero_grad()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return elastic, accelerator, state


def test_its_checkpoints_hold_what_is_registered_with_it(tmp_path: Path) -> None:
    whole, _, expected = resumable(None, 30)
    first, accelerator, _ = resumable(None, 13)
    accelerator.save_state(str(tmp_path))
    assert first.frozen_layers > 0
    resumed, _, state = resumable(tmp_path, 30)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert resumed.frozen_layers == whole.frozen_layers
    assert resumed.effective_samples == whole.effective_samples
