"""Sharded data parallelism over two gloo ranks: the same training, and frozen layers cost neither bytes nor FLOPs."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from two_ranks import Ranks
from wire import Wire, flops

from icefrog.errors import UserError
from icefrog.runtime import DivergenceError, LayerElastic, Stopped, protocol
from icefrog.runtime.parallel import ddp, fsdp
from icefrog.runtime.shards import local_part

SAMPLES, BATCH = 61, 16  # the last global batch is smaller, and uneven over two ranks


def optimizer_for(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind == "groups":  # of the user's own, in an order of their own
        late, early = list(model.parameters())[4:], list(model.parameters())[:4]
        return torch.optim.AdamW([{"params": late, "lr": 0.02}, {"params": early, "weight_decay": 0.2}], lr=0.01)
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def fit(
    parallel: str,
    boundaries: dict[int, int],
    epochs: int,
    kind: str = "adamw",
    accum: int = 1,
    clip: float | None = None,
    folder: str | None = None,
    attempt: str = "a",
    stop_at: int | None = None,
) -> Any:
    env = dict(os.environ)
    if folder is not None:
        attempt_dir = Path(folder) / attempt
        attempt_dir.mkdir(parents=True, exist_ok=True)
        env |= {protocol.ENV_ATTEMPT_DIR: str(attempt_dir), protocol.ENV_CHECKPOINT_DIR: str(Path(folder) / "c")}
    model = models.mlp()
    optimizer = optimizer_for(model, kind)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    elastic = LayerElastic(
        model,
        optimizer,
        rule="none",
        global_batch=BATCH,
        accum_steps=accum,
        max_grad_norm=clip,
        parallel=parallel,
        env=env,
    )
    elastic.register("scheduler", scheduler)
    loader = DataLoader(TensorDataset(*models.data(SAMPLES)), batch_sampler=elastic.sampler(SAMPLES))
    try:
        for epoch in elastic.epochs(1000):
            if epoch in boundaries:
                elastic.freeze(boundaries[epoch])
            for x, y in loader:
                if stop_at == elastic._at.step and elastic.rank == 0:
                    (attempt_dir / "stop").touch()
                nn.functional.cross_entropy(elastic.model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
            elastic.end_epoch()
            if epoch == epochs - 1:
                break
    except Stopped:
        return "stopped"
    return outcome(elastic)


def outcome(elastic: LayerElastic) -> dict[str, Any]:
    state = elastic.state_dict()
    profile = elastic.profile()
    found = {
        "params": {name: value.tolist() for name, value in state["model"].items()},
        "moments": {
            f"{name}.{key}": value.tolist()
            for name, entry in state["optimizer"]["state"].items()
            for key, value in entry.items()
        },
        "variance": elastic._engine.tracker.variance.tolist(),
        "flops": [layer.flops for layer in profile.layers] if profile else [],
        "step": elastic._at.step,
    }
    elastic.close()
    return found


def close(a: dict[str, Any], b: dict[str, Any], atol: float = 2e-6) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(torch.tensor(a[k]), torch.tensor(b[k]), atol=atol) for k in a)


@pytest.mark.parametrize(("kind", "accum", "clip"), [("groups", 1, None), ("sgd", 2, 0.05)])
def test_training_is_that_of_ddp_to_the_bit_and_of_one_process(
    ranks: Ranks, kind: str, accum: int, clip: float | None
) -> None:
    """With clipping the norm is summed in another order: rounding."""
    job = ({1: 2, 2: 3, 3: 0}, 5, kind, accum, clip)
    one = fit("auto", *job)
    ddp, _ = ranks.run(fit, "ddp", *job)
    first, second = ranks.run(fit, "fsdp", *job)
    assert first == second
    for what in ("params", "moments"):
        assert first[what] == ddp[what] if clip is None else close(first[what], ddp[what])
        assert close(first[what], one[what])
    assert first["flops"] == one["flops"]
    if accum == 1:  # the same estimator on the same gradients, sharded
        assert first["variance"] == pytest.approx(one["variance"], rel=1e-4)


def test_one_job_moves_between_kinds_and_world_sizes(ranks: Ranks, tmp_path: Path) -> None:
    boundaries = {1: 2, 3: 1, 4: 0, 6: 3}
    one = fit("auto", boundaries, 8)
    folder = str(tmp_path)
    plan = [("single", 5), ("fsdp", 9), ("ddp", 14), ("fsdp", 19), ("single", 25), ("fsdp", None)]
    last: Any = None
    for number, (parallel, stop_at) in enumerate(plan):
        job = (parallel, boundaries, 8, "adamw", 1, None, folder, str(number), stop_at)
        last = fit(*job) if parallel == "single" else ranks.run(fit, *job)[0]
        assert (last == "stopped") == (stop_at is not None)
    assert last["step"] == one["step"]
    assert close(last["params"], one["params"])
    assert close(last["moments"], one["moments"])


def slice_bytes(params: Any) -> int:
    """Of one rank's part of parameters split in two, padded."""
    return sum(-(-p.shape[0] // 2) * (p.numel() // p.shape[0]) * p.element_size() for p in params)


def frozen_costs(parallel: str) -> dict[str, list[Any]]:
    model = models.bn_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    elastic = LayerElastic(model, optimizer, rule="none", parallel=parallel)
    x, y = models.data()
    found: dict[str, list[Any]] = {key: [] for key in ("sent", "flops", "expected", "same", "gathered", "trains")}
    part = slice(elastic.rank * 8, elastic.rank * 8 + 8)

    def bits() -> list[bytes]:
        depth = elastic.frozen_layers
        state = elastic.state_dict()
        names = {name for layer in elastic.layers[:depth] for name in layer.params}
        tensors = [state["model"][name] for name in sorted(names)]
        tensors += [value for name in sorted(names) for value in state["optimizer"]["state"].get(name, {}).values()]
        tensors += [b for m in model.modules() for b in m.buffers(recurse=False)] if depth == 3 else []
        return [tensor.detach().numpy().tobytes() for tensor in tensors]

    for depth in (0, 2, 3, 1, 0):
        elastic.freeze(depth)
        before = bits()
        for _ in range(2):
            elastic.model.train()
            with Wire() as forward:
                loss = nn.functional.cross_entropy(elastic.model(x[part]), y[part])
            split = [[hasattr(p, "to_local") for p in block.parameters()] for block in model]
            with Wire() as backward:
                spent = flops(loss.backward)
            optimizer.step()
            optimizer.zero_grad()
        found["sent"].append(dict(backward.split) or {"all_reduce": backward.sent["allreduce_"]})
        found["flops"].append(spent)
        found["same"].append(bits() == before)
        found["gathered"].append((forward.split["all_gather"], [all(parts) for parts in split]))
        found["trains"].append([p.requires_grad for p in model.parameters()])
        live = [p for layer in elastic.layers[depth:] for p in layer.params.values()]
        found["expected"].append(
            {"all_reduce": sum(p.numel() * p.element_size() for p in live)}
            if parallel == "ddp"
            else {"all_gather": slice_bytes(live), "reduce_scatter": 2 * slice_bytes(live)}
        )
    found["all"] = [slice_bytes([p for layer in elastic.layers for p in layer.params.values()])]
    elastic.close()
    return found


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_frozen_layers_cost_no_bytes_and_no_flops_and_keep_their_bits(ranks: Ranks, parallel: str) -> None:
    """F4, F5, F6, F7. A linear layer of 6 x 6 and batch 8: one product is 2 * 8 * 6 * 6 FLOPs, and backward has two."""
    product, head = 2 * 8 * 6 * 6, 2 * 8 * 6 * 3
    for found in ranks.run(frozen_costs, parallel):
        assert found["sent"] == found["expected"]
        assert all(found["same"])
        # The first layer that trains hands no gradient to its input.
        assert found["flops"] == [
            (2 * (3 - depth) - 1) * product + 2 * head if depth < 3 else head for depth in (0, 2, 3, 1, 0)
        ]
        assert found["trains"] == [[True] * 14] + [
            [False] * 4 * depth + [True] * (14 - 4 * depth) for depth in (2, 3, 1, 0)
        ]
        if parallel == "fsdp":  # forward gathers everything once, and every unit gives its copy back behind it
            assert found["gathered"] == [(found["all"][0], [True] * 4)] * 5


def reset_by_wrapping(parallel: str) -> str:
    """Some releases of PyTorch set requires_grad of everything when a model was wrapped; so this one is made to."""
    model = models.mlp()
    model[1].requires_grad_(False)
    where, name = (ddp, "DistributedDataParallel") if parallel == "ddp" else (fsdp, "fully_shard")
    original = getattr(where, name)

    def wrap(module: Any, **options: Any) -> Any:
        wrapped = original(module, **options)
        model.requires_grad_(True)
        return wrapped

    def ignore(*_args: Any) -> None:
        """A method of the class."""

    wrap._set_params_and_buffers_to_ignore_for_model = ignore  # type: ignore[attr-defined]
    setattr(where, name, wrap)
    try:
        LayerElastic(model, torch.optim.SGD(model.parameters(), lr=0.1), rule="none", parallel=parallel).freeze(1)
    except RuntimeError as error:
        return str(error)
    finally:
        setattr(where, name, original)
        torch.distributed.destroy_process_group()
    return "unnoticed"


@pytest.mark.parametrize(("parallel", "name"), [("ddp", "0.0.weight"), ("fsdp", "1.0.weight")])
def test_wrapping_that_resets_requires_grad_is_noticed(ranks: Ranks, parallel: str, name: str) -> None:  # F5
    for found in ranks.run(reset_by_wrapping, parallel):
        assert "wrapping changed requires_grad" in found
        assert name in found


class Loose(nn.Module):
    """A language model with a tied head, a loose parameter, and a layer that the user froze."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.place = nn.Parameter(torch.randn(5, 8))
        self.tied = models.Tied()
        self.tied.blocks[1].requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tied.embedding(tokens) + self.place
        for block in self.tied.blocks:
            hidden = block(hidden)
        return self.tied.head(hidden)


def awkward(parallel: str) -> dict[str, Any]:
    model = Loose()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    elastic = LayerElastic(model, optimizer, rule="none", parallel=parallel)
    tokens = torch.randint(0, 11, (48, 6), generator=torch.Generator().manual_seed(1))
    depths = [len(elastic.layers)]
    for depth in (0, 1, len(elastic.layers) - 1, 0):
        elastic.freeze(depth)
        for step in range(2):
            at = step * 16 + elastic.rank * 8
            out = elastic.model(tokens[at : at + 8, :-1])
            nn.functional.cross_entropy(out.flatten(0, 1), tokens[at : at + 8, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        depths.append(elastic.frozen_layers)
    return outcome(elastic) | {"depths": depths}


def test_tied_loose_and_user_frozen_parameters(ranks: Ranks) -> None:  # F10
    ddp, _ = ranks.run(awkward, "ddp")
    first, second = ranks.run(awkward, "fsdp")
    assert first == second
    assert first["depths"] == ddp["depths"]
    assert close(first["params"], ddp["params"], atol=1e-7)


def mixed_jobs() -> dict[str, Any]:
    """Uneven micro-batches of the user's own; what was accumulated is dropped on loading; faults."""
    found: dict[str, Any] = {}
    model = models.bn_net()
    model.eval()  # no dropout; ranks share nothing but gradients
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = LayerElastic(model, optimizer, rule="none", accum_steps=2, parallel="fsdp")
    x, y = models.data()
    state = elastic.state_dict()

    def micro(start: int, stop: int) -> None:
        nn.functional.cross_entropy(elastic.model(x[start:stop]), y[start:stop]).backward()
        optimizer.step()
        optimizer.zero_grad()

    at = elastic.rank * 20
    micro(at, at + 7)
    elastic.load_state_dict(state)  # in the middle of an accumulation
    micro(at, at + 6)
    micro(at + 6, at + 8)
    found["params"] = {name: value.clone() for name, value in elastic.state_dict()["model"].items()}
    elastic.freeze(2)
    if elastic.rank == 1:
        model[0][1].running_mean[0] += 1.0
    try:
        elastic.end_epoch()
    except DivergenceError as error:
        found["divergence"] = str(error)
    try:
        elastic.cache_prefix()
    except UserError as error:
        found["cache"] = str(error)
    elastic.close()
    return found


def test_uneven_micro_batches_dropped_gradients_and_divergence(ranks: Ranks) -> None:
    model = models.bn_net()
    model.eval()
    x, y = models.data()
    pick = torch.cat([torch.arange(8), torch.arange(20, 28)])
    nn.functional.cross_entropy(model(x[pick]), y[pick]).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for found in ranks.run(mixed_jobs):
        assert all(torch.allclose(found["params"][n], v, atol=1e-6) for n, v in model.state_dict().items())
        assert "buffers of frozen layers" in found["divergence"]
        assert "prefix cache" in found["cache"]


def scaled_run(parallel: str) -> dict[str, Any]:
    """float16 losses under a GradScaler that overflows at first."""
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    elastic = LayerElastic(model, optimizer, rule="none", grad_scaler=scaler, max_grad_norm=1.0, parallel=parallel)
    x, y = models.data()
    for step in range(6):
        elastic.freeze(step % 3)
        at = elastic.rank * 30 + 3 * step
        loss = nn.functional.cross_entropy(elastic.model(x[at : at + 8]), y[at : at + 8])
        scaler.scale(loss * (8.0 if elastic.rank else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return outcome(elastic) | {"scale": scaler.get_scale()}


def test_mixed_precision_skips_the_same_steps_on_all_ranks(ranks: Ranks) -> None:
    ddp, _ = ranks.run(scaled_run, "ddp")
    first, second = ranks.run(scaled_run, "fsdp")
    assert first == second
    assert 0 < first["step"] == ddp["step"] < 6
    assert first["scale"] == ddp["scale"]
    assert close(first["params"], ddp["params"])


def refused() -> list[str]:
    found = []
    for what in ("state", "scalar"):
        model = models.mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if what == "scalar":
            model.register_parameter("temperature", nn.Parameter(torch.ones(())))
        else:
            model(models.data()[0]).sum().backward()
            optimizer.step()
        try:
            LayerElastic(model, optimizer, parallel="fsdp")
        except UserError as error:
            found.append(str(error))
        found.append(f"{len(model._forward_pre_hooks)} hooks")
    torch.distributed.destroy_process_group()
    return found


def test_what_cannot_be_sharded_is_refused(ranks: Ranks) -> None:
    for found in ranks.run(refused):
        assert "already has state" in found[0]
        assert "without dimensions cannot be sharded: temperature" in found[2]
        assert found[1] == found[3] == "0 hooks"


def test_one_process_needs_no_sharding() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = models.mlp()
        elastic = LayerElastic(model, torch.optim.SGD(model.parameters(), lr=0.1), parallel="fsdp", env={})
    assert elastic.model is model
    assert local_part(model[0][0].weight) is model[0][0].weight
    elastic.close()
