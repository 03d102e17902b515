"""Where a chain of modules may be cut into pipeline stages, and where it is."""

from __future__ import annotations

import itertools
import random

import models
import pytest
import torch
from torch import nn

from icefrog.errors import UserError
from icefrog.runtime.layers import Layer, find_pieces, group_pieces, layers_from_user
from icefrog.runtime.parallel import chain


def layers_of(model: nn.Module) -> list[Layer]:
    return group_pieces(model, find_pieces(model))


def spans(model: nn.Module, num_stages: int, **options: object) -> list[tuple[int, int]]:
    layers = layers_of(model)
    links = chain.find_links(model, layers)
    costs = options.pop("costs", [1.0] * len(layers))
    found = chain.split(links, len(layers), num_stages, costs, **options)  # type: ignore[arg-type]
    assert [span.start for span in found[1:]] == [span.stop for span in found[:-1]]
    assert found[-1].stop == len(links)
    return [(span.first_layer, span.end_layer) for span in found]


def test_links_composed_are_the_model_and_loose_activations_go_with_the_layer_behind_them() -> None:
    model = models.bn_net().eval()
    links = chain.find_links(model, layers_of(model))
    assert [(link.name, link.first) for link in links] == [("0", 0), ("1", 1), ("2", 2), ("3", 3)]
    x, _ = models.data()
    value = x
    for link in links:
        value = link.module(value)
    assert torch.equal(value, model(x))
    assert chain.cuts(links) == [1, 2, 3]
    flat = nn.Sequential(*itertools.chain(*model[:3]), model[3]).eval()
    links = chain.find_links(flat, layers_of(flat))
    assert [link.first for link in links] == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3]
    assert chain.cuts(links) == [2, 6, 10]  # never between a layer and its normalisation


def test_stages_are_balanced_by_cost_as_brute_force_says() -> None:
    draw = random.Random(0)
    for _ in range(30):
        total, stages = draw.randint(2, 8), draw.randint(1, 4)
        if stages > total:
            continue
        costs = [draw.choice([0.0, 1.0, draw.random(), 7.0]) for _ in range(total)]
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(total)))
        found = spans(model, stages, costs=costs)
        dearest = max(sum(costs[a:b]) for a, b in found)
        every = itertools.combinations(range(1, total), stages - 1)
        best = min(max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *places, total])) for places in every)
        assert dearest == pytest.approx(best)
        assert all(a < b for a, b in found)


def test_the_user_says_where_stages_begin() -> None:
    assert spans(models.mlp(depth=5), 3, first_layers=[1, 4]) == [(0, 1), (1, 4), (4, 5)]
    for wrong in ([1], [1, 1], [0, 2], [2, 9]):
        with pytest.raises(UserError, match="stages") as caught:
            spans(models.mlp(depth=5), 3, first_layers=wrong)
        assert caught.value.hint


def test_a_model_with_a_forward_of_its_own_is_refused() -> None:
    with pytest.raises(UserError, match="Tied has a forward of its own") as caught:
        spans(models.Tied(), 2)
    assert "nn.Sequential" in caught.value.hint


def test_a_shared_weight_keeps_its_layers_in_one_stage() -> None:
    embedding, head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(nn.Linear(8, 11), nn.Softmax(-1), nn.Linear(11, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    assert spans(model, 3) == [(0, 1), (1, 2), (2, 4)]
    with pytest.raises(UserError, match="at most"):
        spans(nn.Sequential(embedding, nn.Linear(8, 8), head), 2)
    first = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    first[1].weight = first[0].weight
    layers = layers_of(first)
    assert chain.cuts(chain.find_links(first, layers)) == [2]
    with pytest.raises(UserError, match="2 stages at most, not 3"):
        spans(first, 3)


def test_user_layers_of_several_modules_stay_whole() -> None:
    model = models.mlp(depth=5)
    layers = layers_from_user(model, [[model[0], model[1]], model[2], model[3], model[4]])
    links = chain.find_links(model, layers)
    assert [(link.name, link.first) for link in links] == [("0", 0), ("1", 0), ("2", 1), ("3", 2), ("4", 3)]
    assert chain.cuts(links) == [2, 3, 4]


def test_what_other_stages_hold_is_freed_and_the_optimizer_leaves_it_alone() -> None:
    model = models.bn_net()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, weight_decay=0.1)
    params, groups = list(model.parameters()), optimizer.param_groups[0]["params"]
    chain.release([model[0], model[1]], optimizer)
    assert all(a is b for a, b in zip(params, groups, strict=True))
    assert [p.device.type for p in params] == ["meta"] * 8 + ["cpu"] * 6
    assert model[0][1].running_mean.device.type == "meta"
    model[3](model[2](models.data()[0])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert len(optimizer.state) == 6
    with pytest.raises(RuntimeError, match="meta"):
        model(models.data()[0])
