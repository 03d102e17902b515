"""Property: the same on two ranks. A job with a cache or a compiled model, whose ranks die together, is the plain one.

As in ``test_any_order_features``, to the bit, dropout included, since the number of ranks is the same in each life. Not
drawn: a schedule that each rank steps by a loss of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_any_order import differences
from test_any_order_features import Featured, three_ways
from torch import nn
from two_ranks import Ranks

from icefrog.runtime.prefix_cache import PrefixCache


class Doubled(Featured):
    """What a seed draws, for two ranks."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        if self.schedule == "plateau":
            self.schedule = "step"
        if any(isinstance(module, nn.BatchNorm1d) for module in self.model().modules()):
            self.accum = 1  # it wants two samples


def linear_by_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """In place of a matrix product, where rounding depends on a row's place: the cache would give it otherwise."""
    found = (x.unsqueeze(-2) * weight).sum(-1)
    return found if bias is None else found + bias


def found_by_a_rank(seed: int, folder: Path) -> tuple[list[str], list[str], int]:
    """(Featured against plain, died against featured, steps)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefixCache, "_fill", lambda *_: False)
        patch.setattr(nn.functional, "linear", linear_by_row)
        plain, featured, died = three_ways(Doubled(seed), folder)
    return list(differences(plain, featured)), list(differences(featured, died)), plain["counters"]["step"]


def check(ranks: Ranks, seed: int, folder: Path) -> None:
    for rank, (features, deaths, steps) in enumerate(ranks.run(found_by_a_rank, seed, folder, timeout_s=900.0)):
        assert steps > 0
        assert features == [], (rank, seed, vars(Doubled(seed)))
        # Running statistics that are not of the first rank are not kept, so an average of them is another one.
        lost = [where for where in deaths if rank == 0 or where.startswith("/rng")]
        assert lost == [], (rank, seed, vars(Doubled(seed)))


@pytest.mark.parametrize("seed", [3])
def test_two_ranks_with_features_that_die_are_the_plain_ones_that_never_did(
    ranks: Ranks, seed: int, tmp_path: Path
) -> None:
    check(ranks, seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 24))
def test_more_jobs_with_features_on_two_ranks(ranks: Ranks, seed: int, tmp_path: Path) -> None:
    check(ranks, seed, tmp_path)
