"""What two or more processes do in tests of pipelines; each returns what it saw."""

from __future__ import annotations

import copy
import os
import random
from pathlib import Path
from typing import Any

import models
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode
from two_ranks import Ranks
from wire import Wire

from icefrog.runtime import DivergenceError, LayerElastic, Pipeline, Stopped, protocol

SAMPLES, BATCH = 61, 16  # the last global batch, 13 samples, passes the stages in one piece
LOSS = nn.functional.cross_entropy
NEVER = 10_000


def parallelism(kind: str) -> Any:
    """``pipeline``: every rank a stage; ``replicas``: of one stage; ``hybrid``: of two; else as LayerElastic knows it."""
    if kind in ("pipeline", "gpipe"):
        return Pipeline(LOSS, micro_batches=4, schedule="gpipe" if kind == "gpipe" else "1f1b")
    if kind in ("replicas", "hybrid"):
        return Pipeline(LOSS, num_stages=1 if kind == "replicas" else 2, micro_batches=4)
    return "auto"


def fit(  # type: ignore[no-untyped-def]
    kind: str,
    boundaries: dict[int, int],
    epochs: int,
    *,
    folder: str | None = None,
    attempt: str = "a",
    stop_at: int = NEVER,
    **options,
):
    """The user's loop, with boundaries by hand; the stop file appears at an optimizer step on the last rank."""
    env = dict(os.environ)
    if folder is not None:
        attempt_dir = Path(folder) / attempt
        attempt_dir.mkdir(parents=True, exist_ok=True)
        env |= {protocol.ENV_ATTEMPT_DIR: str(attempt_dir), protocol.ENV_CHECKPOINT_DIR: str(Path(folder) / "c")}
    model = models.mlp(depth=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    elastic = LayerElastic(
        model, optimizer, rule="none", global_batch=BATCH, parallel=parallelism(kind), env=env, **options
    )
    loader = DataLoader(TensorDataset(*models.data(SAMPLES)), batch_sampler=elastic.sampler(SAMPLES))
    for epoch in elastic.epochs(NEVER):
        if epoch in boundaries:
            elastic.freeze(boundaries[epoch])
        for x, y in loader:
            if elastic._at.step == stop_at and elastic.rank == elastic.world_size - 1:
                (attempt_dir / "stop").touch()
            elastic.train_step(x, y, LOSS)
            optimizer.step()
            optimizer.zero_grad()
        elastic.end_epoch(metric=float(elastic.rank))
        if epoch == epochs - 1:
            break
    return elastic


def outcome(elastic: LayerElastic) -> dict[str, Any]:
    state = elastic.state_dict()
    found = {
        "params": {name: value.tolist() for name, value in state["model"].items()},
        "moments": {name: item["exp_avg_sq"].tolist() for name, item in state["optimizer"]["state"].items()},
        "step": elastic._at.step,
        "samples": elastic._at.samples,
        "variance": elastic._engine.tracker.variance.tolist(),
        "held": sum(param.numel() for param in elastic._engine.inner.parameters() if param.device.type == "cpu"),
        "own_states": len(elastic.optimizer.state),
        "flops": list(elastic._engine.profiler.flops),
    }
    elastic.close()
    return found


def run(kind: str, boundaries: dict[int, int], epochs: int, **options: Any) -> Any:
    try:
        return outcome(fit(kind, boundaries, epochs, **options))
    except Stopped:
        return "stopped"


def run_with(kind: str, boundaries: dict[int, int], epochs: int, options: dict[str, Any]) -> Any:
    return run(kind, boundaries, epochs, **options)


def close(a: dict[str, Any], b: dict[str, Any], atol: float = 2e-5) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(torch.tensor(a[k]), torch.tensor(b[k]), atol=atol) for k in a)


def wire_and_work(kind: str, depths: list[int]) -> list[dict[str, Any]]:
    """Three steps at each depth; what moved, and what was sent, computed and kept for backward in the last of them."""
    model = models.mlp(depth=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    elastic = LayerElastic(model, optimizer, rule="none", parallel=parallelism(kind))
    parallel = elastic._engine.parallel
    share = 16 // parallel.num_replicas
    x, y = (tensor[parallel.replica * share : (parallel.replica + 1) * share] for tensor in models.data(16))
    found = []
    for depth in depths:
        elastic.freeze(depth)
        before = frozen_bits(elastic, depth)
        for _ in range(3):
            saved: list[int] = []
            keep = torch.autograd.graph.saved_tensors_hooks(lambda t, to=saved: to.append(t.numel()) or t, lambda t: t)
            with Wire() as wire, FlopCounterMode(display=False) as counter, keep:
                elastic.train_step(x, y)
                optimizer.step()  # replicas average their gradients in it
            optimizer.zero_grad()
        found.append(
            {
                "sent": wire.floats["send"],
                "reduced": wire.floats["allreduce_"],
                "flops": counter.get_total_flops(),
                "kept_for_backward": sum(saved),
                "same_bits": frozen_bits(elastic, depth) == before,
            }
        )
    elastic.close()
    return found


def frozen_bits(elastic: LayerElastic, depth: int) -> list[Any]:
    """Parameters and moments of the frozen layers that this rank holds."""
    found: list[Any] = []
    for layer in elastic.layers[:depth]:
        for param in layer.params.values():
            if param.device.type == "cpu":
                state = elastic.optimizer.state.get(param, {})
                found.append([tensor.detach().numpy().tobytes() for tensor in (param, *state.values())])
    return found


def flops(layers: range, depth: int, samples: int = 16) -> int:
    """Of layers of :func:`models.mlp`: forward, weight gradients where they train, input gradients where one before does."""
    total = 0
    for layer in layers:
        one = 2 * samples * 6 * (3 if layer == 4 else 6)
        total += one * (1 + (layer >= depth) + (layer > depth))
    return total


def measured(kind: str) -> list[list[float]]:
    """Variance and squared norm of each layer in one step, raw gradients."""
    model = models.mlp(depth=5)
    elastic = LayerElastic(model, torch.optim.SGD(model.parameters(), lr=0.0), rule="none", parallel=parallelism(kind))
    engine = elastic._engine
    seen = []
    engine.tracker.observe = lambda *found: seen.append([list(map(float, row)) for row in found[:2]])  # type: ignore[assignment]
    share = 16 // engine.parallel.num_replicas
    begin = engine.parallel.replica * share
    x, y = models.data(16)
    elastic.train_step(x[begin : begin + share], y[begin : begin + share])
    elastic.optimizer.step()
    elastic.close()
    return seen[0]


def play(kind: str, state: Any, begin: int, events: list[tuple[str, int]]) -> Any:
    """Steps (each on its own batch, by number) and moves of the boundary, from a state to a state."""
    model = models.mlp(depth=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    elastic = LayerElastic(model, optimizer, rule="none", parallel=parallelism(kind))
    if state is not None:
        elastic.load_state_dict(copy.deepcopy(state))  # its tensors are in memory that the processes share
    parallel = elastic._engine.parallel
    share, step, same = 16 // parallel.num_replicas, begin, True
    x, y = models.data(64)
    for what, number in events:
        if what == "freeze":
            elastic.freeze(number)
            continue
        kept = frozen_bits(elastic, elastic.frozen_layers)
        for _ in range(number):
            at = step * 16 % 64 + parallel.replica * share
            elastic.train_step(x[at : at + share], y[at : at + share], LOSS)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        same = same and frozen_bits(elastic, elastic.frozen_layers) == kept
    found = elastic.state_dict()
    elastic.close()
    return found, step, same


def compare(ranks: Ranks, kinds: list[str], seed: int, rounds: int) -> None:
    draw = random.Random(seed)
    state, one, at = None, None, 0
    for _ in range(rounds):
        events = [(draw.choice(["freeze", "steps"]), draw.randint(0, 4)) for _ in range(draw.randint(2, 5))]
        one, _, same = play("single", one, at, events)
        assert same
        kind = draw.choice(kinds)
        found = [play(kind, state, at, events)] if kind == "alone" else ranks.run(play, kind, state, at, events)
        state, at, _ = found[0]
        assert all(same for _, _, same in found)
        assert state["frozen_layers"] == one["frozen_layers"]
        for name, value in one["model"].items():
            assert torch.allclose(value, state["model"][name], atol=2e-5), (kind, events, name)
        moments = [{name: s["momentum_buffer"] for name, s in at["optimizer"]["state"].items()} for at in (one, state)]
        assert moments[0].keys() == moments[1].keys()
        assert all(torch.allclose(moments[0][name], moments[1][name], atol=2e-5) for name in moments[0])
        for other, _, _ in found[1:]:  # every rank has the whole state
            assert all(torch.equal(value, state["model"][name]) for name, value in other["model"].items())


def diverged(kind: str) -> str:
    """What the last rank's other bits lead to, at the end of an epoch."""
    model = models.mlp(depth=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = LayerElastic(model, optimizer, rule="none", parallel=parallelism(kind))
    x, y = models.data(16)
    elastic.train_step(x, y)
    optimizer.step()
    elastic.end_epoch()
    if elastic.rank == elastic.world_size - 1:
        with torch.no_grad():
            next(p for p in model.parameters() if p.device.type == "cpu").view(-1)[0] += 1e-6
    try:
        elastic.end_epoch()
    except DivergenceError as error:
        return str(error)
    finally:
        elastic.close()
    return "unnoticed"
