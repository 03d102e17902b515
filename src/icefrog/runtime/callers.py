"""Who is calling: for what PyTorch does around our hooks and tells nobody."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType


def callers() -> Iterator[FrameType]:
    """The frames on the stack of this thread, the innermost (the caller's own) first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
