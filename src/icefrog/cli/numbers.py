"""Numbers on the command line: always finite, always within stated bounds (click's own ranges let ``nan`` through)."""

from __future__ import annotations

import math
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """A number from ``low`` to ``high``."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__(min=low, max=high)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number. Anything that is not finite is refused."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number from {self.min:g} to {self.max:g}", param, ctx)
        return number


LOAD = FiniteRange(1e-3, 1e4)
HOURS = FiniteRange(1e-6, 1e6)
ROUND_S = FiniteRange(1.0, 1e6)
RESTART_S = FiniteRange(0.0, 1e6)
NOISE = FiniteRange(0.0, 2.0)
NODE_HOURS = FiniteRange(1e-3, 1e7)
