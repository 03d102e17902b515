"""Clipping in a pipeline's loop goes by the norm of each stage alone; LayerElastic's by that of the model."""

from __future__ import annotations

import warnings

import models
import pytest
import torch
from torch import nn
from two_ranks import Ranks

from icefrog.runtime import LayerElastic
from icefrog.runtime.parallel.pipeline import Pipeline


def train(num_stages: int, accum_steps: int, in_loop: bool) -> list[str]:
    """What this rank is warned of in three optimizer steps."""
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spread = Pipeline(nn.functional.cross_entropy, num_stages=num_stages)
    elastic = LayerElastic(
        model,
        optimizer,
        rule="none",
        parallel=spread,
        accum_steps=accum_steps,
        max_grad_norm=None if in_loop else 0.1,
    )
    x, y = models.data()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3 * accum_steps):
            rows = slice(0, 16 - step % 2)  # unequal micro-batches are re-scaled, which is no clipping
            elastic.train_step(x[rows], y[rows])
            if in_loop and step % accum_steps == accum_steps - 1:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    elastic.close()
    return [str(item.message) for item in caught if "max_grad_norm" in str(item.message)]


@pytest.mark.parametrize(("num_stages", "accum_steps"), [(2, 1), (1, 2)])
def test_a_loop_that_clips_is_told_so_once(ranks: Ranks, num_stages: int, accum_steps: int) -> None:
    for told in ranks.run(train, num_stages, accum_steps, True):
        assert len(told) == 1
        assert "each stage and replica" in told[0]
    assert ranks.run(train, num_stages, accum_steps, False) == [[], []]
