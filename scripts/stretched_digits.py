"""The digits CNN on a machine that is otherwise busy: every pass of a layer lasts STRETCH times its CPU time.

A layer sleeps after it has computed, forward and backward. What others do on the machine lengthens the computing and
shortens the sleep, up to STRETCH; freezing shortens both, as on a device of one's own. Options as examples/digits_cnn.py.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from digits_cnn import build
from digits_data import arguments, digits, fit, shifted

STRETCH = 6.0
MOST_DEBT_S = 1.0
"""A layer that was done too late is made up for by shorter sleeps, up to so much."""


class Clock:
    """When the next layer is due, and the CPU time of this process when the last one was done."""

    def __init__(self) -> None:
        self.due_s, self.cpu_s = time.perf_counter(), time.process_time()

    def wait(self) -> None:
        """Until STRETCH times the CPU time since the last layer is over; waiting for a core or a peer is not stretched."""
        now_s, cpu_s = time.perf_counter(), time.process_time()
        self.due_s = max(self.due_s + STRETCH * (cpu_s - self.cpu_s), now_s - MOST_DEBT_S)
        self.cpu_s = cpu_s
        time.sleep(max(self.due_s - now_s, 0.0))


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: Clock) -> torch.Tensor:
        ctx.clock = clock
        clock.wait()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.clock.wait()
        return grad, None


class Stretched(nn.Module):
    """A layer, stretched."""

    def __init__(self, layer: nn.Module, clock: Clock) -> None:
        super().__init__()
        self.layer = layer
        self._clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Wait.apply(self.layer(x), self._clock)


def main() -> None:
    args = arguments(__doc__, lr=1e-3, width=12, target=0.95)
    train, val = digits()
    clock = Clock()
    model = nn.Sequential(*(Stretched(layer, clock) for layer in build(args.width)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    fit(model, optimizer, train, val, args, augment=shifted)


if __name__ == "__main__":
    main()
