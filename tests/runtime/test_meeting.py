"""Several process groups one after another in the same ranks, at one port: how they meet, and how they part."""

from __future__ import annotations

import contextlib
import os
import time

import models
import torch
import torch.distributed as dist
from torch import nn
from two_ranks import Ranks

import icefrog.runtime.meeting
from icefrog.errors import UserError
from icefrog.executors.local.supervisor import free_port
from icefrog.runtime import LayerElastic


def elastic_of(model: nn.Module) -> tuple[LayerElastic, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return LayerElastic(model, optimizer, rule="none"), optimizer


def train(elastic: LayerElastic, optimizer: torch.optim.Optimizer, steps: int = 2) -> float:
    x, y = models.data()
    for step in range(steps):
        part = slice(16 * step + 8 * elastic.rank, 16 * step + 8 * elastic.rank + 8)
        nn.functional.cross_entropy(elastic.model(x[part]), y[part]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(sum(param.detach().double().sum() for param in elastic.model.parameters()))


def several_starts(late: int) -> list[float]:
    """Each time one rank is late, so that the other is at the port before it has left, or come."""
    found = []
    for start in range(3):
        elastic, optimizer = elastic_of(models.mlp())
        found.append(train(elastic, optimizer))
        if elastic.rank == (late + start) % 2:
            time.sleep(0.3)
        elastic.close()
        assert not dist.is_initialized()
    return found


def test_ranks_meet_again_at_one_port(ranks: Ranks) -> None:
    for late in (0, 1):
        first, second = ranks.run(several_starts, late, timeout_s=60.0)
        assert first == second
        assert len(set(first)) == 1


def under_torchrun(port: int) -> list[float]:
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    try:
        return several_starts(late=1)
    finally:
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]


def test_a_store_that_stays_gives_each_start_names_of_its_own(ranks: Ranks) -> None:
    store = dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)  # the agent's
    first, second = ranks.run(under_torchrun, store.port, timeout_s=60.0)
    assert first == second


def two_at_once() -> list[float]:
    one, first = elastic_of(models.mlp())
    two, second = elastic_of(models.mlp())
    found = [train(one, first), train(two, second)]
    one.close()
    assert dist.is_initialized()  # the other one is in it
    found.append(train(two, second))
    two.close()
    assert not dist.is_initialized()
    return found


def test_the_last_of_two_ends_the_group(ranks: Ranks) -> None:
    first, second = ranks.run(two_at_once)
    assert first == second
    assert first[0] == first[1]


def after_a_refusal() -> float:
    with contextlib.suppress(UserError):
        LayerElastic(model := models.mlp(), torch.optim.SGD(model.parameters(), lr=0.1), parallel="single")
    elastic, optimizer = elastic_of(models.mlp())
    found = train(elastic, optimizer)
    elastic.close()
    assert not dist.is_initialized()
    return found


def test_a_group_left_by_a_refused_start_is_taken_over(ranks: Ranks) -> None:
    first, second = ranks.run(after_a_refusal)
    assert first == second


def in_the_users_group() -> float:
    dist.init_process_group("gloo")
    for _ in range(2):
        elastic, optimizer = elastic_of(models.mlp())
        found = train(elastic, optimizer)
        elastic.close()
        assert dist.is_initialized()
    dist.destroy_process_group()
    return found


def test_a_group_of_the_users_own_stays(ranks: Ranks) -> None:
    first, second = ranks.run(in_the_users_group)
    assert first == second


def rank_1_does_not_come() -> float:
    elastic, optimizer = elastic_of(models.mlp())
    train(elastic, optimizer)
    start = time.monotonic()
    if elastic.rank == 0:
        icefrog.runtime.meeting._PART_S = 1.0
        try:
            elastic.close()
        finally:
            icefrog.runtime.meeting._PART_S = 10.0
    else:
        time.sleep(3.0)  # as if it were dead
        dist.destroy_process_group()
    return time.monotonic() - start


def test_a_rank_that_does_not_come_to_part_holds_the_others_a_short_time(ranks: Ranks) -> None:
    first, _ = ranks.run(rank_1_does_not_come)
    assert 0.9 < first < 2.9
