"""Two replicas of two pipeline stages over four gloo processes, against the same training in one process."""

from __future__ import annotations

from collections.abc import Iterator

import models
import pytest
import torch
from pipeline_jobs import LOSS, close, compare, diverged, flops, measured, run, run_with, wire_and_work
from two_ranks import Ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    pool = Ranks(4)
    yield pool
    pool.close()


def test_hybrid_trains_as_one_process(four: Ranks) -> None:
    boundaries = {1: 2, 2: 4, 3: 1, 4: 0}
    one = run("single", boundaries, 6)
    found = four.run(run_with, "hybrid", boundaries, 6, {})
    for two in found:
        assert close(one["params"], two["params"])
        assert close(one["moments"], two["moments"])
        assert two["params"] == found[0]["params"]
        assert (two["step"], two["samples"]) == (one["step"], one["samples"])
        assert two["flops"] == pytest.approx(one["flops"])
    assert [two["held"] for two in found] == [84, 84, 105, 105]  # ranks 0, 1 hold stage 0, ranks 2, 3 stage 1


def test_hybrid_sends_what_trains(four: Ranks) -> None:
    depths = [0, 1, 2, 3, 4, 0]
    sizes = [4 * sum(p.numel() for p in block.parameters()) for block in models.mlp(depth=5)]
    activation = 8 * 6 * 4  # of a replica's half of the batch
    for rank, found in enumerate(four.run(wire_and_work, "hybrid", depths)):
        mine = range(2) if rank < 2 else range(2, 5)
        for depth, at in zip(depths, found, strict=True):
            assert at["reduced"] == sum(sizes[layer] for layer in mine if layer >= depth)
            assert at["sent"] == (activation if rank < 2 or depth < 2 else 0)
            assert at["flops"] == flops(mine, depth, 8)
            assert at["same_bits"]


def test_hybrid_statistics_resizes_and_odd_orders(four: Ranks) -> None:
    model = models.mlp(depth=5)
    x, y = models.data(16)
    grads = []
    for part, label in zip(x.chunk(4), y.chunk(4), strict=True):  # two replicas, two halves each
        model.zero_grad()
        LOSS(model(part), label).backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    trace = float(torch.stack(grads).var(dim=0).sum()) / 4
    for variance, _ in four.run(measured, "hybrid"):
        assert sum(variance) == pytest.approx(16 * trace, rel=1e-4)
    compare(four, ["hybrid", "pipeline", "replicas", "ddp", "alone"], 2, 8)


def test_hybrid_replicas_that_differ_are_found_by_all(four: Ranks) -> None:
    for found in four.run(diverged, "hybrid"):  # rank 3 holds stage 1 of replica 1
        assert "'2.0' differs between rank 2 and ranks [3]" in found
