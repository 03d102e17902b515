"""What a training step with a frozen prefix is worth, as measured: by kind of training, depth, and when it froze. Pure.

A worth is (steps that full training needed to its target after the freeze) / (steps that the frozen run needed). The table
``frozen_worth.json`` is put together by ``scripts/frozen_worth.py``; ``docs/evidence/frozen-worth.md`` says of what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from icefrog.workloads.gradients import interpolated


@dataclass(frozen=True, slots=True)
class FrozenWorth:
    """One kind of training: a curve over the depth for each measured start, linear in between.

    A curve begins at worth 1 for depth 0, never rises, and ends at 0 for depth 1: what was not measured, beyond the deepest
    prefix that was, is made up pessimistically. Starts before the first and after the last are as those.

    Args:
        starts: progress of the training when the prefix froze, 0..1, ascending.
        depths: share of the layers that is frozen, of each start, ascending from 0 to 1.
        worths: of a step, share of a full one, as ``depths``.

    Raises:
        ValueError: curves that are not of this kind.
    """

    starts: tuple[float, ...]
    depths: tuple[tuple[float, ...], ...]
    worths: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if not len(self.starts) == len(self.depths) == len(self.worths) > 0 or list(self.starts) != sorted(self.starts):
            raise ValueError(f"need a curve for each of the starts, which ascend: {self}")
        for depths, worths in zip(self.depths, self.worths, strict=True):
            whole = (depths[0], depths[-1], worths[0], worths[-1]) == (0.0, 1.0, 1.0, 0.0)
            if not whole or list(depths) != sorted(depths) or list(worths) != sorted(worths, reverse=True):
                raise ValueError(f"a curve must fall from 1 at depth 0 to 0 at depth 1: {depths}, {worths}")

    @classmethod
    def of(cls, curves: list[Mapping[str, Any]]) -> FrozenWorth:
        """From one of ``kinds`` in ``frozen_worth.json``."""
        return cls(
            starts=tuple(float(curve["start"]) for curve in curves),
            depths=tuple((0.0, *(float(cell["depth"]) for cell in curve["cells"]), 1.0) for curve in curves),
            worths=tuple((1.0, *(float(cell["worth"]) for cell in curve["cells"]), 0.0) for curve in curves),
        )

    def worth(self, depth: float, start: float) -> float:
        """Of a step with that share of the layers frozen since that progress, 0..1."""
        at = [interpolated(depth, d, w) for d, w in zip(self.depths, self.worths, strict=True)]
        return interpolated(start, self.starts, at)
