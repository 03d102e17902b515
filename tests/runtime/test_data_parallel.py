"""Two gloo processes on the loopback device. Few spawns: each job checks one family of faults and returns what it saw."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from two_ranks import Ranks

from icefrog.errors import UserError
from icefrog.runtime import DivergenceError, LayerElastic, Stopped, protocol

SAMPLES, BATCH = 61, 16  # the last global batch is smaller, and uneven over two ranks


def fit(  # type: ignore[no-untyped-def]
    folder: Path | None,
    boundaries: dict[int, int],
    epochs: int,
    attempt: str = "a",
    stop_at: int | None = None,
    accum: int = 1,
):
    """``epochs`` epochs with boundaries by hand; the stop file appears at an optimizer step on rank 0."""
    env = dict(os.environ)
    if folder is not None:
        attempt_dir = folder / attempt
        attempt_dir.mkdir(parents=True, exist_ok=True)
        env |= {protocol.ENV_ATTEMPT_DIR: str(attempt_dir), protocol.ENV_CHECKPOINT_DIR: str(folder / "c")}
    model = models.mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    elastic = LayerElastic(model, optimizer, rule="none", global_batch=BATCH, accum_steps=accum, env=env)
    model = elastic.model
    loader = DataLoader(TensorDataset(*models.data(SAMPLES)), batch_sampler=elastic.sampler(SAMPLES))
    for epoch in elastic.epochs(1000):  # P0 out of reach: psi, and so its end, depends on how the statistics are taken
        if epoch in boundaries:
            elastic.freeze(boundaries[epoch])
        for x, y in loader:
            if elastic._at.step == stop_at and elastic.rank == 0:
                (attempt_dir / "stop").touch()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        elastic.end_epoch(metric=float(elastic.rank))
        if epoch == epochs - 1:
            break
    return elastic, optimizer


def outcome(elastic: LayerElastic) -> dict[str, Any]:
    elastic_state = elastic.state_dict()
    found = {
        "params": {name: value.tolist() for name, value in elastic_state["model"].items()},
        "moments": {name: state["exp_avg_sq"].tolist() for name, state in elastic_state["optimizer"]["state"].items()},
        "effective": elastic.effective_samples,
        "step": elastic._at.step,
        "variance": elastic._engine.tracker.variance.tolist(),
        "metric": elastic._at.metric,
    }
    elastic.close()
    return found


def whole_run(boundaries: dict[int, int], epochs: int, accum: int = 1) -> dict[str, Any]:
    elastic, _ = fit(None, boundaries, epochs, accum=accum)
    return outcome(elastic)


def close(a: dict[str, Any], b: dict[str, Any], atol: float = 2e-5) -> bool:
    return all(torch.allclose(torch.tensor(a[key]), torch.tensor(b[key]), atol=atol) for key in a)


@pytest.mark.parametrize("accum", [1, 2])
def test_two_ranks_train_as_one_process_through_freezing_and_unfreezing(ranks: Ranks, accum: int) -> None:
    boundaries = {1: 2, 2: 3, 3: 0}
    one = whole_run(boundaries, 5)
    two, again = ranks.run(whole_run, boundaries, 5, accum)
    assert two["params"] == again["params"]  # F2: bit-equal across ranks
    assert close(one["params"], two["params"])
    assert close(one["moments"], two["moments"])
    assert two["step"] == one["step"]
    assert two["metric"] == 0.5  # the mean over the ranks
    assert min(two["variance"]) > 0


def resumed_run(folder: str, attempt: str, epochs: int, boundaries: dict[int, int], stop_at: int | None) -> Any:
    try:
        elastic, _ = fit(Path(folder), boundaries, epochs, attempt, stop_at)
    except Stopped:
        return "stopped"
    return outcome(elastic)


def test_resize_1_2_1_at_differing_boundaries_equals_an_uninterrupted_run(
    ranks: Ranks, tmp_path: Path
) -> None:  # F11, F12
    boundaries = {1: 2, 3: 1, 4: 0}
    one = whole_run(boundaries, 6)
    folder = str(tmp_path)
    assert resumed_run(folder, "a", 6, boundaries, 5) == "stopped"  # in epoch 1, 2 layers frozen
    assert ranks.run(resumed_run, folder, "b", 6, boundaries, 14) == ["stopped", "stopped"]  # in epoch 3, 1 layer
    last = resumed_run(folder, "c", 6, boundaries, None)
    assert last["step"] == one["step"]
    assert close(one["params"], last["params"])
    assert close(one["moments"], last["moments"])
    lines = [
        protocol.decode(line)
        for attempt in "abc"
        for line in (tmp_path / attempt / "reports.jsonl").read_bytes().splitlines()
    ]
    assert [line.resumed for line in lines if isinstance(line, protocol.Started)] == [False, True, True]
    for kind in ("progress", "checkpointed"):  # checkpoints are reported when they are on disk, beside training
        effective = [line.effective_samples for line in lines if line.kind == kind]
        assert effective == sorted(effective)


def wire_and_faults() -> dict[str, Any]:
    model = models.bn_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    elastic = LayerElastic(model, optimizer, rule="none")
    statistics = elastic._engine.statistics
    rank = elastic.rank
    x, y = models.data()
    found: dict[str, Any] = {"bytes": [], "same": [], "buffers": []}
    for depth in (0, 2, 3, 1, 0):  # F1: wrapped before freezing; F2: un-freezing too
        elastic.freeze(depth)
        before = [models.bytes_of(layer) for layer in elastic.layers[:depth]]
        sent = statistics.bytes_reduced
        for step in range(3):
            elastic.model.train()
            part = slice(step * 16 + rank * 8, step * 16 + rank * 8 + 8)
            nn.functional.cross_entropy(elastic.model(x[part]), y[part]).backward()
            optimizer.step()
            optimizer.zero_grad()
        found["bytes"].append((statistics.bytes_reduced - sent) // 3)
        found["same"].append([models.bytes_of(layer) for layer in elastic.layers[:depth]] == before)  # F6
        found["buffers"].append([b.hex() for b in models.bytes_of(elastic.layers[0]).values()] if depth else [])
    found["grad_bytes"] = [layer.param_bytes for layer in elastic.layers]
    found["names"] = sorted(elastic.model.state_dict()) == sorted(model.state_dict())
    found["wraps"] = elastic._engine.parallel.wraps
    with torch.no_grad():
        if rank == 0:  # validation on one rank alone does not hang
            elastic.model(x)
    elastic.end_epoch()
    with torch.no_grad():
        if rank == 1:
            model[0][0].weight[0, 0] += 1e-6
    try:
        elastic.end_epoch()
        found["divergence"] = "unnoticed"
    except DivergenceError as error:
        found["divergence"] = str(error)
    elastic.close()
    return found


def test_bytes_on_the_wire_fall_ranks_stay_in_step_and_divergence_is_caught(ranks: Ranks) -> None:
    first, second = ranks.run(wire_and_faults)
    sizes = first["grad_bytes"]
    assert first["bytes"] == [sum(sizes), sum(sizes[2:]), sum(sizes[3:]), sum(sizes[1:]), sum(sizes)]
    assert all(first["same"])
    assert all(second["same"])
    assert first["buffers"] == second["buffers"]  # F6: a frozen layer's statistics are the same on every rank
    assert first["names"]
    assert first["wraps"] == 5
    for found in (first, second):
        assert "'0.0' differs" in found["divergence"]


def tuned_run(folder: str) -> dict[str, Any]:
    grant = {"num_gpus": 2, "batch_per_gpu": 8, "global_batch": 16, "target": {"value": 2.0}}
    attempt_dir = Path(folder) / "tuned"
    attempt_dir.mkdir(exist_ok=True)
    env = {
        **os.environ,
        protocol.ENV_ATTEMPT_DIR: str(attempt_dir),
        protocol.ENV_GRANT: json.dumps(grant),
        protocol.ENV_CHECKPOINT_DIR: str(Path(folder) / "tuned-c"),
    }
    model = models.mlp(dim=32, depth=6)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    elastic = LayerElastic(model, optimizer, tune_every_steps=5, env=env)
    x, y = models.data(160, 32)
    loader = DataLoader(TensorDataset(x, y % 3), batch_sampler=elastic.sampler(160))
    model = elastic.model
    for _ in elastic.epochs(6):
        for part, label in loader:
            nn.functional.cross_entropy(model(part), label).backward()
            optimizer.step()
            optimizer.zero_grad()
        decision = elastic.end_epoch(metric=0.5 if elastic.rank == 0 else None)
    elastic.close()
    return {"frozen": decision.frozen_layers, "metric": decision.metric, "outcome": elastic.outcome}


def test_rank_0_decides_for_all(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(tuned_run, str(tmp_path))
    assert first == second
    assert first["metric"] == 0.5
    assert first["outcome"] == "target_missed"
    lines = [protocol.decode(line) for line in (tmp_path / "tuned/reports.jsonl").read_bytes().splitlines()]
    progress = [line for line in lines if isinstance(line, protocol.Progress)]
    assert progress[-1].variance is not None
    assert progress[-1].profile is not None
    assert progress[-1].profile.throughput.sync.intra_alpha_s > 0
    assert "synchronisation measured" in progress[-1].profile.provenance
    assert isinstance(lines[-1], protocol.Finished)


def moved_inside_an_accumulation() -> dict[str, Any]:
    """Three micro-batches an epoch, two to a step; compared with a plain loop over all ranks' micro-batches."""
    x, y = models.data()
    model, plain = models.mlp(), models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    elastic = LayerElastic(model, optimizer, rule="none", accum_steps=2)
    in_force: list[int] = []
    epochs = elastic.epochs(1000)
    count = 0
    for wanted in (1, 3, 0, 2, 0, 0):
        next(epochs)
        for _ in range(3):
            at = (2 * count + elastic.rank) * 4 % 64
            nn.functional.cross_entropy(elastic.model(x[at : at + 4]), y[at : at + 4]).backward()
            if count % 2:
                in_force.append(elastic.frozen_layers)
            optimizer.step()
            optimizer.zero_grad()
            count += 1
        elastic.freeze(wanted)
        elastic.end_epoch()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step, depth in enumerate(in_force):
        parts = [(4 * step + part) * 4 % 64 for part in range(4)]
        sum(nn.functional.cross_entropy(plain(x[at : at + 4]), y[at : at + 4]) / 4 for at in parts).backward()  # type: ignore[union-attr]
        for layer in plain[:depth]:
            for param in layer.parameters():
                param.grad = None
        reference.step()
        reference.zero_grad()
    mine = {name: value.tolist() for name, value in model.state_dict().items()}
    elastic.close()
    return {"mine": mine, "plain": {n: v.tolist() for n, v in plain.state_dict().items()}, "depths": in_force}


def test_moves_inside_an_accumulation_keep_ranks_and_gradients_right(ranks: Ranks) -> None:
    first, second = ranks.run(moved_inside_an_accumulation)
    assert first["depths"] == [0, 0, 1, 3, 3, 0, 2, 2, 0]
    assert first["mine"] == second["mine"]
    assert close(first["mine"], first["plain"])


class SharedTanh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.act, self.b, self.c = nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.act(self.b(self.act(self.a(x)))))


def opened_late(mid_epoch: bool) -> dict[str, Any]:
    """A layer frozen by the user is opened by him in mid-run, in double precision, with a shared activation."""
    model = SharedTanh().double()
    model.b.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = LayerElastic(model, optimizer, rule="none")
    x, y = models.data()
    part = slice(elastic.rank * 8, elastic.rank * 8 + 8)
    start = model.b.weight.detach().clone()
    epochs = elastic.epochs(1000)
    for epoch in range(4):
        next(epochs)
        for step in range(3):
            if epoch == 1 and step == (1 if mid_epoch else 2):
                model.b.requires_grad_(True)
            nn.functional.cross_entropy(elastic.model(x[part].double()), y[part]).backward()
            optimizer.step()
            optimizer.zero_grad()
        elastic.end_epoch()
    elastic.freeze(1)
    nn.functional.cross_entropy(elastic.model(x[part].double()), y[part]).backward()
    optimizer.step()
    trained = not torch.equal(start, model.b.weight)
    params = {name: value.tolist() for name, value in model.state_dict().items()}
    elastic.close()
    return {"params": params, "trained": trained}


@pytest.mark.parametrize("mid_epoch", [True, False])
def test_a_layer_opened_by_the_user_is_synchronised(ranks: Ranks, mid_epoch: bool) -> None:
    first, second = ranks.run(opened_late, mid_epoch)
    assert first["params"] == second["params"]
    assert first["trained"]


def drifted_outside_the_layers() -> str:
    model = SharedTanh()
    model.b.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = LayerElastic(model, optimizer, rule="none")
    model.b.weight.data[0, 0] += elastic.rank
    try:
        elastic.end_epoch()
    except DivergenceError as error:
        return str(error)
    finally:
        elastic.close()
    return "unnoticed"


def test_ranks_that_differ_in_a_parameter_outside_all_layers_are_noticed(ranks: Ranks) -> None:
    assert all("frozen by you" in found for found in ranks.run(drifted_outside_the_layers))


def moved_between_forward_and_backward(looked_only: bool) -> str:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = LayerElastic(model, optimizer, rule="none")
    x, y = models.data()
    share = slice(elastic.rank, None, 2)
    found = "trained"
    try:
        loss = nn.functional.cross_entropy(elastic.model(x[share]), y[share])
        elastic.freeze(1)
        if looked_only:  # the first pass was a look at the loss, without torch.no_grad()
            loss = nn.functional.cross_entropy(elastic.model(x[share]), y[share])
        loss.backward()
        optimizer.step()
        elastic.end_epoch()
    except UserError as error:
        found = str(error)
    elastic.close()
    return found


def test_a_boundary_moved_between_forward_and_backward_is_refused_where_ranks_would_diverge(ranks: Ranks) -> None:
    assert ranks.run(moved_between_forward_and_backward, True) == ["trained"] * 2
    for found in ranks.run(moved_between_forward_and_backward, False):
        assert "moved between a forward pass and its backward" in found
