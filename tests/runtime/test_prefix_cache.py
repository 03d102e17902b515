"""The cache of the frozen prefix's outputs: same training with and without it, and off wherever that cannot be shown."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from icefrog.runtime import LayerElastic
from icefrog.runtime.prefix_cache import PrefixCache
from icefrog.runtime.rows import UnsupportedError, row_keys
from icefrog.runtime.rowstore import RowStore


def conv_net() -> nn.Sequential:
    """Normalisation and dropout in every block, so that state and random numbers must come out right."""
    torch.manual_seed(0)
    sizes = [(1, 4), (4, 4), (4, 8)]
    blocks = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True), nn.Dropout(0.2))
        for a, b in sizes
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


class Bypass(nn.Module):
    """The head reads the first block's output past the second one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](x)
        return self.head(torch.cat([first, self.blocks[2](self.blocks[1](first))], dim=1))


class Encoder(nn.Module):
    """Blocks that hand on tuples, called by keyword, with a mask that varies."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, *, tokens: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0) -> Any:
        hidden = self.embedding(tokens) * scale
        for block in self.blocks:
            hidden, _ = block(hidden, mask)
        return {"logits": self.head(hidden.mean(1))}


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        out = torch.tanh(self.linear(hidden))
        return (out if mask is None else out * mask[..., None]), None


def images(samples: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 1, 6, 6, generator=generator)
    return x, (x.mean((1, 2, 3)) > 0).long()


Loop = Callable[[LayerElastic, torch.optim.Optimizer, int], None]


def epochs_of(
    elastic: LayerElastic, optimizer: torch.optim.Optimizer, epochs: int, noise: float = 0.0, seed: int = 0
) -> None:
    """Shuffled anew each epoch; the last batch is smaller."""
    x, y = images()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for index in torch.randperm(len(x), generator=generator).split(10):
            batch = x[index] + noise * torch.randn(x[index].shape, generator=generator)
            nn.functional.cross_entropy(elastic.model(batch), y[index]).backward()
            optimizer.step()
            optimizer.zero_grad()


def elastic_of(model: nn.Module, folder: Path | None, **options: Any) -> tuple[LayerElastic, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    elastic = LayerElastic(model, optimizer, env={}, rule="none", checkpoint_dir=folder, **options)
    return elastic, optimizer


@pytest.fixture
def cache_of(tmp_path: Path) -> Iterator[Callable[..., PrefixCache]]:
    opened: list[LayerElastic] = []

    def attach(elastic: LayerElastic, **options: Any) -> PrefixCache:
        opened.append(elastic)
        return elastic.cache_prefix("disk", **options)

    yield attach
    for elastic in opened:
        elastic.close()


def calls_of(conv: Any) -> list[int]:
    """Counts how often a convolution really computes."""
    counter, real = [0], conv._conv_forward

    def counted(*args: Any) -> torch.Tensor:
        counter[0] += 1
        return real(*args)

    conv._conv_forward = counted
    return counter


def test_training_is_the_same_to_the_bit_and_the_prefix_does_not_run(tmp_path: Path, cache_of: Any) -> None:
    results = []
    for cached in (False, True):
        torch.manual_seed(7)
        model = conv_net()
        elastic, optimizer = elastic_of(model, tmp_path / str(cached))
        cache = cache_of(elastic) if cached else None
        epochs_of(elastic, optimizer, 1)
        elastic.freeze(2)
        ran = calls_of(model[0][0])
        epochs_of(elastic, optimizer, 4)
        results.append(models.bytes_of(model))
        if cache is not None:
            assert cache.off_reason == ""
            assert cache.hits == 15  # three of four epochs, five batches each
            assert ran[0] == 5 + 1 + 1  # the first frozen epoch, some rows of it alone, and the check of the first hit
        else:
            assert ran[0] == 20
    assert results[0] == results[1]


def test_moving_the_boundary_never_serves_old_rows(tmp_path: Path, cache_of: Any) -> None:
    """Deeper, back, everything open, and the same depth again after the prefix has trained."""
    results = []
    for cached in (False, True):
        torch.manual_seed(7)
        model = conv_net()
        elastic, optimizer = elastic_of(model, tmp_path / str(cached))
        cache = cache_of(elastic) if cached else None
        hits = 0
        for depth in (1, 2, 1, 0, 2, 2):
            elastic.freeze(depth)
            epochs_of(elastic, optimizer, 2)
            hits += cache.hits if cache is not None and depth else 0
        results.append(models.bytes_of(model))
        assert hits > 0 or not cached
    assert results[0] == results[1]


def test_a_weight_changed_by_hand_is_noticed(tmp_path: Path, cache_of: Any) -> None:
    model = conv_net()
    elastic, optimizer = elastic_of(model, tmp_path)
    cache = cache_of(elastic)
    elastic.freeze(1)
    epochs_of(elastic, optimizer, 2)
    assert cache.hits == 5
    with torch.no_grad():
        model[0][0].weight.mul_(2.0)
    epochs_of(elastic, optimizer, 1)
    assert cache.hits == 0
    assert cache.misses == 5


def test_a_path_around_the_last_output_turns_it_off(tmp_path: Path, cache_of: Any) -> None:
    model = Bypass()
    elastic, optimizer = elastic_of(model, tmp_path)
    cache = cache_of(elastic)
    elastic.freeze(2)
    for _ in range(3):
        models.train(elastic, optimizer, 4)
    assert "reads more of the prefix" in cache.off_reason
    assert cache.hits == 0
    elastic.freeze(1)  # everything comes through the first block's output: fine
    for _ in range(3):
        models.train(elastic, optimizer, 4)
    assert cache.off_reason == ""
    assert cache.hits == 8


def test_augmented_samples_never_hit_and_the_budget_bounds_the_disk(tmp_path: Path, cache_of: Any) -> None:
    elastic, optimizer = elastic_of(conv_net(), tmp_path)
    row = 4 * 6 * 6 * 4
    cache = cache_of(elastic, budget_bytes=20 * row)
    elastic.freeze(1)
    for seed in range(3):
        epochs_of(elastic, optimizer, 1, noise=0.1, seed=seed)
    assert cache.hits == 0
    files = [path.stat() for path in (tmp_path / "prefix-cache").rglob("*.data")]
    assert sum(file.st_size for file in files) <= 20 * row
    for seed in range(3, 93):
        epochs_of(elastic, optimizer, 1, noise=0.1, seed=seed)
    assert "no batch was ever seen twice" in cache.off_reason
    assert not list((tmp_path / "prefix-cache").rglob("*.data"))


def test_validation_and_other_modes_are_left_alone(tmp_path: Path, cache_of: Any) -> None:
    model = conv_net()
    elastic, optimizer = elastic_of(model, tmp_path)
    cache = cache_of(elastic)
    elastic.freeze(1)
    epochs_of(elastic, optimizer, 2)
    x, _ = images()
    hits = cache.hits
    model.eval()
    with torch.no_grad():
        first = model(x)
    assert cache.hits == hits
    assert torch.equal(first, model(x))
    model.train()


def test_outputs_in_tuples_and_arguments_by_keyword(tmp_path: Path, cache_of: Any) -> None:
    model = Encoder()
    elastic, optimizer = elastic_of(model, tmp_path)
    cache = cache_of(elastic)
    elastic.freeze(2)
    tokens = torch.randint(20, (8, 5), generator=torch.Generator().manual_seed(0))
    masks = [torch.ones(8, 5), torch.ones(8, 5).tril()]

    def step(**inputs: Any) -> None:
        elastic.model(**inputs)["logits"].sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        for mask in masks:
            step(tokens=tokens, mask=mask)
    assert cache.hits == 3  # the second mask's last rows are all ones, too: it hits in part at once
    step(tokens=tokens, mask=masks[0], scale=2.0)  # another argument, another function
    assert cache.hits == 3
    step(tokens=tokens.flip(0), mask=masks[0])  # the same rows in another order
    assert cache.hits == 4


def test_a_restarted_job_finds_its_rows(tmp_path: Path, cache_of: Any) -> None:
    elastic, optimizer = elastic_of(conv_net(), tmp_path)
    cache = cache_of(elastic)
    elastic.freeze(2)
    for _ in elastic.epochs(5):
        epochs_of(elastic, optimizer, 1)
        elastic.end_epoch()
        break
    assert cache.misses == 5
    again, optimizer = elastic_of(conv_net(), tmp_path)  # the first one died without closing
    found = cache_of(again)
    for epoch in again.epochs(5):
        assert epoch == 1
        assert again.frozen_layers == 2
        epochs_of(again, optimizer, 1)
        break
    assert found.misses == 2  # then it looked for rows of others; and the last batch, of another size
    assert found.hits == 3


def two_ranks_share(folder: str) -> tuple[int, int, list[float]]:
    model = conv_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    elastic = LayerElastic(model, optimizer, rule="none", checkpoint_dir=folder, global_batch=8)
    cache = elastic.cache_prefix("disk")
    elastic.freeze(2)
    x, y = images()
    sampler = elastic.sampler(len(x))
    for _ in elastic.epochs(4):
        for index in sampler:
            nn.functional.cross_entropy(elastic.model(x[index]), y[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
        elastic.end_epoch()
    total = [float(p.double().sum()) for p in model.parameters()]
    elastic.close()
    return cache.hits, cache.misses, total


def test_ranks_of_one_machine_share_rows(ranks: Any, tmp_path: Path) -> None:
    """Each rank computes about half of the samples in the first epoch; from the second on nobody computes any."""
    (hits_0, misses_0, sums_0), (hits_1, misses_1, sums_1) = ranks.run(two_ranks_share, str(tmp_path))
    assert sums_0 == sums_1
    assert hits_0 + misses_0 == hits_1 + misses_1
    assert hits_0 >= 12
    assert hits_1 >= 12


# -- keys and rows ----------------------------------------------------------------------------------------------------------

_ARRAYS = st.integers(1, 5).flatmap(
    lambda rows: st.lists(
        st.lists(st.sampled_from([0, 1, 2, 255]), min_size=3, max_size=3), min_size=rows, max_size=rows
    )
)


@given(rows=_ARRAYS, dtype=st.sampled_from([torch.uint8, torch.int64, torch.float32, torch.float16, torch.bfloat16]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_rows_have_equal_keys_exactly_if_they_are_equal(rows: list[list[int]], dtype: torch.dtype) -> None:
    tensor = torch.tensor(rows).to(dtype)
    batch, keys, _ = row_keys(((tensor,), {}))
    assert batch == len(rows)
    for i, one in enumerate(tensor):
        for j, other in enumerate(tensor):
            assert (keys[i] == keys[j]) == torch.equal(one, other)


def test_keys_tell_shapes_types_arguments_and_places_apart() -> None:
    x = torch.zeros(2, 4)
    variants: list[Any] = [
        ((x,), {}), ((x.view(2, 2, 2),), {}), ((x.double(),), {}), ((x, x), {}), ((x,), {"a": x}), ((x,), {"a": 1}),
        ((x,), {"a": None}), ((x, torch.zeros(3)), {}), ((x, torch.ones(3)), {}),
    ]  # fmt: skip
    keys = [row_keys(variant)[1][0] for variant in variants]
    assert len(set(keys)) == len(keys)
    swapped = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    assert len(set(row_keys(((swapped,), {}))[1])) == 2


def test_what_has_no_rows_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no tensor with a batch dimension"):
        row_keys(((torch.tensor(1.0),), {}))
    with pytest.raises(UnsupportedError, match="object"):
        row_keys(((torch.zeros(2, 2), object()), {}))


def test_a_store_shares_bounds_and_forgets(tmp_path: Path) -> None:
    rows = np.arange(12, dtype=np.uint8).reshape(3, 4)
    keys = [(1, 1), (2, -2), (3, 3)]
    first, second = RowStore(tmp_path, "a", 4, 8.0), RowStore(tmp_path, "a", 4, 8.0)
    assert first.write([keys[0], keys[0]], rows[[0, 0]]) == 1
    assert second.read([keys[0]]) is None
    assert second.refresh() == 1
    assert second.write(keys, rows) == 2  # the budget of two rows, and one that is there already
    assert second.full
    found = second.read([keys[2], keys[0]])
    assert found is not None
    assert found.tolist() == rows[[2, 0]].tolist()
    other = RowStore(tmp_path, "b", 4, 8.0)
    assert other.refresh() == 0
    other.write([keys[0]], rows[:1])
    assert [path.name for path in tmp_path.iterdir()] == [other.folder.name]
    other.close()
    assert not list(tmp_path.iterdir())


def test_rows_are_nobody_elses(tmp_path: Path, cache_of: Any) -> None:
    elastic, optimizer = elastic_of(conv_net(), tmp_path)
    cache = cache_of(elastic)
    elastic.freeze(2)
    epochs_of(elastic, optimizer, 1)
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("kind", ["another user's", "a link"])
def test_a_folder_of_somebody_elses_is_not_used(
    tmp_path: Path, cache_of: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    elastic, optimizer = elastic_of(conv_net(), tmp_path)
    cache = cache_of(elastic)
    if kind == "a link":
        (tmp_path / "elsewhere").mkdir()
        cache.folder.symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    elastic.freeze(2)
    epochs_of(elastic, optimizer, 2)
    assert cache.off_reason == f"{cache.folder}: it is another user's"
    assert cache.hits == 0
    assert not list(tmp_path.rglob("*.data"))
