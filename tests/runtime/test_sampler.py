from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from icefrog.errors import UserError
from icefrog.runtime import ElasticSampler


@dataclass(frozen=True)
class Life:
    """A job between two resizes."""

    world: int
    accum: int
    batch: int
    steps: int
    saved: int
    """Steps after which the last checkpoint was made; what comes after it is done again by the next life."""


@st.composite
def life(draw: st.DrawFn, batches: st.SearchStrategy[int]) -> Life:
    steps = draw(st.integers(0, 9))
    sizes = {"world": draw(st.integers(1, 5)), "accum": draw(st.integers(1, 3)), "batch": draw(batches)}
    return Life(**sizes, steps=steps, saved=draw(st.integers(0, steps)))


def lived(samples: int, lives: list[Life]) -> tuple[dict[int, list[int]], int]:
    """What the lives train on by epoch, and the epoch they end in."""
    kept: dict[int, list[int]] = {}
    epoch = cursor = 0
    for now in lives:
        ranks = [
            ElasticSampler(samples, now.batch, rank=r, world_size=now.world, accum_steps=now.accum, seed=7)
            for r in range(now.world)
        ]
        seen = {number: list(part) for number, part in kept.items()}
        saved = (epoch, cursor, kept)
        iterators: list[Iterator[list[int]]] = []
        for step in range(now.steps + 1):
            if step == now.saved:
                saved = (epoch, cursor, {number: list(part) for number, part in seen.items()})
            if step == now.steps:
                break
            if not iterators:
                for sampler in ranks:
                    sampler.seek(epoch, cursor)
                assert len({len(sampler) for sampler in ranks}) == 1
                iterators = [iter(sampler) for sampler in ranks]
            plan = ranks[0].step_sizes(cursor)
            if plan.total:
                for micro in range(now.accum):
                    for rank, iterator in enumerate(iterators):
                        part = next(iterator)
                        assert len(part) == plan.sizes[micro][rank] > 0
                        seen.setdefault(epoch, []).extend(part)
                cursor += plan.total
            if not ranks[0].next_size(cursor):
                assert [next(iterator, None) for iterator in iterators] == [None] * now.world
                assert samples - cursor < now.world * now.accum
                epoch, cursor, iterators = epoch + 1, 0, []
        epoch, cursor, kept = saved
    return kept, epoch


@settings(max_examples=60)
@given(st.integers(30, 200), st.integers(30, 64), st.data())
def test_each_sample_once_an_epoch_through_resizes_and_lost_work(samples: int, batch: int, data: st.DataObject) -> None:
    """S1: lives end in mid-epoch, at its end, or right behind it."""
    kept, epoch = lived(samples, data.draw(st.lists(life(st.just(batch)), min_size=1, max_size=10)))
    for number in range(epoch):
        assert sorted(kept[number]) == list(range(samples))
    assert len(set(kept.get(epoch, []))) == len(kept.get(epoch, []))


@settings(max_examples=60)
@given(st.integers(15, 150), st.lists(life(st.integers(15, 64)), min_size=1, max_size=10))
def test_other_batches_and_many_ranks_leave_out_less_than_a_sample_each(samples: int, lives: list[Life]) -> None:
    kept, _ = lived(samples, lives)
    assert all(len(set(part)) == len(part) for part in kept.values())


def test_a_small_rest_is_spread_over_two_steps_at_every_world_size() -> None:
    def sizes(samples: int, world: int) -> list[int]:
        sampler = ElasticSampler(samples, 16, world_size=world)
        cursor, found = 0, []
        while size := sampler.next_size(cursor):
            found.append(size)
            cursor += size
        return found

    for world in (1, 2, 8):
        assert sizes(100, world) == [16, 16, 16, 16, 16, 10, 10]
        assert sizes(104, world) == [16] * 6 + [8]
        assert sizes(96, world) == [16] * 6
    assert sizes(31, 15) == [16, 15]
    assert sizes(17, 15) == [17]  # two steps would leave ranks without a sample


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
