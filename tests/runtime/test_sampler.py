from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from icefrog.errors import UserError
from icefrog.runtime import ElasticSampler

worlds = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=5)


@given(st.integers(15, 300), st.integers(15, 64), worlds, st.integers(0, 3), st.data())
def test_each_sample_once_an_epoch_through_any_resizes(
    samples: int, batch: int, sizes: list[tuple[int, int]], epoch: int, data: st.DataObject
) -> None:
    seen: Counter[int] = Counter()
    cursor = 0
    for world, accum in sizes:
        ranks = [
            ElasticSampler(samples, batch, rank=r, world_size=world, accum_steps=accum, seed=7) for r in range(world)
        ]
        for sampler in ranks:
            sampler.seek(epoch, cursor)
        left = len(ranks[0]) // accum
        steps = left if (world, accum) == sizes[-1] else data.draw(st.integers(0, left))
        iterators = [iter(sampler) for sampler in ranks]
        for _ in range(steps):
            plan = ranks[0].step_sizes(cursor)
            for micro in range(accum):
                for rank, iterator in enumerate(iterators):
                    part = next(iterator)
                    assert len(part) == plan.sizes[micro][rank] > 0
                    seen.update(part)
            cursor += plan.total
        if (world, accum) == sizes[-1]:
            break
    if cursor == samples:
        assert seen == Counter(range(samples))
    else:  # an earlier entry equal to the last one already ended the loop
        assert max(seen.values(), default=1) == 1


def test_global_batches_do_not_depend_on_the_world_size() -> None:
    def global_batches(world: int, accum: int) -> list[set[int]]:
        parts = [list(ElasticSampler(100, 16, rank=r, world_size=world, accum_steps=accum)) for r in range(world)]
        return [
            {i for part in parts for micro in part[step : step + accum] for i in micro}
            for step in range(0, len(parts[0]), accum)
        ]

    assert global_batches(1, 1) == global_batches(2, 1) == global_batches(4, 1) == global_batches(2, 2)


def test_epochs_differ_and_seeds_differ() -> None:
    sampler, other = ElasticSampler(50, 10), ElasticSampler(50, 10, seed=1)
    first = list(sampler)
    assert first == list(sampler)
    assert first != list(other)
    sampler.seek(1)
    assert first != list(sampler)


def test_a_batch_that_cannot_be_dealt_is_refused() -> None:
    with pytest.raises(UserError, match="cannot be dealt"):
        ElasticSampler(100, 3, world_size=4)
