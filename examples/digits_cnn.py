"""A residual CNN with batch normalisation on scikit-learn's digits. Runs alone, under torchrun, and as an IceFrog job.

python examples/digits_cnn.py --target 0.985
"""

from __future__ import annotations

import argparse
import time

import torch
from digits_data import accuracy, digits, shifted
from torch import nn
from torch.utils.data import DataLoader

from icefrog.runtime import Guards, LayerElastic
from icefrog.spec import Target


class Residual(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


def build(width: int = 24) -> nn.Module:
    """10 layers: a stem, eight residual blocks, a linear head."""
    w = width
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, w, 3, 1, 1, bias=False), nn.BatchNorm2d(w), nn.ReLU()),
        Residual(w, w),
        Residual(w, w),
        Residual(w, 2 * w, stride=2),
        Residual(2 * w, 2 * w),
        Residual(2 * w, 2 * w),
        Residual(2 * w, 4 * w, stride=2),
        Residual(4 * w, 4 * w),
        Residual(4 * w, 4 * w),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * w, 10)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=40, help="largest number of epochs")
    parser.add_argument("--batch", type=int, default=64, help="global batch, when not granted by a scheduler")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--target", type=float, default=0.985, help="accuracy, when not granted by a scheduler")
    parser.add_argument("--no-freeze", action="store_true")
    parser.add_argument("--checkpoint", default=None, help="folder; default: the scheduler's, or none")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    train, val = digits()
    model = build(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)

    elastic = LayerElastic(
        model,
        optimizer,
        guards=Guards(hysteresis=0.02),
        rule="none" if args.no_freeze else None,
        checkpoint_dir=args.checkpoint,
        tune_every_steps=50,
    )
    elastic.target = elastic.target or Target(value=args.target)
    model = elastic.model
    batch = elastic.global_batch or args.batch
    loader = DataLoader(train, batch_sampler=elastic.sampler(len(train), global_batch=batch, seed=args.seed))
    begin = time.perf_counter()
    for epoch in elastic.epochs(args.epochs):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(shifted(x)), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        decision = elastic.end_epoch(metric=accuracy(model, val))
        if elastic.rank == 0:
            print(
                f"epoch {epoch:3d}  {time.perf_counter() - begin:6.1f} s  accuracy {decision.metric:.4f}  "
                f"frozen {decision.frozen_layers}/{len(elastic.layers)}  psi {decision.psi:.3f}  "
                f"E {decision.effective_progress:.0f}/s  {decision.reason}",
                flush=True,
            )
    if elastic.rank == 0:
        print(f"{elastic.outcome} after {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
