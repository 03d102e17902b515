"""F15: an exponential average of weights (``torch.optim.swa_utils``) beside freezing: weights, buffers, checkpoints."""

from __future__ import annotations

from pathlib import Path

import models
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from icefrog.runtime import LayerElastic, Stopped, protocol

DECAY = 0.5


def averaged(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True)


def test_moves_of_the_boundary_do_not_touch_the_average_and_frozen_layers_converge_to_their_value() -> None:
    model = models.bn_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = LayerElastic(model, optimizer, rule="none", env={})
    average = averaged(elastic.model)
    state = {name: value.double() for name, value in model.state_dict().items()}
    first = True
    for depth in (0, 2, 0):
        before = models.bytes_of(average.module)
        elastic.freeze(depth)
        assert models.bytes_of(average.module) == before
        gap = [(a - p).norm() for a, p in zip(average.module.parameters(), model.parameters(), strict=True)]
        for _ in range(4):
            models.train(elastic, optimizer, 1)
            average.update_parameters(elastic.model)
            for name, value in model.state_dict().items():  # buffers as well: else they would be those of the start
                if value.is_floating_point():
                    state[name] = value.double() if first else DECAY * state[name] + (1 - DECAY) * value.double()
            first = False
        for name, value in average.module.state_dict().items():
            if value.is_floating_point():
                assert torch.allclose(value.double(), state[name], atol=1e-6), name
        frozen = sum(len(layer.params) for layer in elastic.layers[:depth])
        for index, (a, p) in enumerate(zip(average.module.parameters(), model.parameters(), strict=True)):
            if index < frozen:
                assert torch.allclose((a - p).norm(), gap[index] * DECAY**4, atol=1e-6)
    average.eval()  # the copy is free of the boundary
    elastic.freeze(2)
    assert all(module.training is False for module in average.modules())


def fit(folder: Path, attempt: str, stop_at: int | None) -> dict[str, bytes] | None:
    (folder / attempt).mkdir(parents=True)
    env = {protocol.ENV_ATTEMPT_DIR: str(folder / attempt), protocol.ENV_CHECKPOINT_DIR: str(folder / "kept")}
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = LayerElastic(model, optimizer, rule="none", global_batch=16, env=env)
    average = averaged(model)
    elastic.register("average", average)
    x, y = models.data()
    sampler = elastic.sampler(64)
    try:
        for epoch in elastic.epochs(100):
            elastic.freeze(epoch)
            for pick in sampler:
                if elastic._at.step == stop_at:
                    (folder / attempt / "stop").touch()
                nn.functional.cross_entropy(model(x[pick]), y[pick]).backward()
                optimizer.step()
                optimizer.zero_grad()
                average.update_parameters(model)
            elastic.end_epoch()
            if epoch == 1:
                break
    except Stopped:
        return None
    finally:
        elastic.close()
    return models.bytes_of(average)


def test_the_average_resumes_to_the_bit(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", "a", None)
    assert fit(tmp_path / "parts", "a", 5) is None
    assert fit(tmp_path / "parts", "b", None) == whole
