"""Measures how gradient variance splits over layers and training progress, with and without freezing, at small scale.

Two networks of this file, a residual CNN (SGD) and a small transformer (AdamW), learn scikit-learn's 8x8 digits. Every
step is taken as 2 micro-batches, so that each unit's per-sample variance S = M tr Cov(g) and |G|^2 come from the step's
own gradients (for AdamW: of the preconditioned gradient). One run trains everything; nine more start from its state at
25, 50, 75 % of the steps and freeze the first 25, 50, 75 % of the units: 10 curves a network, averaged over seeds in
the logarithm. The result stands in src/icefrog/workloads/layer_split.json and is a *proxy* for larger networks.

    python scripts/measure_layer_split.py            # some minutes on one core
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

OUTPUT = Path(__file__).parents[1] / "src/icefrog/workloads/layer_split.json"
FRACTIONS = (0.25, 0.5, 0.75)
GRID = 11
BATCH, MICRO = 64, 2
BETA2 = 0.999  # AdamW's default


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
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.skip(x))


def cnn() -> nn.Sequential:
    """10 units: stem, 8 residual blocks in 4 stages, head: ResNet-18's plan at an eighth of its width, for 16x16 images.

    The width must double at every stage, as in the original: how many parameters a stage holds decides its share.
    """
    stem = nn.Sequential(
        nn.Upsample(scale_factor=2), nn.Conv2d(1, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
    )
    widths = [(8, 8, 1), (8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return nn.Sequential(stem, *(Block(*w) for w in widths), head)


class Embed(nn.Module):
    """The 8 rows of pixels as tokens, with positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.row = nn.Linear(8, width)
        self.position = nn.Parameter(torch.randn(8, width) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.row(x.squeeze(1)) + self.position
        return out


class Pool(nn.Module):
    """Mean over tokens, norm, classifier."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.norm(x.mean(1)))
        return out


def transformer() -> nn.Sequential:
    """10 units: embeddings, 8 pre-norm encoder layers, head."""
    layers = [nn.TransformerEncoderLayer(48, 4, 96, dropout=0.0, batch_first=True, norm_first=True) for _ in range(8)]
    return nn.Sequential(Embed(48), *layers, Pool(48))


@dataclass(frozen=True)
class Network:
    build: Callable[[], nn.Sequential]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    adaptive: bool
    epochs: int
    note: str
    warmup: float = 0.0  # share of the steps


NETWORKS = {
    "cnn": Network(
        cnn,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4),
        False,
        12,
        "ResNet-18 at an eighth of its width, 16x16 images; SGD, cosine learning rate, 12 epochs; raw gradients",
    ),
    "transformer": Network(
        transformer,
        lambda m: torch.optim.AdamW(m.parameters(), lr=4e-3, weight_decay=1e-2),
        True,
        12,
        "10-unit pre-norm transformer, AdamW, warm-up and cosine learning rate, 12 epochs; preconditioned gradients",
        0.1,
    ),
}


def data(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training and validation images and labels."""
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    x = torch.tensor(digits.images[order] / 8.0 - 1.0, dtype=torch.float32).unsqueeze(1)
    y = torch.tensor(digits.target[order], dtype=torch.long)
    return x[:1437], y[:1437], x[1437:], y[1437:]


@dataclass
class State:
    """All that a run continues from."""

    model: nn.Sequential
    optimizer: torch.optim.Optimizer
    step: int


def _flat(unit: nn.Module, optimizer: torch.optim.Optimizer, adaptive: bool) -> torch.Tensor:
    parts = []
    for p in unit.parameters():
        assert p.grad is not None
        grad = p.grad
        if adaptive:
            grad = _preconditioned(grad, optimizer.state.get(p))
        parts.append(grad.flatten())
    return torch.cat(parts)


def _preconditioned(grad: torch.Tensor, state: dict[str, Any] | None) -> torch.Tensor:
    """g / (sqrt(v) + eps), v bias-corrected; at most what Adam itself could produce, whose v includes this gradient."""
    if not state:
        return grad.sign()
    seen = 1 - BETA2 ** float(state["step"])
    bound = math.sqrt(seen / (1 - BETA2))
    return (grad / ((state["exp_avg_sq"] / seen).sqrt() + 1e-8)).clamp(-bound, bound)


def one_step(state: State, net: Network, x: torch.Tensor, y: torch.Tensor, frozen: int) -> np.ndarray:
    """One optimiser step; returns (2, units): S and |G|^2, NaN for frozen units."""
    live = list(range(frozen, len(state.model)))
    totals: dict[int, torch.Tensor] = {}
    norms = np.zeros((MICRO, len(state.model)))
    raw = [torch.zeros_like(p) for i in live for p in state.model[i].parameters()]
    for r, (xs, ys) in enumerate(zip(x.chunk(MICRO), y.chunk(MICRO), strict=True)):
        state.optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(state.model(xs), ys).backward()
        for i in live:
            flat = _flat(state.model[i], state.optimizer, net.adaptive)
            norms[r, i] = float(flat @ flat)
            totals[i] = totals[i] + flat / MICRO if i in totals else flat / MICRO
        for buffer, p in zip(raw, (p for i in live for p in state.model[i].parameters()), strict=True):
            buffer += p.grad / MICRO
    for buffer, p in zip(raw, (p for i in live for p in state.model[i].parameters()), strict=True):
        p.grad = buffer
    state.optimizer.step()
    result = np.full((2, len(state.model)), np.nan)
    for i in live:
        mean = float(totals[i] @ totals[i])
        cov = max(norms[:, i].mean() - mean, 0.0) / (MICRO - 1)
        result[:, i] = len(x) * cov, mean - cov
    return result


def run(
    net: Network, state: State, frozen: int, sets: Any, seed: int, total: int, marks: dict[int, State]
) -> np.ndarray:
    """Train from ``state`` to the end with ``frozen`` units fixed; statistics (steps, 2, units)."""
    x, y = sets[0], sets[1]
    per_epoch = len(x) // BATCH
    for i, unit in enumerate(state.model):
        unit.train(i >= frozen)
        for p in unit.parameters():
            p.requires_grad_(i >= frozen)
    base_lr = state.optimizer.param_groups[0].setdefault("base_lr", state.optimizer.param_groups[0]["lr"])
    rows = []
    while state.step < total:
        if state.step in marks:
            marks[state.step] = copy.deepcopy(state)
        epoch, inside = divmod(state.step, per_epoch)
        order = np.random.default_rng([seed, epoch]).permutation(len(x))
        pick = torch.from_numpy(order[inside * BATCH : (inside + 1) * BATCH])
        for group in state.optimizer.param_groups:
            warm = min(1.0, (state.step + 1) / (net.warmup * total + 1e-9))
            group["lr"] = base_lr * warm * 0.5 * (1 + math.cos(math.pi * state.step / total))
        rows.append(one_step(state, net, x[pick], y[pick], frozen))
        state.step += 1
    return np.array(rows)


def on_grid(rows: np.ndarray) -> np.ndarray:
    """Means over a window around each of the 11 grid points; (steps, 2, units) -> (11, 2, units)."""
    centres = np.linspace(0, len(rows) - 1, GRID)
    half = max(len(rows) / (GRID - 1) / 2, 10.0)
    at = np.arange(len(rows))
    return np.array([rows[np.abs(at - c) <= half].mean(0) for c in centres])


def accuracy(model: nn.Module, sets: Any) -> float:
    model.eval()
    with torch.no_grad():
        return float((model(sets[2]).argmax(1) == sets[3]).float().mean())


def measure(net: Network, seed: int) -> tuple[np.ndarray, dict[tuple[float, float], np.ndarray], list[float]]:
    """Baseline statistics on the grid, and for each (start, depth) the ratio to the baseline after freezing."""
    torch.manual_seed(seed)
    sets = data(seed)
    model = net.build()
    total = net.epochs * (len(sets[0]) // BATCH)
    marks: dict[int, Any] = {round(f * total): None for f in FRACTIONS}
    state = State(model, net.optimizer(model), 0)
    rows = run(net, state, 0, sets, seed, total, marks)
    scores = [accuracy(state.model, sets)]
    ratios = {}
    for start in FRACTIONS:
        mark = round(start * total)
        for depth in FRACTIONS:
            branch = copy.deepcopy(marks[mark])
            frozen = round(depth * len(model))
            after = run(net, branch, frozen, sets, seed, total, {})
            ratios[start, depth] = on_grid(after)[:, 0] / np.maximum(on_grid(rows[mark:])[:, 0], 1e-30)
            scores.append(accuracy(branch.model, sets))
            print(f"seed {seed}: frozen {frozen} from {start:.0%}: accuracy {scores[-1]:.4f}", flush=True)
    return on_grid(rows), ratios, scores


def _log_mean(values: list[np.ndarray]) -> np.ndarray:
    return np.exp(np.mean(np.log(np.maximum(values, 1e-12)), axis=0))


def _rounded(values: np.ndarray) -> list[Any]:
    return [[None if math.isnan(v) else float(f"{v:.4g}") for v in row] for row in values]


def summarise(net: Network, measured: list[Any]) -> dict[str, Any]:
    variance = _log_mean([m[0][:, 0] for m in measured])
    sqr = np.mean([np.maximum(m[0][:, 1], 0) for m in measured], axis=0)
    runs = [
        {
            "start": start,
            "depth": round(depth * variance.shape[1]) / variance.shape[1],
            "ratio": _rounded(_log_mean([m[1][start, depth] for m in measured])),
        }
        for start, depth in measured[0][1]
    ]
    return {
        "network": net.note,
        "seeds": len(measured),
        "batch": BATCH,
        "validation_accuracy": [round(float(a), 4) for a in np.mean([m[2] for m in measured], axis=0)],
        "total": [float(f"{v:.4g}") for v in variance.sum(1) / variance.sum(1).mean()],
        "noise_scale": [float(f"{v:.4g}") for v in variance.sum(1) / np.maximum(sqr.sum(1), 1e-30)],
        "variance_share": _rounded(variance / variance.sum(1, keepdims=True)),
        "sqr_share": _rounded(sqr / np.maximum(sqr.sum(1, keepdims=True), 1e-30)),
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", choices=list(NETWORKS), help="measure this network again, keep the other one")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in [args.only] if args.only else list(NETWORKS):
        measured: list[Any] = []
        for seed in range(args.seeds):
            measured.append(measure(NETWORKS[name], seed))
            store(name, summarise(NETWORKS[name], measured))


def store(name: str, family: dict[str, Any]) -> None:
    """Put one network's figures into the file, beside the other's."""
    kept = json.loads(OUTPUT.read_text())["families"] if OUTPUT.exists() else {}
    table = {
        "schema": 1,
        "about": "written by scripts/measure_layer_split.py on scikit-learn digits; rows: 11 points of progress (runs: "
        "from the freezing to the end), columns: units in forward order; marked proxy for larger networks",
        "provenance": "proxy",
        "families": dict(sorted({**kept, name: family}.items())),
    }
    OUTPUT.write_text(json.dumps(table, separators=(",", ":")).replace('{"start"', '\n{"start"') + "\n")


if __name__ == "__main__":
    main()
