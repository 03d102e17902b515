"""A residual CNN with batch normalisation on scikit-learn's digits. Runs alone, under torchrun, and as an IceFrog job.

python examples/digits_cnn.py --target 0.97
"""

from __future__ import annotations

import torch
from digits_data import arguments, digits, fit, shifted
from torch import nn


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
    args = arguments(__doc__, lr=1e-4, width=24, target=0.97)
    train, val = digits()
    model = build(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    fit(model, optimizer, train, val, args, augment=shifted)


if __name__ == "__main__":
    main()
