"""How long training stands still for a checkpoint: written beside training, against written at once.

    python benchmarks/bench_checkpoint.py [--width 1024] [--saves 8] [--quick]

One run of a perceptron under AdamW (three floats a parameter) that saves every few steps, the two ways in turn. Printed: the
median stand-still of each, their ratio, and what a training step costs while a write goes on. The first save, which maps
the copy's memory, is shown apart. The file system is that of ``--dir``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from icefrog.runtime.checkpoint import CheckpointStore, optimizer_state
from icefrog.runtime.keeper import Keeper
from icefrog.runtime.world import World

SUMMARY = {"effective_samples": 0.0}


class Silent:
    """Nobody listens."""

    def checkpointed(self, path: Path, effective_samples: float, wait_s: float) -> None:
        """Nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--saves", type=int, default=8, help="each way")
    parser.add_argument("--steps-between", type=int, default=20)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--quick", action="store_true", help="a small model, few saves")
    args = parser.parse_args()
    if args.quick:
        args.width, args.saves, args.steps_between = 512, 3, 5
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(args.width, args.width) for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(32, args.width)

    def step() -> float:
        start = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    def pack() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer_state(model, optimizer)}

    step()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        direct = CheckpointStore(Path(folder) / "direct")
        keeper = Keeper(CheckpointStore(Path(folder) / "beside"), World(torch.device("cpu")), Silent(), warnings.warn)  # type: ignore[arg-type]
        at_once: list[float] = []
        beside: list[float] = []
        quiet: list[float] = []
        busy: list[float] = []
        for _ in range(args.saves + 1):
            start = time.perf_counter()
            direct.save(pack(), SUMMARY)
            at_once.append(time.perf_counter() - start)
            quiet += [step() for _ in range(args.steps_between)]
            start = time.perf_counter()
            keeper.save(pack, SUMMARY)
            beside.append(time.perf_counter() - start)
            writer = keeper._thread
            while writer is not None and writer.is_alive():
                busy.append(step())
        keeper.wait()
        size = max(path.stat().st_size for path in (Path(folder) / "direct").iterdir())
    once, apart = statistics.median(at_once[1:]), statistics.median(beside[1:])
    print(f"checkpoint: {size / 1e6:.0f} MB, {args.saves} saves each way")
    print(f"training stands still: at once {once:.3f} s, beside training {apart:.4f} s (first save {beside[0]:.3f} s)")
    print(f"ratio beside / at once: {apart / once:.3f}")
    slow = statistics.median(busy) / statistics.median(quiet)
    print(f"a step while the write goes on: {slow:.2f} of one without ({len(busy)} steps)")


if __name__ == "__main__":
    main()
