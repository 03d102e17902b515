"""A batch of which some rows are in the prefix cache: the prefix computes the others only."""

from __future__ import annotations

import torch
from torch import nn

from icefrog.runtime import LayerElastic


class Counting(nn.Module):
    """A linear layer that counts the rows it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.rows: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(x))
        return torch.tanh(self.linear(x))


def trained(cached: bool) -> tuple[nn.Module, list[int], int]:
    """Four batches of eight out of 16 samples, that overlap by half; the first layer frozen from the start."""
    torch.manual_seed(0)
    front = Counting()
    model = nn.Sequential(front, nn.Linear(6, 3))
    elastic = LayerElastic(
        model, torch.optim.SGD(model.parameters(), lr=0.1), rule="none", samples_per_epoch=16, env={}
    )
    cache = elastic.cache_prefix("memory") if cached else None
    elastic.freeze(1)
    x, y = torch.randn(16, 6), torch.randint(0, 3, (16,))
    for start in (0, 4, 8, 7):
        chosen = torch.arange(start, start + 8)
        nn.functional.cross_entropy(elastic.model(x[chosen]), y[chosen]).backward()
        elastic.optimizer.step()
        elastic.optimizer.zero_grad()
    hits = cache.hits if cache else 0
    elastic.close()
    return model, front.rows, hits


def test_only_the_rows_that_are_missing_are_computed_and_training_is_the_same() -> None:
    plain, computed, _ = trained(cached=False)
    assert computed == [8, 8, 8, 8]
    model, computed, hits = trained(cached=True)
    # 8, and every second of them alone; then 4 of 8, and both ways once, to verify; 4 again; and nothing
    assert computed[:3] == [8, 4, 4]
    assert sum(computed) == 8 + 4 + 4 + 8 + 4
    assert hits == 3
    for mine, reference in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=1e-6)


def test_one_missing_row_is_not_computed_as_a_batch_of_one() -> None:
    torch.manual_seed(0)
    front = Counting()
    model = nn.Sequential(front, nn.Linear(6, 3))
    elastic = LayerElastic(
        model, torch.optim.SGD(model.parameters(), lr=0.1), rule="none", samples_per_epoch=16, env={}
    )
    elastic.cache_prefix("memory")
    elastic.freeze(1)
    x = torch.randn(9, 6)
    for chosen in (slice(0, 8), slice(1, 9)):
        elastic.model(x[chosen]).sum().backward()
        elastic.optimizer.step()
        elastic.optimizer.zero_grad()
    elastic.close()
    assert front.rows[:3] == [8, 4, 2]
