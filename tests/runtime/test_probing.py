"""A run that is asked to measure itself: depths, steps, layers; it decides and saves nothing, and leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from icefrog.errors import UserError
from icefrog.profile import Replicated
from icefrog.runtime import LayerElastic, Stopped
from icefrog.runtime.layers import find_pieces, group_pieces
from icefrog.runtime.probing import CoreClock, LayerClock
from icefrog.runtime.protocol import Probed
from icefrog.spec import Target

SAMPLES, BATCH, WIDTH = 96, 16, 8


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)
    )


def train(folder: Path, probe: dict[str, Any], own_batch: int | None = None, **options: Any) -> LayerElastic:
    """A loop that would go on for ever; ends by `Stopped`."""
    grant = {"num_gpus": 1, "batch_per_gpu": BATCH, "global_batch": BATCH, "probe": probe}
    env = {"ICEFROG_GRANT": json.dumps(grant), "ICEFROG_ATTEMPT_DIR": str(folder)}
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    elastic = LayerElastic(net, optimizer, env=env, **options)
    x, y = torch.randn(SAMPLES, WIDTH), torch.randint(0, 2, (SAMPLES,))
    batches = list(torch.arange(SAMPLES).split(own_batch)) if own_batch else elastic.sampler(SAMPLES, global_batch=48)

    def loop() -> None:
        for _ in elastic.epochs(10_000):
            for batch in batches:
                rows = torch.as_tensor(batch)
                nn.functional.cross_entropy(elastic.model(x[rows]), y[rows]).backward()
                optimizer.step()
                optimizer.zero_grad()
            elastic.end_epoch(metric=1.0)

    with pytest.raises(Stopped):
        loop()
    elastic.close()
    return elastic


def test_every_depth_is_measured_and_nothing_else_happens(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    elastic = train(
        tmp_path,
        {"steps": 8, "depths": [0, 2, 3]},
        rule="tuner",
        target=Target(value=0.5),
        checkpoint_dir=checkpoints,
        tune_every_steps=4,
    )
    found = Probed.model_validate_json((tmp_path / "probe.json").read_text())
    assert found.parallel == Replicated()
    assert found.samples_per_epoch == SAMPLES
    assert [cell.frozen_layers for cell in found.cells] == [0, 2, 3]
    for cell in found.cells:
        assert (cell.num_gpus, cell.batch_per_gpu, cell.accum_steps) == (1, BATCH, 1)  # not the script's own 48
        assert cell.num_steps >= 8
        assert 0 < cell.fwd_s + cell.bwd_s < cell.step_s
        assert cell.mem_bytes > 1e6
    assert [layer.name for layer in found.layers] == [layer.name for layer in elastic.layers]
    assert all(layer.fwd_s > 0 and layer.bwd_s > 0 for layer in found.layers)
    assert [layer.activation_bytes for layer in found.layers] == [32 * 4, 32 * 4, 32 * 4, 2 * 4]
    assert found.layers[1].flops == 3 * 2 * 32 * 32
    assert not checkpoints.exists() or not list(checkpoints.iterdir())
    assert elastic.outcome is None


def test_by_default_quarters_of_the_layers(tmp_path: Path) -> None:
    train(tmp_path, {"steps": 4})
    found = Probed.model_validate_json((tmp_path / "probe.json").read_text())
    assert [cell.frozen_layers for cell in found.cells] == [0, 1, 2, 3]


def test_a_script_s_own_batches_are_measured_as_what_they_are(tmp_path: Path) -> None:
    train(tmp_path, {"steps": 4, "depths": [0]}, own_batch=24)
    found = Probed.model_validate_json((tmp_path / "probe.json").read_text())
    assert [cell.batch_per_gpu for cell in found.cells] == [24]


def test_the_cache_of_the_prefix_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With it, whole passes at one depth would be read back, and not computed."""
    real = LayerElastic.epochs

    def cached(self: LayerElastic, max_epochs: int) -> Any:
        self.cache_prefix("disk")
        return real(self, max_epochs)

    monkeypatch.setattr(LayerElastic, "epochs", cached)
    train(tmp_path, {"steps": 16, "depths": [3]})
    found = Probed.model_validate_json((tmp_path / "probe.json").read_text())
    assert found.cells[0].num_steps >= 16


def test_a_depth_that_leaves_nothing_to_train_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot freeze 4 of 4 layers"):
        train(tmp_path, {"steps": 4, "depths": [0, 4]})


def test_a_layer_s_forward_time_is_its_own() -> None:
    net, now = model(), [0.0]

    def slow(seconds: float) -> Any:
        def hook(*_: Any) -> None:
            now[0] += seconds

        return hook

    handles = [net[i].register_forward_pre_hook(slow(t)) for i, t in ((1, 1.0), (2, 5.0), (5, 2.0))]
    layers = group_pieces(net, find_pieces(net))
    clock = LayerClock(net, layers, lambda: now[0])
    for _ in range(3):
        net(torch.randn(4, WIDTH))
    with torch.no_grad():
        net(torch.randn(4, WIDTH))  # not a training pass
    clock.close()
    net(torch.randn(4, WIDTH))
    for handle in handles:
        handle.remove()
    assert clock.passes == 3
    # Each activation counts with the layer that it joined.
    assert sum(clock.seconds) == pytest.approx(8.0)
    assert clock.output_bytes == [4 * 32 * 4] * 3 + [4 * 2 * 4]


def test_waiting_for_a_core_is_no_time() -> None:
    clock = CoreClock()
    first = clock()
    total = sum(i * i for i in range(200_000))
    assert total > 0
    assert clock() > first
    clock.close()
    assert clock() > 0


def test_a_wait_between_the_clocks_two_readings_is_taken_off_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = CoreClock()
    wall_s, waited_ns, preempted = 10.0, 0, False

    def perf_counter() -> float:
        nonlocal wall_s, waited_ns, preempted
        read_s = wall_s
        if not preempted:  # the core is taken away between the two readings
            wall_s, waited_ns, preempted = wall_s + 2.0, waited_ns + 2_000_000_000, True
        return read_s

    monkeypatch.setattr("icefrog.runtime.probing.time.perf_counter", perf_counter)
    monkeypatch.setattr("icefrog.runtime.probing.os.pread", lambda *_: f"0 {waited_ns} 0".encode())
    clock._waited = clock._waited or 0  # also where the kernel does not tell
    assert [clock(), clock()] == [10.0, 10.0]
