"""The tasks of the layer-elasticity evidence: real data out of published packages, sized for one CPU thread.

Data and networks come from scripts/split_tasks.py; here is what belongs to the evidence alone: how much is trained on, the
optimizer, the validation interval, and the target, which was fixed from control runs before anything was compared.
A seed decides the split, the order of samples and the initial weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from split_tasks import (
    Batch,
    Encoder,
    Sets,
    Units,
    digits,
    encoder_units,
    list_mails,
    mails,
    residual,
    word_pieces,
)


@dataclass(frozen=True)
class EvidenceTask:
    """One network on one data set.

    Attributes:
        note: what it is, for the page.
        build: folder -> a network before training; the generator is seeded before.
        units: freezable units in forward order.
        optimizer: of the whole network.
        data: (folder, seed) -> training and validation samples.
        batch: samples a step.
        interval_steps: steps between validations, which are also the tuning interval.
        warmup_steps: linear warm-up of the learning rate; constant from there on.
        target: validation accuracy, mean of three validations, that ends a run.
        max_intervals: a run that has not reached the target by then has missed it.
        augment: changes each training batch at random (a frozen prefix cannot be cached then).
    """

    note: str
    build: Callable[[Path], nn.Module]
    units: Callable[[nn.Module], Units]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    data: Callable[[Path, int], Sets]
    batch: int
    interval_steps: int
    warmup_steps: int
    target: float
    max_intervals: int
    augment: Callable[[torch.Tensor, torch.Generator], torch.Tensor] | None = None


# --- data


def few_spam(train: int, held_out: int, length: int) -> Callable[[Path, int], Sets]:
    """Spam or not: ``train`` mails of the seed's order train, ``held_out`` others validate; ``length`` WordPiece tokens."""

    def load(folder: Path, seed: int) -> Sets:
        return _split(mails(folder), train, held_out, length, seed)

    return load


def few_lists(train: int, held_out: int, length: int) -> Callable[[Path, int], Sets]:
    """Which of six mailing lists a mail was sent to, without the tag that lists put into subjects."""

    def load(folder: Path, seed: int) -> Sets:
        return _split(list_mails(folder), train, held_out, length, seed)

    return load


def _split(rows: list[tuple[str, int]], train: int, held_out: int, length: int, seed: int) -> Sets:
    order = np.random.default_rng(seed).permutation(len(rows))[: train + held_out]
    x = word_pieces([rows[i][0] for i in order], length)
    y = torch.tensor([rows[i][1] for i in order])
    return _first((x, y), train, held_out)


def few_digits(train: int, held_out: int) -> Callable[[Path, int], Sets]:
    """MNIST digits, 28x28, none of them moved."""

    def load(folder: Path, seed: int) -> Sets:
        return _first(digits(folder, seed).train, train, held_out)

    return load


def upper_digits(train: int, held_out: int) -> Callable[[Path, int], Sets]:
    """MNIST digits 5 to 9, labelled 0 to 4."""

    def load(folder: Path, seed: int) -> Sets:
        return _first(_half_of_digits(folder, seed, upper=True), train, held_out)

    return load


def _half_of_digits(folder: Path, seed: int, *, upper: bool) -> Batch:
    """MNIST digits 0 to 4, or 5 to 9, labelled 0 to 4."""
    x, y = digits(folder, seed).train
    chosen = (y >= 5) == upper
    return x[chosen], y[chosen] % 5


def _first(rows: Batch, train: int, held_out: int) -> Sets:
    """The first ``train`` rows train, the ``held_out`` after them validate."""
    x, y = rows
    return Sets((x[:train], y[:train]), (x[train : train + held_out], y[train : train + held_out]))


def distort(x: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """Each image turned by up to 30 degrees, scaled by up to 20 %, moved by up to 3 of 16 pixels, and noisy."""
    count = len(x)
    turn, size, dx, dy = ((torch.rand(count, generator=rng) * 2 - 1) * most for most in (0.52, 0.2, 0.38, 0.38))
    cosine, sine = torch.cos(turn) * (1 + size), torch.sin(turn) * (1 + size)
    maps = torch.stack([torch.stack([cosine, -sine, dx], 1), torch.stack([sine, cosine, dy], 1)], 1)
    grid = F.affine_grid(maps, list(x.shape), align_corners=False)
    moved = F.grid_sample(x + 1.0, grid, align_corners=False) - 1.0
    return moved + 0.4 * torch.randn(x.shape, generator=rng)


def small_digits(held_out: int) -> Callable[[Path, int], Sets]:
    """The 1,797 digits of scikit-learn, 8x8, doubled to 16x16; those that validate are distorted once."""

    def load(_folder: Path, seed: int) -> Sets:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(seed).permutation(len(labels))
        x = torch.from_numpy(pixels[order].reshape(-1, 1, 8, 8).astype(np.float32)) / 8.0 - 1.0
        x = F.interpolate(x, scale_factor=2, mode="bilinear")
        y = torch.from_numpy(labels[order])
        held = distort(x[-held_out:], torch.Generator().manual_seed(seed))
        return Sets((x[:-held_out], y[:-held_out]), (held, y[-held_out:]))

    return load


# --- networks


def cnn(width: int) -> nn.Sequential:
    """Six convolutions in three stages, and a head: 7 units."""
    units: list[nn.Module] = []
    inputs = 1
    for stage, outputs in enumerate((width, width, 2 * width, 2 * width, 4 * width, 4 * width)):
        pool: list[nn.Module] = [nn.MaxPool2d(2)] if stage % 2 else []
        units.append(nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), *pool))
        inputs = outputs
    return nn.Sequential(*units, nn.Sequential(nn.Flatten(), nn.Linear(inputs * 4, 10)))


def transferred(folder: Path, width: int = 32) -> nn.Module:
    """``residual(width)`` that has learnt the digits 0 to 4, with a fresh head for five others.

    Learnt once, by two passes over all digits 0 to 4 with one fixed seed, and kept in the folder.
    """
    file = folder / f"residual-{width}-digits-0-to-4.pt"
    model = residual(width)
    if not file.exists():
        with torch.random.fork_rng():
            torch.manual_seed(12345)
            learning = residual(width)
            x, y = _half_of_digits(folder, 12345, upper=False)
            optimizer = _sgd(0.02)(learning)
            for _ in range(2):
                for chosen in torch.randperm(len(x)).split(32):
                    F.cross_entropy(learning(x[chosen]), y[chosen]).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            torch.save(learning.state_dict(), file)
    fresh_head = model[-1].state_dict()
    model.load_state_dict(torch.load(file, weights_only=True))
    model[-1].load_state_dict(fresh_head)
    return model


class Words(nn.Module):
    """Token embeddings with positions; 0 is padding."""

    def __init__(self, vocabulary: int, width: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width, padding_idx=0)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        nn.init.normal_(self.token.weight, std=0.05)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.token(ids % self.token.num_embeddings) + self.position[: ids.shape[1]]
        return out


class Pooled(nn.Module):
    """Norm, mean over tokens, linear."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.norm(x).mean(1))
        return out


def classifier(width: int, layers: int, length: int) -> nn.Sequential:
    """A pre-norm transformer encoder from scratch; token ids are folded into 8,192 embeddings."""
    blocks = [
        nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        for _ in range(layers)
    ]
    return nn.Sequential(Words(8192, width, length), *blocks, Pooled(width, 2))


def _children(model: nn.Module) -> Units:
    return [[unit] for unit in model.children()]


def _adamw(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """The fused one: PyTorch's default is five times slower on a CPU, which would flatter freezing the embeddings."""
    return lambda model: torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=1e-2, fused=True)


def _sgd(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4, fused=True)


TASKS: dict[str, EvidenceTask] = {
    "minilm-spam": EvidenceTask(
        note="MiniLM (6 layers, 22.7 M parameters) fine-tuned on 800 e-mails: spam or not; 48 tokens, AdamW 2e-5, batch 16",
        build=lambda _: Encoder(2),
        units=encoder_units,
        optimizer=_adamw(2e-5),
        data=few_spam(800, 300, 48),
        batch=16,
        interval_steps=15,
        warmup_steps=10,
        target=0.93,
        max_intervals=24,
    ),
    "minilm-lists": EvidenceTask(
        note="MiniLM fine-tuned on 800 e-mails: which of six mailing lists; 32 tokens, AdamW 1e-4, batch 16",
        build=lambda _: Encoder(6),
        units=encoder_units,
        optimizer=_adamw(1e-4),
        data=few_lists(800, 300, 32),
        batch=16,
        interval_steps=15,
        warmup_steps=10,
        target=0.83,
        max_intervals=24,
    ),
    "minilm-lists-long": EvidenceTask(
        note="MiniLM fine-tuned on 800 e-mails: which of six mailing lists; 64 tokens, AdamW 2e-4, batch 16",
        build=lambda _: Encoder(6),
        units=encoder_units,
        optimizer=_adamw(2e-4),
        data=few_lists(800, 300, 64),
        batch=16,
        interval_steps=15,
        warmup_steps=10,
        target=0.88,
        max_intervals=24,
    ),
    "minilm-spam-long": EvidenceTask(
        note="MiniLM fine-tuned on 400 e-mails: spam or not; 64 tokens, AdamW 1e-4, batch 16",
        build=lambda _: Encoder(2),
        units=encoder_units,
        optimizer=_adamw(1e-4),
        data=few_spam(400, 300, 64),
        batch=16,
        interval_steps=15,
        warmup_steps=10,
        target=0.95,
        max_intervals=24,
    ),
    "resnet-transfer": EvidenceTask(
        note="residual network of 8 blocks (32 to 256 wide) that learnt digits 0 to 4, fine-tuned on 500 of 5 to 9",
        build=transferred,
        units=_children,
        optimizer=_sgd(0.01),
        data=upper_digits(500, 1000),
        batch=32,
        interval_steps=15,
        warmup_steps=10,
        target=0.95,
        max_intervals=24,
    ),
    "cnn-digits": EvidenceTask(
        note="CNN of 6 convolutions from scratch on sklearn's digits, distorted anew each time; SGD 0.01, batch 32",
        build=lambda _: cnn(32),
        units=_children,
        optimizer=_sgd(0.01),
        data=small_digits(500),
        batch=32,
        interval_steps=100,
        warmup_steps=20,
        target=0.94,
        max_intervals=40,
        augment=distort,
    ),
    "resnet-mnist": EvidenceTask(
        note="residual network of 8 blocks (16 to 128 wide) from scratch on 2,000 MNIST digits; SGD 0.02, batch 32",
        build=lambda _: residual(16),
        units=_children,
        optimizer=_sgd(0.02),
        data=few_digits(2000, 1000),
        batch=32,
        interval_steps=30,
        warmup_steps=20,
        target=0.965,
        max_intervals=50,
    ),
    "transformer-spam": EvidenceTask(
        note="4-layer transformer (128 wide) from scratch on 3,000 e-mails: spam or not; 48 tokens, AdamW 2e-4, batch 32",
        build=lambda _: classifier(128, 4, 48),
        units=_children,
        optimizer=_adamw(2e-4),
        data=few_spam(3000, 800, 48),
        batch=32,
        interval_steps=30,
        warmup_steps=20,
        target=0.935,
        max_intervals=40,
    ),
}
TASKS |= {
    "resnet-transfer-wide": replace(
        TASKS["resnet-transfer"],
        note="residual network of 8 blocks (48 to 384 wide) that learnt digits 0 to 4, fine-tuned on 500 of 5 to 9",
        build=lambda folder: transferred(folder, 48),
    ),
    "cnn-digits-wide": replace(
        TASKS["cnn-digits"],
        note="the same CNN 48 to 192 wide",
        build=lambda _: cnn(48),
    ),
    "resnet-mnist-wide": replace(
        TASKS["resnet-mnist"],
        note="residual network of 8 blocks (32 to 256 wide) from scratch on 2,000 MNIST digits; SGD 0.02, batch 32",
        build=lambda _: residual(32),
        target=0.955,
    ),
    "transformer-spam-wide": replace(
        TASKS["transformer-spam"],
        note="4-layer transformer (192 wide) from scratch on 3,000 e-mails: spam or not; 64 tokens, AdamW 2e-4, batch 32",
        build=lambda _: classifier(192, 4, 64),
        data=few_spam(3000, 800, 64),
    ),
}
