"""A compact transformer on scikit-learn's digits: convolutional stem, 2x2 patches, pre-norm blocks. Runs alone and as a job.

python examples/digits_transformer.py --target 0.97
"""

from __future__ import annotations

import torch
from digits_data import arguments, digits, fit
from torch import nn


class Tokens(nn.Module):
    """8x8 images of ``channels`` -> 16 tokens, each from 2x2 pixels, with learned positions."""

    def __init__(self, channels: int, dim: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(channels, dim, 2, stride=2)
        self.position = nn.Parameter(0.02 * torch.randn(1, 16, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.patch(x).flatten(2).transpose(1, 2) + self.position


class Block(nn.Module):
    """Self-attention and a two-layer perceptron, each around a shortcut."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Pool(nn.Module):
    """Mean over the tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


def build(width: int = 64, depth: int = 4) -> nn.Module:
    """``depth`` + 5 layers: three convolutions, tokens, blocks, head."""
    stem = [nn.Sequential(nn.Conv2d(i, width // 2, 3, 1, 1), nn.GELU()) for i in (1, width // 2, width // 2)]
    blocks = [Block(width, 4) for _ in range(depth)]
    return nn.Sequential(*stem, Tokens(width // 2, width), *blocks, nn.LayerNorm(width), Pool(), nn.Linear(width, 10))


def main() -> None:
    args = arguments(__doc__, lr=3e-4, width=64, target=0.97)
    train, val = digits()
    model = build(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    fit(model, optimizer, train, val, args)


if __name__ == "__main__":
    main()
