from __future__ import annotations

import models
import pytest
import torch
from torch import nn

from icefrog.errors import UserError
from icefrog.runtime import LayerElastic
from icefrog.runtime.layers import find_pieces, forward_order, group_pieces, layers_from_user


def names(model: nn.Module) -> list[str]:
    return [layer.name for layer in group_pieces(model, find_pieces(model))]


def assert_partition(model: nn.Module) -> None:
    layers = group_pieces(model, find_pieces(model))
    found = [id(p) for layer in layers for p in layer.params.values()]
    assert sorted(found) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert all(layer.params for layer in layers)


class ResNetLike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())  # noqa: E731
        self.conv1, self.bn1 = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(Block(block()), Block(block()))
        self.layer2 = nn.Sequential(Block(block()), Block(block()))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4, 2)


class Block(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


def test_blocks_are_layers_and_a_norm_joins_the_layer_before_it() -> None:
    model = ResNetLike()
    assert names(model) == ["conv1", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "fc"]
    assert set(group_pieces(model, find_pieces(model))[0].params) == {
        "conv1.weight",
        "conv1.bias",
        "bn1.weight",
        "bn1.bias",
    }
    assert_partition(model)


def test_transformer_encoder_is_opened_and_loose_parameters_join_the_first_layer_below() -> None:
    class Vit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.zeros(1, 4, 8))
            self.patch = nn.Linear(4, 8)
            self.encoder = nn.TransformerEncoder(
                nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3, enable_nested_tensor=False
            )
            self.norm = nn.LayerNorm(8)
            self.head = nn.Linear(8, 2)

    model = Vit()
    assert names(model) == ["patch", "encoder.layers.0", "encoder.layers.1", "encoder.layers.2", "head"]
    layers = group_pieces(model, find_pieces(model))
    assert "position" in layers[0].params
    assert "norm.weight" in layers[3].params
    assert_partition(model)


def test_modules_frozen_for_good_join_the_next_layer() -> None:
    model = models.mlp()
    for param in model[1].parameters():
        param.requires_grad_(False)
    layers = group_pieces(model, find_pieces(model))
    assert [layer.name for layer in layers] == ["0.0", "2.0", "3"]
    assert any(module is model[1][0] for module in layers[1].modules)
    assert_partition(model)


def test_tied_weight_belongs_to_the_last_layer_that_uses_it() -> None:  # F10
    for untie in (False, True):
        model = models.Tied()
        if untie:  # two Parameter objects over one storage
            model.head.weight = nn.Parameter(model.embedding.weight.data)
        layers = group_pieces(model, find_pieces(model))
        assert [layer.name for layer in layers] == ["blocks.0.0", "blocks.1.0", "blocks.2.0", "head"]
        assert "embedding.weight" in layers[-1].params
        if not untie:
            assert_partition(model)


def test_freezing_the_prefix_leaves_the_tied_head_trainable_and_stops_backward() -> None:  # F10
    model = models.Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = LayerElastic(model, optimizer, rule="none", env={})
    elastic.freeze(2)
    tokens = torch.tensor([[1, 2, 3]])
    grad_inputs: list[object] = []
    model.blocks[0].register_full_backward_hook(lambda *args: grad_inputs.append(args))
    before = model.embedding.weight.detach().clone()
    model(tokens).sum().backward()
    assert not grad_inputs  # nothing flows back through the frozen blocks, though the embedding has a gradient
    optimizer.step()
    assert not torch.equal(before, model.embedding.weight)
    assert model.head.weight is model.embedding.weight


def test_layers_follow_the_order_of_the_first_forward() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)
            self.body = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.body(x)))

    model = Backwards()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = LayerElastic(model, optimizer, env={})
    with pytest.warns(UserWarning, match="another order"):
        models.train(elastic, optimizer, 1)
    assert [layer.name for layer in elastic.layers] == ["body", "head"]
    models.train(elastic, optimizer, 30)
    profile = elastic.profile()
    assert profile is not None
    assert [layer.flops for layer in profile.layers] == [3 * 2 * 6 * 4, 3 * 2 * 4 * 3]


def test_uncalled_pieces_keep_their_place() -> None:
    pieces = find_pieces(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))))
    assert [p.name for p in forward_order(pieces, [2, 0])] == ["2", "3", "0", "1"]


def test_layers_of_the_users_choice_take_in_the_rest() -> None:
    model = ResNetLike()
    layers = layers_from_user(model, [model.layer1, "layer2", model.fc])
    assert [layer.name for layer in layers] == ["layer1", "layer2", "fc"]
    assert "conv1.weight" in layers[0].params
    assert sum(len(layer.params) for layer in layers) == len(list(model.parameters()))


@pytest.mark.parametrize("given", [["nope"], [nn.Linear(2, 2)]])
def test_impossible_layers_are_refused(given: list[object]) -> None:
    with pytest.raises(UserError):
        layers_from_user(ResNetLike(), given)  # type: ignore[arg-type]


def test_nothing_to_train_is_refused() -> None:
    model = models.mlp()
    for param in model.parameters():
        param.requires_grad_(False)
    with pytest.raises(UserError, match="no trainable parameter"):
        group_pieces(model, find_pieces(model))
