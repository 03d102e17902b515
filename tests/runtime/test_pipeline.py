"""A chain in pipeline stages over two gloo processes, against the same training in one process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from pipeline_jobs import (
    LOSS,
    NEVER,
    close,
    compare,
    diverged,
    flops,
    measured,
    parallelism,
    run,
    run_with,
    wire_and_work,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from two_ranks import Ranks

from icefrog.errors import UserError
from icefrog.estimate.throughput import throughput
from icefrog.profile import Pipelined
from icefrog.runtime import Guards, LayerElastic, Pipeline, Stopped, protocol


@pytest.mark.parametrize(
    ("kind", "options"),
    [("pipeline", {}), ("gpipe", {"accum_steps": 2}), ("replicas", {}), ("pipeline", {"max_grad_norm": 0.05})],
)
def test_two_ranks_train_as_one_process_through_freezing_and_unfreezing(
    ranks: Ranks, kind: str, options: dict[str, Any]
) -> None:
    boundaries = {1: 2, 2: 4, 3: 1, 4: 0}
    one = run("single", boundaries, 6, **options)
    found = ranks.run(run_with, kind, boundaries, 6, options)
    for two in found:
        assert close(one["params"], two["params"])
        assert close(one["moments"], two["moments"])
        assert (two["step"], two["samples"]) == (one["step"], one["samples"])
        assert min(two["variance"]) > 0
        assert two["variance"] == found[0]["variance"]
        assert two["flops"] == pytest.approx(one["flops"])
    held = [two["held"] for two in found]
    assert sum(held) == one["held"] * (2 if kind == "replicas" else 1)  # a stage's parameters are on its rank alone
    assert sum(two["own_states"] for two in found) == one["own_states"] * (2 if kind == "replicas" else 1)


def test_resized_over_kinds_at_differing_boundaries_it_equals_an_uninterrupted_run(
    ranks: Ranks, tmp_path: Path
) -> None:
    boundaries = {1: 3, 3: 1, 4: 0, 5: 4}
    one = run("single", boundaries, 7)
    folder = str(tmp_path)

    def options(attempt: str, stop_at: int) -> dict[str, Any]:
        return {"folder": folder, "attempt": attempt, "stop_at": stop_at}

    assert ranks.run(run_with, "pipeline", boundaries, 7, options("a", 5)) == ["stopped"] * 2  # a whole stage is frozen
    assert run("pipeline", boundaries, 7, **options("b", 9)) == "stopped"  # one process, one stage
    assert ranks.run(run_with, "ddp", boundaries, 7, options("c", 13)) == ["stopped"] * 2
    assert ranks.run(run_with, "replicas", boundaries, 7, options("d", 17)) == ["stopped"] * 2
    assert ranks.run(run_with, "pipeline", boundaries, 7, options("e", 22)) == ["stopped"] * 2
    last = run("single", boundaries, 7, **options("f", NEVER))
    assert last["step"] == one["step"]
    assert close(one["params"], last["params"])
    assert close(one["moments"], last["moments"])


# --- freezing: bits, bytes, FLOPs


def test_a_frozen_stage_only_runs_forward_and_the_one_behind_it_sends_no_gradient(ranks: Ranks) -> None:
    depths = [0, 1, 2, 3, 4, 1, 0]
    first, second = ranks.run(wire_and_work, "pipeline", depths)
    activation = 16 * 6 * 4
    for depth, one, two in zip(depths, first, second, strict=True):  # stages: layers 0-1 and 2-4
        assert one["sent"] == activation  # activations always go forward
        assert two["sent"] == (activation if depth < 2 else 0)
        assert one["flops"] == flops(range(2), depth)
        assert two["flops"] == flops(range(2, 5), depth)
        assert (one["kept_for_backward"] == 0) == (depth >= 2)
        assert two["kept_for_backward"] > 0
        assert one["same_bits"]
        assert two["same_bits"]
        assert one["reduced"] == two["reduced"] == 0


def test_replicas_send_gradients_of_layers_that_train_and_no_others(ranks: Ranks) -> None:
    depths = [0, 2, 4, 0]
    sizes = [4 * sum(p.numel() for p in block.parameters()) for block in models.mlp(depth=5)]
    for found in ranks.run(wire_and_work, "replicas", depths):
        assert [at["reduced"] for at in found] == [sum(sizes[depth:]) for depth in depths]
        assert [at["flops"] for at in found] == [flops(range(5), depth, 8) for depth in depths]
        assert all(at["same_bits"] for at in found)
        assert all(at["sent"] == 0 for at in found)


def normalised(depth: int) -> list[Any]:
    """Buffers of a network with normalisation and dropout: those of frozen layers stay, the others move."""
    model = models.bn_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    elastic = LayerElastic(model, optimizer, rule="none", parallel=parallelism("pipeline"))
    x, y = models.data()
    moved = []
    for frozen in (depth, 0):
        elastic.freeze(frozen)
        before = {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.device.type == "cpu"}
        for step in range(3):
            elastic.model.train()  # does not wake what is frozen
            elastic.train_step(x[step * 16 : step * 16 + 16], y[step * 16 : step * 16 + 16])
            optimizer.step()
            optimizer.zero_grad()
        now = {name: buffer.clone() for name, buffer in model.named_buffers() if name in before}
        moved.append({name.split(".")[0] for name, old in before.items() if not torch.equal(old, now[name])})
        elastic.model.eval()
        with torch.no_grad():
            same = torch.equal(elastic.model(x), elastic.model(x))  # evaluation draws nothing and moves nothing
        moved.append(
            same and all(torch.equal(now[name], buffer) for name, buffer in model.named_buffers() if name in now)
        )
    elastic.close()
    return moved


def test_buffers_of_frozen_layers_stay_and_no_hidden_pass_moves_the_others(ranks: Ranks) -> None:
    first, second = ranks.run(normalised, 3)
    assert first == [set(), True, {"0", "1"}, True]
    assert second[1:] == [True, {"2"}, True]
    assert second[0] == set()
    for found in ranks.run(normalised, 1):
        assert found[0] in ({"1"}, {"2"})


# --- statistics, evaluation, errors


@pytest.mark.parametrize(("kind", "pieces"), [("pipeline", 2), ("replicas", 4)])
def test_statistics_are_those_of_the_batch_in_pieces(ranks: Ranks, kind: str, pieces: int) -> None:
    model = models.mlp(depth=5)
    x, y = models.data(16)
    layers = LayerElastic(model, torch.optim.SGD(model.parameters(), lr=0.0), rule="none").layers
    grads = []
    for part, label in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
        model.zero_grad()
        LOSS(model(part), label).backward()
        grads.append([torch.cat([p.grad.flatten() for p in layer.params.values()]) for layer in layers])
    for variance, sqr_norm in ranks.run(measured, kind):
        for index in range(len(layers)):
            rows = torch.stack([row[index] for row in grads])
            trace = float(rows.var(dim=0).sum()) / pieces  # tr Cov of the batch's gradient
            assert variance[index] == pytest.approx(16 * trace, rel=1e-4)
            assert sqr_norm[index] == pytest.approx(float(rows.mean(0).square().sum()) - trace, rel=1e-4, abs=1e-7)


def tuned(kind: str) -> Any:
    """What the tuner decides from, after a hundred steps."""
    model = models.mlp(depth=5, dim=32)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    elastic = LayerElastic(
        model, optimizer, guards=Guards(0, 0, 0, 0), tune_every_steps=10, global_batch=32, parallel=parallelism(kind)
    )
    x, y = models.data(320, 32)
    loader = DataLoader(TensorDataset(x, y), batch_sampler=elastic.sampler(320))
    told = []
    for epoch in elastic.epochs(20):
        for part, label in loader:
            elastic.train_step(part, label)
            optimizer.step()
            optimizer.zero_grad()
        decision = elastic.end_epoch()
        told.append((decision.frozen_layers, decision.reason, decision.effective_progress))
        if epoch == 9:
            break
    profile = elastic.profile()
    assert profile is not None
    speed = [float(throughput(profile, elastic.world_size, 1, 32 // elastic.world_size, depth)) for depth in range(5)]
    elastic.close()
    return told, profile.parallel, speed


@pytest.mark.parametrize("kind", ["pipeline", "replicas"])
def test_the_tuner_decides_for_all_from_what_all_stages_measured(ranks: Ranks, kind: str) -> None:
    first, second = ranks.run(tuned, kind)
    assert first == second
    told, parallel, speed = first
    assert not told[-1][1].startswith("not ready")
    assert told[-1][2] > 0
    expected = {"pipeline": (None, (2, 3)), "replicas": (1, (5,))}[kind]
    assert (parallel.num_stages, parallel.stage_layers) == expected
    assert parallel.micro_batches == 4
    assert speed == sorted(speed)
    assert speed[-1] > speed[0]


def probed(folder: str) -> Any:
    """A run that is asked to measure itself."""
    grant = {"num_gpus": 2, "batch_per_gpu": 8, "global_batch": 16, "probe": {"steps": 4, "depths": [0, 2, 3]}}
    attempt_dir = Path(folder) / "probe"
    attempt_dir.mkdir(exist_ok=True)
    env = {**os.environ, protocol.ENV_ATTEMPT_DIR: str(attempt_dir), protocol.ENV_GRANT: json.dumps(grant)}
    model = models.mlp(depth=5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    elastic = LayerElastic(model, optimizer, parallel=parallelism("pipeline"), env=env)
    loader = DataLoader(TensorDataset(*models.data(64)), batch_sampler=elastic.sampler(64))
    try:
        for _ in elastic.epochs(NEVER):
            for x, y in loader:
                elastic.train_step(x, y)
                optimizer.step()
                optimizer.zero_grad()
            elastic.end_epoch()
    except Stopped:
        elastic.close()
    return protocol.Probed.model_validate_json((attempt_dir / "probe.json").read_text()) if elastic.rank == 0 else None


def test_a_pipeline_is_measured_over_all_stages(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(probed, str(tmp_path))[0]
    assert found.parallel == Pipelined(micro_batches=4, stage_layers=(2, 3))
    assert [cell.frozen_layers for cell in found.cells] == [0, 2, 3]
    assert {(cell.num_gpus, cell.batch_per_gpu) for cell in found.cells} == {(2, 8)}
    assert all(cell.num_steps >= 4 and cell.fwd_s > 0 and cell.bwd_s > 0 for cell in found.cells)
    assert [layer.activation_bytes for layer in found.layers] == [24.0] * 4 + [12.0]
    assert all(layer.fwd_s > 0 and layer.bwd_s > 0 for layer in found.layers)
    assert [layer.flops for layer in found.layers] == [3 * 2 * 36] * 4 + [3 * 2 * 18]


def test_replicas_that_differ_are_found_by_all(ranks: Ranks) -> None:
    for found in ranks.run(diverged, "replicas"):
        assert "'0.0' differs between rank 0 and ranks [1]" in found


def test_stopped_and_resumed_it_is_the_uninterrupted_run_to_the_bit(ranks: Ranks, tmp_path: Path) -> None:
    boundaries = {1: 3, 2: 1}
    whole, _ = ranks.run(run_with, "pipeline", boundaries, 4, {})
    stop = {"folder": str(tmp_path), "attempt": "a", "stop_at": 6}
    assert ranks.run(run_with, "pipeline", boundaries, 4, stop) == ["stopped"] * 2
    again, _ = ranks.run(run_with, "pipeline", boundaries, 4, {"folder": str(tmp_path), "attempt": "b"})
    assert all(whole[key] == again[key] for key in ("params", "moments", "variance", "step", "samples"))


def evaluated() -> Any:
    """Outputs for batches that do and do not divide, and what the loss was; other ranks' data is ignored."""
    model = models.mlp(depth=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = LayerElastic(model, optimizer, rule="none", parallel=parallelism("pipeline"))
    x, y = models.data(61)
    if elastic.rank > 0:
        x, y = None, None
    with torch.no_grad():
        outputs = [elastic.model(x).tolist(), elastic.model(x[:3] if x is not None else None).tolist()]
    losses = [float(elastic.train_step(x, y)) for _ in range(2)]
    optimizer.step()
    problems = []
    for wrong in ((x, [1, 2]), (x, y[:3] if y is not None else None), (7, y)):
        try:
            elastic.train_step(*wrong)
        except UserError as error:
            problems.append(str(error))
    try:
        elastic.model(x)
    except UserError as error:
        problems.append(str(error))
    try:
        elastic.cache_prefix()
    except UserError as error:
        problems.append(str(error))
    losses.append(float(elastic.train_step(x, y)))
    elastic.close()
    return outputs, losses, problems


def test_all_ranks_get_outputs_losses_and_errors(ranks: Ranks) -> None:
    model = models.mlp(depth=5)
    x, y = models.data(61)
    loss = LOSS(model(x), y)
    for outputs, losses, problems in ranks.run(evaluated):
        assert torch.allclose(torch.tensor(outputs[0]), model(x), atol=1e-6)
        assert torch.allclose(torch.tensor(outputs[1]), model(x[:3]), atol=1e-6)
        assert losses[:2] == pytest.approx([loss.item()] * 2)
        assert losses[2] < losses[0]
        assert [problem.split(",")[0].split(";")[0] for problem in problems] == [
            "a pipeline's batch is one tensor",
            "a pipeline's batch and targets must have the same first dimension",
            "a pipeline's batch is one tensor",
            "the forward pass alone cannot be trained on in a pipeline",
            "the prefix cache does not work with parallel='pipeline'",
        ]


def test_what_cannot_be_a_pipeline_is_refused() -> None:
    def elastic(model: nn.Module, **options: Any) -> LayerElastic:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return LayerElastic(model, optimizer, parallel=Pipeline(LOSS, **options))

    with pytest.raises(UserError, match="forward of its own"):
        elastic(models.Tied())
    with pytest.raises(UserError, match="1 ranks cannot form replicas of 2 stages"):
        elastic(models.mlp(), num_stages=2)
    with pytest.raises(UserError, match="3 layer_costs for 4 layers"):
        elastic(models.mlp(), layer_costs=[1, 2, 3])
    with pytest.raises(UserError, match="unknown schedule"):
        Pipeline(LOSS, schedule="zb")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="0 micro-batches"):
        Pipeline(LOSS, micro_batches=0)


# --- any order of events


@pytest.mark.parametrize("seed", [0, 1])
def test_events_in_odd_orders_over_changing_kinds_equal_one_process(ranks: Ranks, seed: int) -> None:
    compare(ranks, ["pipeline", "gpipe", "replicas", "ddp", "alone"], seed, 5)
