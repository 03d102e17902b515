"""Section 4 of the model, one process: the prefix is a fixed function and un-freezing gives everything back."""

from __future__ import annotations

import copy
from collections.abc import Callable

import models
import pytest
import torch
from torch import nn

from icefrog.errors import UserError
from icefrog.runtime import LayerElastic

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.1),
}


def make(model: nn.Module, kind: str = "adamw") -> tuple[LayerElastic, torch.optim.Optimizer]:
    optimizer = OPTIMIZERS[kind](model.parameters())
    return LayerElastic(model, optimizer, rule="none", env={}), optimizer


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_frozen_bytes_and_optimizer_state_do_not_move(kind: str) -> None:
    elastic, optimizer = make(models.bn_net(), kind)
    elastic.model.train()
    models.train(elastic, optimizer, 3)
    elastic.freeze(2)
    prefix = [models.bytes_of(layer) for layer in elastic.layers[:2]]
    state = {
        name: copy.deepcopy(optimizer.state[param])
        for layer in elastic.layers[:2]
        for name, param in layer.params.items()
    }
    suffix = models.bytes_of(elastic.layers[2])
    for _ in range(3):
        elastic.model.train()  # F6: must not wake the normalisation of the prefix
        models.train(elastic, optimizer, 2)
    assert [models.bytes_of(layer) for layer in elastic.layers[:2]] == prefix
    for layer in elastic.layers[:2]:
        for name, param in layer.params.items():
            for key, value in state[name].items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(optimizer.state[param][key])), (
                    name,
                    key,
                )
    assert models.bytes_of(elastic.layers[2]) != suffix


def test_frozen_between_backward_and_step() -> None:  # F7
    elastic, optimizer = make(models.mlp(), "sgd")
    models.train(elastic, optimizer, 2)
    x, y = models.data()
    nn.functional.cross_entropy(elastic.model(x), y).backward()
    before = models.bytes_of(elastic.layers[0])
    elastic.freeze(1)
    assert all(param.grad is None for param in elastic.layers[0].params.values())
    optimizer.step()
    assert models.bytes_of(elastic.layers[0]) == before


def test_zeroed_gradients_do_not_decay_the_prefix() -> None:
    elastic, optimizer = make(models.mlp(), "sgd")
    models.train(elastic, optimizer, 2)
    elastic.freeze(2)
    before = [models.bytes_of(layer) for layer in elastic.layers[:2]]
    for layer in elastic.layers[:2]:  # zero_grad(set_to_none=False) of other code leaves zeros behind
        for param in layer.params.values():
            param.grad = torch.zeros_like(param)
    models.train(elastic, optimizer, 1)
    assert [models.bytes_of(layer) for layer in elastic.layers[:2]] == before


def test_prefix_is_a_fixed_function_and_unfreezing_restores_modes() -> None:  # F6
    model = models.bn_net()
    model[0][1].eval()  # the user's own choice: stored statistics in the first block
    elastic, optimizer = make(model)
    models.train(elastic, optimizer, 1)
    elastic.freeze(2)
    model.train()
    x, _ = models.data()
    prefix = nn.Sequential(model[0], model[1][0], model[1][1])  # what follows joins the third layer
    assert torch.equal(prefix(x), prefix(x))  # no dropout, stored statistics
    elastic.freeze(0)
    assert not model[0][1].training
    assert model[0][3].training
    assert model[1][1].training
    model.train()
    before = model[0][1].running_mean.clone()
    models.train(elastic, optimizer, 1)
    assert not torch.equal(before, model[0][1].running_mean)


def test_backward_stops_at_the_boundary() -> None:
    elastic, _ = make(models.mlp())
    elastic.freeze(2)
    x, y = models.data()
    handed_on: list[torch.Tensor] = []
    elastic.layers[1].modules[-1].register_forward_hook(lambda _module, _args, output: handed_on.append(output))
    nn.functional.cross_entropy(elastic.model(x), y).backward()
    assert not handed_on[0].requires_grad
    grads = [[p.grad is not None for p in layer.params.values()] for layer in elastic.layers]
    assert grads == [[False] * 2, [False] * 2, [True] * 2, [True] * 2]


def test_unfreezing_goes_on_with_the_state_that_the_layer_had() -> None:
    elastic, optimizer = make(models.mlp())
    models.train(elastic, optimizer, 3)
    twin_model = copy.deepcopy(elastic.model)
    twin = torch.optim.AdamW(twin_model.parameters(), lr=0.01, weight_decay=0.1)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elastic.freeze(2)
    elastic.freeze(0)
    models.train(elastic, optimizer, 2)
    x, y = models.data()
    for step in range(2):
        loss = nn.functional.cross_entropy(twin_model(x[step * 16 : step * 16 + 16]), y[step * 16 : step * 16 + 16])
        loss.backward()
        twin.step()
        twin.zero_grad()
    assert models.bytes_of(elastic.model) == models.bytes_of(twin_model)


@pytest.mark.parametrize("depth", [4, 5, -1])
def test_impossible_depths_are_refused(depth: int) -> None:  # F3
    elastic, _ = make(models.mlp())
    with pytest.raises(UserError, match="cannot freeze"):
        elastic.freeze(depth)
    assert elastic.frozen_layers == 0


def test_lbfgs_is_refused() -> None:
    model = models.mlp()
    elastic = LayerElastic(model, torch.optim.LBFGS(model.parameters()), rule="none", env={})
    with pytest.raises(UserError, match="LBFGS"):
        elastic.freeze(1)


def test_a_blanket_requires_grad_loop_is_noticed_and_put_right() -> None:  # F8
    elastic, optimizer = make(models.mlp())
    models.train(elastic, optimizer, 1)
    elastic.freeze(2)
    before = [models.bytes_of(layer) for layer in elastic.layers[:2]]
    for param in elastic.model.parameters():
        param.requires_grad_(True)
    models.train(elastic, optimizer, 2)
    with pytest.warns(UserWarning, match=r"put right: 0\.0\.weight"):
        elastic.end_epoch()
    assert [p.requires_grad for p in elastic.model.parameters()] == [False] * 4 + [True] * 4
    assert [models.bytes_of(layer) for layer in elastic.layers[:2]] == before  # not moved meanwhile either


def test_a_replaced_parameter_is_adopted() -> None:  # F8: an embedding that is resized
    elastic, optimizer = make(models.mlp(), "sgd")
    models.train(elastic, optimizer, 1)
    elastic.freeze(1)
    block = elastic.model[0][0]
    block.weight = nn.Parameter(block.weight.detach().clone())
    with pytest.warns(UserWarning, match="put right"):
        elastic.end_epoch()
    assert not block.weight.requires_grad
    elastic.freeze(0)
    assert block.weight.requires_grad
    models.train(elastic, optimizer, 1)


@pytest.mark.parametrize("late", [False, True])
def test_schedulers_keep_working_and_groups_stay_fixed(late: bool) -> None:  # F13
    model = models.mlp()
    optimizer = torch.optim.SGD(
        [{"params": model[:2].parameters()}, {"params": model[2:].parameters(), "lr": 0.05}], lr=0.1
    )
    make_schedulers = lambda: (  # noqa: E731
        torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda e: 0.9**e, lambda e: 0.8**e]),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.2, 0.1], total_steps=20),
    )
    schedulers = () if late else make_schedulers()
    elastic = LayerElastic(model, optimizer, rule="none", env={})
    schedulers = schedulers or make_schedulers()
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    for depth in (0, 2, 3, 1, 0):
        elastic.freeze(depth)
        models.train(elastic, optimizer, 1)
        for scheduler in schedulers:
            scheduler.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == sizes
    assert all(scheduler.last_epoch == 5 for scheduler in schedulers)


def test_a_copy_of_the_model_is_free_of_the_boundary() -> None:
    elastic, optimizer = make(models.bn_net())
    models.train(elastic, optimizer, 1)
    elastic.freeze(2)
    average = copy.deepcopy(elastic.model)  # an EMA, as people make it
    assert average[0][0].weight is not elastic.model[0][0].weight
    x, _ = models.data()
    average.train()
    average.requires_grad_(True)
    average(x).sum().backward()
    assert average[0][0].weight.grad is not None
    assert average[0][1].training
    models.train(elastic, optimizer, 1)
    assert elastic._engine.counting.batch_per_gpu == 16  # the copy's batch was not taken for a step


def test_single_process_model_is_the_model_itself() -> None:
    elastic, _ = make(models.mlp())
    assert elastic.model is elastic._engine.inner
