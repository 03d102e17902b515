"""The digits CNN, fine-tuned: it has learnt the digits 0 to 4, and learns 5 to 9. Options as examples/digits_cnn.py.

What it had learnt is kept in a file in the temporary folder, once for all jobs.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from digits_cnn import build
from digits_data import arguments, digits, fit, shifted

LEARNT_EPOCHS = 15


def half(data: TensorDataset, *, upper: bool) -> TensorDataset:
    """Digits 0 to 4, or 5 to 9 as 0 to 4."""
    x, y = data.tensors
    chosen = (y >= 5) == upper
    return TensorDataset(x[chosen], y[chosen] % 5)


def learnt(width: int) -> nn.Module:
    """The CNN after some passes over the digits 0 to 4, with a fresh head; the generator goes on as if that was nothing."""
    file = Path(tempfile.gettempdir()) / f"icefrog-digits-0-to-4-{width}.pt"
    model = build(width)
    if not file.exists():
        with torch.random.fork_rng():
            torch.manual_seed(12345)
            mine = file.with_suffix(f".{os.getpid()}")  # another job may be at it, too
            torch.save(_learn(build(width)).state_dict(), mine)
            mine.replace(file)
    fresh_head = model[-1].state_dict()  # type: ignore[index]
    model.load_state_dict(torch.load(file, weights_only=True))
    model[-1].load_state_dict(fresh_head)  # type: ignore[index]
    return model


def _learn(model: nn.Module) -> nn.Module:
    x, y = half(digits()[0], upper=False).tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    for _ in range(LEARNT_EPOCHS):
        for chosen in torch.randperm(len(x)).split(32):
            nn.functional.cross_entropy(model(shifted(x[chosen])), y[chosen]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def main() -> None:
    args = arguments(__doc__, lr=0.01, width=24, target=0.98)
    train, val = (half(part, upper=True) for part in digits())
    model = learnt(args.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    fit(model, optimizer, train, val, args, cache_prefix=True)


if __name__ == "__main__":
    main()
