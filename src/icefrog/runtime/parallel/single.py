"""One process: nothing to wrap, nothing to send."""

from __future__ import annotations

from typing import ClassVar

from icefrog.runtime.parallel.base import Parallel


class Single(Parallel):
    """The model itself is what the user calls."""

    name: ClassVar[str] = "single"

    def average(self, weight: float) -> None:
        """Of the accumulation micro-steps."""
        if weight != 1.0:
            self.scale_gradients(weight)
