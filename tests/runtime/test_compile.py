"""``torch.compile``: what is compiled stays compiled through every move of the boundary, and trains as without."""

from __future__ import annotations

import copy
import os
import shutil
from typing import Any

import models
import pytest
import torch
from torch import nn
from two_ranks import Ranks

from icefrog.errors import UserError
from icefrog.runtime import LayerElastic

DEPTHS = (0, 2, 3, 0, 1)


class Blocks(nn.Module):
    """Blocks with normalisation and dropout; the last activation is shared, and used in the prefix as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2)) for _ in range(3)
        )
        self.act, self.head = nn.Tanh(), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.act(block(x))
        return self.head(x)


def fit(
    backend: Any, kind: type[nn.Module] = Blocks, depths: tuple[int, ...] = DEPTHS
) -> tuple[LayerElastic, dict[str, Any]]:
    """Three steps at each depth, then a validation pass."""
    torch._dynamo.reset()
    plain = kind()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    given = plain if backend is None else torch.compile(plain, backend=backend)
    elastic = LayerElastic(given, optimizer, rule="none", env=dict(os.environ))  # type: ignore[arg-type]
    x, y = models.data()
    found: dict[str, Any] = {"losses": [], "fixed": [], "trained": []}
    for depth in depths:
        elastic.freeze(depth)
        before = [models.bytes_of(layer) for layer in elastic.layers[:depth]]
        torch.manual_seed(depth)
        for step in range(3):
            elastic.model.train()
            part = slice(step * 16 + elastic.rank * 8, step * 16 + elastic.rank * 8 + 8)
            loss = nn.functional.cross_entropy(elastic.model(x[part]), y[part])
            loss.backward()
            found["trained"].append([p.grad is not None for layer in elastic.layers for p in layer.params.values()])
            optimizer.step()
            optimizer.zero_grad()
            found["losses"].append(loss.item())
        found["fixed"].append([models.bytes_of(layer) for layer in elastic.layers[:depth]] == before)
        elastic.model.eval()
        with torch.no_grad():
            found["losses"].append(nn.functional.cross_entropy(elastic.model(x), y).item())
    found["names"] = [layer.name for layer in elastic.layers], list(elastic.state_dict()["model"])
    found["flops"] = list(elastic._engine.profiler.flops)
    found["variance"] = elastic._engine.tracker.variance.tolist()
    return elastic, found


class Graphs:
    """A backend that runs what it is given as it is, and counts."""

    def __init__(self) -> None:
        self.linears: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        self.linears.append(sum(node.target is torch._C._nn.linear for node in graph.graph.nodes))
        return graph.forward


def test_the_whole_forward_is_one_graph_at_every_depth_and_trains_bit_for_bit_as_uncompiled() -> None:
    graphs = Graphs()
    _, compiled = fit(graphs)
    _, plain = fit(None)
    assert compiled == plain
    assert set(graphs.linears) == {4}  # never a part of the model
    assert len(graphs.linears) >= 2 * 4 - 1  # training and validation at four depths; full training is one of them
    assert all(plain["fixed"])


@pytest.mark.slow
def test_aot_autograd_trains_bit_for_bit_as_uncompiled() -> None:
    assert fit("aot_eager", depths=(0, 2))[1] == fit(None, depths=(0, 2))[1]


@pytest.mark.slow
def test_inductor() -> None:
    if shutil.which("g++") is None:
        pytest.skip("torch.compile's inductor needs a C++ compiler")

    class Dry(Blocks):  # dropout draws other numbers when it is compiled
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block[2].p = 0.0

    compiled, plain = fit("inductor", Dry)[1], fit(None, Dry)[1]
    assert compiled["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert compiled["trained"] == plain["trained"]
    assert all(compiled["fixed"])


def between_ranks() -> dict[str, Any]:
    graphs = Graphs()
    elastic, compiled = fit(graphs, depths=(0, 2))
    params = models.bytes_of(elastic.model)
    elastic.close()
    elastic, plain = fit(None, depths=(0, 2))
    same = params == models.bytes_of(elastic.model)
    elastic.close()
    return {"equal": compiled == plain, "same": same, "params": params, "linears": set(graphs.linears)}


@pytest.mark.slow
def test_data_parallel(ranks: Ranks) -> None:
    first, second = ranks.run(between_ranks, timeout_s=600.0)
    assert first["equal"]
    assert first["same"]
    assert first["linears"] == {4}
    weights = [name for name in first["params"] if not name.split(".")[-1].startswith(("running", "num"))]
    assert all(first["params"][name] == second["params"][name] for name in weights)


def test_a_copy_of_a_compiled_model_is_its_own() -> None:
    elastic, _ = fit("eager", depths=(2,))
    x, _ = models.data()
    twin = copy.deepcopy(elastic.model).eval()
    before = twin(x)
    with torch.no_grad():
        for param in elastic.model.parameters():
            param.zero_()
    assert torch.equal(twin(x), before)
    model = elastic.model
    elastic.close()
    assert "forward" not in vars(model)


def test_what_would_run_uncompiled_is_refused() -> None:
    x, _ = models.data()
    model = Blocks()
    model.compile(backend="eager")
    with pytest.raises(UserError, match="compile"):
        LayerElastic(model, torch.optim.SGD(model.parameters(), lr=0.1), env={})
    for kind in (Blocks, models.mlp):
        torch._dynamo.reset()
        model = kind()
        elastic = LayerElastic(model, torch.optim.SGD(model.parameters(), lr=0.1), env={})
        with pytest.raises(UserError, match="called from compiled code"):
            torch.compile(elastic.model, backend="eager")(x)


def test_the_prefix_cache_stays_off() -> None:
    model = Blocks()
    elastic = LayerElastic(
        torch.compile(model, backend="eager"),  # type: ignore[arg-type]
        torch.optim.SGD(model.parameters(), lr=0.1),
        rule="none",
        env={},
    )
    cache = elastic.cache_prefix()
    elastic.freeze(2)
    elastic.model(models.data()[0])
    assert cache.off_reason == "the model is compiled"
    elastic.close()
