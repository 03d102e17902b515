"""What LayerElastic costs a training step: the plain loop against it, statistics each n-th step, interleaved in one run.

    OMP_NUM_THREADS=1 python benchmarks/bench_runtime.py [--rounds 20] [--json]

CPU time of one thread. In every round each variant trains a few steps, between two turns of the plain loop, whose mean its
time is divided by; printed is the median over the rounds, with its quartiles. What other processes take from caches and
memory only ever adds, so the ratio of the fastest tenths of all turns is printed, too: on a busy machine it is the steadier
one. Goal: at most 3 % with the default settings. `timing` is everything but statistics: hooks, step times, agreement on
samples. `plain` against itself says what the machine's noise is. `decision` is what one decision takes, each epoch or every
`tune_every_steps`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from icefrog.runtime import LayerElastic

STEPS = 10  # a turn of one variant; a multiple of each n but "never"
NEVER = 10**9
VARIANTS: dict[str, dict[str, int] | None] = {
    "plain": None,
    "timing": {"stats_every": NEVER},
    "default": {},
    "every step": {"stats_every": 1},
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9),
}


def cnn() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A small residual network, batch 32 of 12 x 12."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
            self.norm = nn.BatchNorm2d(width)
            self.second = nn.Conv2d(width, width, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x + self.second(torch.relu(self.norm(self.first(x)))))

    blocks = [Block(24) for _ in range(6)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))
    return (
        nn.Sequential(nn.Conv2d(1, 24, 3, padding=1), *blocks, head),
        torch.randn(32, 1, 12, 12),
        torch.randint(0, 10, (32,)),
    )


def transformer() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Four encoder layers of width 128, batch 16 of 24 tokens."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(2000, 128)
            layers = [nn.TransformerEncoderLayer(128, 4, 512, batch_first=True) for _ in range(4)]
            self.layers = nn.ModuleList(layers)
            self.head = nn.Linear(128, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embedding(x)
            for layer in self.layers:
                x = layer(x)
            return self.head(x.mean(dim=1))

    return Classifier(), torch.randint(0, 2000, (16, 24)), torch.randint(0, 2, (16,))


Task = tuple[nn.Module, torch.Tensor, torch.Tensor]


class Loop:
    """A training loop; each call makes STEPS steps and returns their CPU seconds. ``options``: None: plain PyTorch."""

    def __init__(self, build: Callable[[], Task], optimizer: str, options: dict[str, int] | None) -> None:
        torch.manual_seed(0)
        self.model, self.x, self.y = build()
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.elastic: LayerElastic | None = None
        if options is not None:
            self.elastic = LayerElastic(
                self.model, self.optimizer, rule="none", samples_per_epoch=10**9, env={}, **options
            )
            next(self.elastic.epochs(1))

    def __call__(self) -> float:
        began = time.thread_time()
        for _ in range(STEPS):
            nn.functional.cross_entropy(self.model(self.x), self.y).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return time.thread_time() - began

    def decision_s(self) -> float:
        """CPU seconds of a decision; the median of ten."""
        assert self.elastic is not None
        seconds = []
        for _ in range(10):
            began = time.thread_time()
            self.elastic.decide()
            seconds.append(time.thread_time() - began)
        return float(np.median(seconds))


def measure(build: Callable[[], Task], optimizer: str, rounds: int) -> dict[str, dict[str, float]]:
    """Ratio to the plain loop by variant."""
    plain = Loop(build, optimizer, None)
    loops = {name: Loop(build, optimizer, options) for name, options in VARIANTS.items()}
    for _ in range(3):  # past the first steps, each of which is measured
        for run in (plain, *loops.values()):
            run()
    ratios: dict[str, list[float]] = {name: [] for name in loops}
    turns: dict[str, list[float]] = {name: [] for name in loops}
    seconds = [plain()]
    for _ in range(rounds):
        for name, run in loops.items():
            own = run()
            seconds.append(plain())
            turns[name].append(own)
            ratios[name].append(2.0 * own / (seconds[-2] + seconds[-1]))
    found = {}
    for name, values in ratios.items():
        low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
        fastest = float(np.quantile(turns[name], 0.1) / np.quantile(seconds, 0.1))
        found[name] = {"q1": low, "median": middle, "q3": high, "fastest": fastest}
    costs = {"step_ms": 1e3 * float(np.median(seconds)) / STEPS, "decision_ms": 1e3 * loops["default"].decision_s()}
    return {"costs": costs, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for model, build in (("cnn", cnn), ("transformer", transformer)):
        for optimizer in OPTIMIZERS:
            rows = found[f"{model}, {optimizer}"] = measure(build, optimizer, args.rounds)
            if args.json:
                continue
            costs = rows["costs"]
            print(f"{model}, {optimizer}: plain step {costs['step_ms']:.1f} ms, decision {costs['decision_ms']:.1f} ms")
            for name in VARIANTS:
                low, middle, high, fastest = (100 * (rows[name][key] - 1) for key in ("q1", "median", "q3", "fastest"))
                spread = f"(quartiles {low:+.1f}, {high:+.1f})"
                print(f"  {name:<11} {middle:+5.1f} %   {spread:<26} fastest turns {fastest:+5.1f} %", flush=True)
    if args.json:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
