"""Which parallelism a job gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch

from icefrog.errors import UserError
from icefrog.runtime import LayerElastic
from icefrog.runtime.parallel import DataParallel, Parallel, Single, choose


def world(size: int) -> Any:
    return SimpleNamespace(size=size, rank=0)


@pytest.mark.parametrize(
    ("kind", "size", "expected"), [("auto", 1, Single), ("ddp", 1, Single), ("auto", 2, DataParallel)]
)
def test_one_process_is_single_and_several_are_data_parallel(kind: str, size: int, expected: type[Parallel]) -> None:
    assert type(choose(kind, world(size), {})) is expected


@pytest.mark.parametrize(("kind", "size", "word"), [("dpp", 2, "unknown"), ("single", 2, "apart")])
def test_what_cannot_be_is_refused(kind: str, size: int, word: str) -> None:
    with pytest.raises(UserError, match=word):
        choose(kind, world(size), {})


def test_a_parallel_object_of_the_users_own_is_driven_through_a_step() -> None:
    """The seam is complete: what the engine needs of a parallelism goes through these methods."""
    calls: list[str] = []

    class Watched(Single):
        def __getattribute__(self, name: str) -> Any:
            if name in vars(Parallel) and not name.startswith("_"):
                calls.append(name)
            return super().__getattribute__(name)

    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = LayerElastic(model, optimizer, rule="none", parallel=Watched(), max_grad_norm=1.0, env={})
    assert elastic.model is model
    models.train(elastic, optimizer, 1)
    elastic.freeze(1)
    elastic.load_state_dict(elastic.state_dict())
    elastic.close()
    wanted = {"start", "place", "connect", "rewire", "set_sync", "average", "clip", "check_in_step", "drop_gradients"}
    wanted |= {"model_state", "load_model_state", "optimizer_state", "load_optimizer_state"}
    assert wanted <= set(calls)
