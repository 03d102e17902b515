"""How many samples a model is given, told from its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from icefrog.runtime import LayerElastic
from icefrog.runtime.samples import SampleCount


@dataclass
class Batch:
    x: torch.Tensor
    name: str = ""


def image(height: int = 8) -> torch.Tensor:
    return torch.rand(3, height, 8)


def target(boxes: int) -> dict[str, torch.Tensor]:
    return {"boxes": torch.rand(boxes, 4), "labels": torch.ones(boxes).long()}


def sentence(length: int, *batch: int) -> dict[str, torch.Tensor]:
    return {"ids": torch.ones(*batch, length).long(), "mask": torch.ones(*batch, length).long()}


CASES: dict[str, tuple[tuple[Any, ...], int]] = {
    "tensor": ((torch.rand(5, 3), torch.rand(7)), 5),
    "scalar first": ((torch.tensor(0.5), torch.rand(4, 2)), 4),
    "mapping": (({"a": torch.rand(6, 2)},), 6),
    "array": ((np.zeros((6, 2)),), 6),
    "dataclass": ((Batch(torch.rand(6, 2)),), 6),
    "images and targets": (([image(), image(9)], [target(4), target(1)]), 2),
    "images of one size": (([image() for _ in range(5)],), 5),
    "a tuple of images": (((image(), image()), (target(2), target(2))), 2),
    "one image": (([image()], [target(2)]), 1),
    "mappings with an image": (([{"image": image(), "height": 8} for _ in range(4)],), 4),
    "mappings of targets": (([target(3), target(4), target(5)],), 3),
    "texts": ((["a", "b", "c"],), 3),
    "sequences": (([torch.ones(4), torch.ones(6), torch.ones(5)],), 3),
    "packed": ((pack_sequence([torch.ones(4, 2), torch.ones(2, 2), torch.ones(1, 2)]),), 3),
    "nested": ((torch.nested.nested_tensor([torch.rand(3, 2), torch.rand(5, 2)], layout=torch.jagged),), 2),
    "mappings of sequences": (([sentence(4), sentence(6), sentence(5)],), 3),
    "several inputs in a list": (([torch.rand(6, 10), torch.rand(6, 20)],), 6),
    "several inputs of other kinds": (((torch.rand(6, 10), torch.ones(2, 30).long()),), 6),
    "views": (([torch.rand(6, 3, 8, 8), torch.rand(6, 3, 4, 4)],), 6),
    "sentences in pairs": (([sentence(9, 6), sentence(7, 6)], torch.ones(6)), 6),
    "nothing": ((1, None, [], ()), 0),
}


@pytest.mark.parametrize("case", CASES)
def test_samples_of_a_call(case: str) -> None:
    args, samples = CASES[case]
    assert SampleCount().of(args, {}) == samples
    assert SampleCount().of((), {f"arg{i}": value for i, value in enumerate(args)}) == samples


@pytest.mark.parametrize(
    ("args", "samples"),
    [
        ((torch.rand(9, 5, 16), torch.rand(2, 5, 8)), 5),  # a sequence and a state
        ((torch.rand(9, 5), torch.ones(5)), 5),
        ((torch.ones(5), torch.rand(9, 5)), 5),  # lengths
        ((np.zeros((9, 5, 2)),), 5),
        (({"src": torch.rand(9, 5, 16)},), 5),
        ((pack_sequence([torch.ones(4, 2), torch.ones(2, 2), torch.ones(1, 2)]),), 3),
    ],
)
def test_samples_where_time_comes_first(args: tuple[Any, ...], samples: int) -> None:
    assert SampleCount(batch_dim=1).of(args, {}) == samples


class Tagger(nn.Module):
    """PyTorch's own layout: (time, samples, features); the last output in time is classified."""

    def __init__(self, cell: str, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.inner = nn.Linear(6, 8)
        if cell == "lstm":
            self.body: nn.Module = nn.LSTM(8, 8, num_layers=2, batch_first=batch_first)
        else:
            self.body = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.body(self.inner(x))
        found = found[0] if isinstance(found, tuple) else found
        return self.head(found[:, -1] if self.batch_first else found[-1])


@pytest.mark.parametrize("cell", ["lstm", "transformer"])
def test_time_first_trains_and_counts_as_samples_first(cell: str) -> None:
    seen = []
    for batch_first in (True, False):
        torch.manual_seed(0)
        model = Tagger(cell, batch_first)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        where = {} if batch_first else {"batch_dim": 1}
        elastic = LayerElastic(model, optimizer, rule="none", stats_every=1, env={}, **where)
        draw = torch.Generator().manual_seed(1)
        for epoch in elastic.epochs(3):
            elastic.freeze(min(epoch, 1))
            for length in (9, 4, 7):
                x, y = torch.rand(5, length, 6, generator=draw), torch.randint(2, (5,), generator=draw)
                nn.functional.cross_entropy(elastic.model(x if batch_first else x.transpose(0, 1)), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            elastic.end_epoch()
        assert elastic._at.samples_per_epoch == 15
        assert elastic._engine.counting.global_batch == 5
        seen.append((elastic.effective_samples, [p.detach().clone() for p in model.parameters()]))
        elastic.close()
    assert seen[1][0] == pytest.approx(seen[0][0], rel=1e-3)
    torch.testing.assert_close(seen[1][1], seen[0][1], rtol=1e-4, atol=1e-5)


def test_a_model_of_lists_is_one_also_where_lengths_are_equal() -> None:
    count = SampleCount()
    assert count.of(([torch.ones(4), torch.ones(6)],), {}) == 2
    assert count.of(([torch.ones(9)],), {}) == 1
    assert count.of(([torch.ones(9), torch.ones(9), torch.ones(9)],), {}) == 3


def test_a_last_batch_of_three_or_four_sequences_is_no_image() -> None:
    count = SampleCount()
    for batch in (32, 4, 32, 3, 1):
        assert count.of(([torch.rand(batch, 30, 64), torch.rand(batch, 30, 64)],), {}) == batch


class Detector(nn.Module):
    """Of images of any size, one by one; losses by name in training."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU())
        self.boxes, self.classes = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        found = torch.stack([self.backbone(image).mean((1, 2)) for image in images])
        labels = torch.stack([one["labels"][0] for one in targets])
        boxes = torch.stack([one["boxes"].mean(0) for one in targets])
        return {
            "box": (self.boxes(found) - boxes).abs().mean(),
            "class": nn.functional.cross_entropy(self.classes(found), labels),
        }


def test_a_detector_counts_its_images_whatever_is_frozen() -> None:
    torch.manual_seed(0)
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    elastic = LayerElastic(model, optimizer, rule="none", env={})
    sizes = [2, 2, 2, 1]
    for epoch in elastic.epochs(3):
        elastic.freeze(epoch)
        for size in sizes:
            losses = elastic.model([image(8 + k) for k in range(size)], [target(k + 1) for k in range(size)])
            sum(losses.values()).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        elastic.end_epoch()
        if epoch == 2:
            break
    assert elastic._at.samples_per_epoch == 7
    assert elastic._at.samples == 21
    elastic.close()
