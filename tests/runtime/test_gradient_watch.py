"""One hook a layer tells when its gradients are there; graphs in which another parameter comes last are noticed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import nn

from icefrog.runtime import LayerElastic
from icefrog.runtime.layers import Layer
from icefrog.runtime.ready import GradientWatch


class Block(nn.Module):
    """Two weights, used in an order that can be turned round; or the first alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.order = ("first", "second")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.order:
            x = torch.tanh(getattr(self, name)(x))
        return x


class Watched:
    """A model of two blocks; each step gives (layer, names of parameters) by call."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(Block(), Block())
        names = {id(param): name for name, param in self.model.named_parameters()}
        self.layers = [Layer(str(i), [block], dict(block.named_parameters())) for i, block in enumerate(self.model)]
        self.watch = GradientWatch(self.layers)
        self.calls: list[tuple[int, list[str]]] = []

        def note(layer: int, params: Sequence[nn.Parameter]) -> None:
            self.calls.append((layer, [names[id(param)].partition(".")[2] for param in params]))

        self.watch.listen(note)

    def step(self) -> list[tuple[int, list[str]]]:
        self.calls = []
        self.model(torch.ones(2, 4)).sum().backward()
        self.model.zero_grad()
        self.watch.step_over()
        return self.calls


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.watch.close()
    made.calls = []
    made.model(torch.ones(2, 4)).sum().backward()
    assert made.calls == []  # no hook is left


EACH = [(1, ["second.weight"]), (1, ["first.weight"]), (0, ["second.weight"]), (0, ["first.weight"])]
ONCE = [(1, ["first.weight", "second.weight"]), (0, ["first.weight", "second.weight"])]


def test_one_call_a_layer_once_its_order_is_known(watched: Watched) -> None:
    assert watched.step() == EACH
    assert watched.step() == ONCE
    for param in watched.layers[0].params.values():  # frozen, and opened again
        param.requires_grad_(False)
    assert watched.step() == ONCE[:1]
    for param in watched.layers[0].params.values():
        param.requires_grad_(True)
    assert watched.step() == ONCE


def test_another_order_is_noticed_and_learnt(watched: Watched) -> None:
    watched.step()
    watched.model[0].order = ("second", "first")
    assert watched.step() == [ONCE[0], (0, ["first.weight"]), (0, ["second.weight"])]  # which comes later, is told, too
    assert watched.step() == [ONCE[0], (0, ["first.weight"]), (0, ["second.weight"])]
    assert watched.step() == ONCE


def test_a_layer_that_changes_all_the_time_stays_hooked(watched: Watched) -> None:
    for step in range(12):
        watched.model[0].order = ("first", "second") if step % 2 else ("second", "first")
        calls = watched.step()
    assert calls == [ONCE[0], *EACH[2:]]
    watched.model[0].order = ("first",)
    assert watched.step() == [ONCE[0], (0, ["first.weight"])]


@pytest.mark.parametrize("clips", [False, True])
def test_another_order_is_noticed_where_gradients_are_zeroed_in_place(watched: Watched, *, clips: bool) -> None:
    def step() -> tuple[list[tuple[int, list[str]]], bool]:
        watched.calls = []
        watched.model.zero_grad(set_to_none=False)
        watched.model(torch.ones(2, 4)).sum().backward()
        if clips:
            nn.utils.clip_grad_norm_(watched.model.parameters(), 0.1)
        return watched.calls, watched.watch.step_over()

    assert step() == (EACH, False)
    assert step() == (ONCE, False)
    watched.model[0].order = ("second", "first")
    assert step() == (ONCE, True)  # the second one's gradient came later
    assert step() == ([ONCE[0], (0, ["first.weight"]), (0, ["second.weight"])], False)
    assert step() == (ONCE, False)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_statistics_where_the_order_changes(*, set_to_none: bool) -> None:
    """What the copy of a step's gradients lacks is never taken for zero."""
    torch.manual_seed(0)
    block = Block()
    model = nn.Sequential(block, nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    elastic = LayerElastic(model, optimizer, [[block], [model[1]]], rule="none", stats_every=1, env={})
    seen: list[tuple[int, float]] = []
    observe = elastic._engine.tracker.observe
    elastic._engine.tracker.observe = lambda variance, *rest: (  # type: ignore[method-assign]
        seen.append((step, variance[0])),  # type: ignore[func-returns-value]
        observe(variance, *rest),
    )[1]
    grads: list[list[torch.Tensor]] = []
    for step in range(9):
        block.order = ("first", "second") if step < 4 else ("second", "first")
        nn.functional.cross_entropy(model(torch.randn(8, 4)), torch.arange(8) % 2).backward()
        grads.append([param.grad.clone() for param in block.parameters()])
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    elastic.close()
    assert len(seen) >= 6
    for at, variance in seen:
        pairs = zip(grads[at], grads[at - 1], strict=True)
        assert variance == pytest.approx(
            8 / 2 * sum(float((now - last).square().sum()) for now, last in pairs), rel=1e-5
        )


def test_a_parameter_that_is_not_used_in_each_step() -> None:
    """Its gradient is compared with that of the step before, never with an older one."""
    torch.manual_seed(0)
    block = Block()
    model = nn.Sequential(block, nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    elastic = LayerElastic(model, optimizer, [[block], [model[1]]], rule="none", stats_every=1, env={})
    seen: list[float] = []
    observe = elastic._engine.tracker.observe
    elastic._engine.tracker.observe = lambda variance, *rest: (seen.append(variance[0]), observe(variance, *rest))[1]  # type: ignore[func-returns-value, method-assign]
    grads: list[dict[str, torch.Tensor]] = []
    for step in range(12):
        block.order = ("first",) if step % 3 == 1 else ("first", "second")
        nn.functional.cross_entropy(model(torch.randn(8, 4)), torch.arange(8) % 2).backward()
        grads.append({name: param.grad.clone() for name, param in block.named_parameters() if param.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    elastic.close()
    expected = [
        8 / 2 * sum(float((now[name] - last[name]).square().sum()) for name in now.keys() & last.keys())
        for last, now in itertools.pairwise(grads)
    ]
    assert np.array(seen) == pytest.approx(np.array(expected), rel=1e-5)
