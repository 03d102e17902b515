"""Values that are made by the million: what a dataclass is to the reader, without what it costs to freeze one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def value(cls: type[T]) -> type[T]:
    """A dataclass with slots whose fields nobody sets again.

    The type checker sees to that, as with ``dataclass(frozen=True)``; at run time nobody does, since a dataclass that
    defends itself takes five times as long to make. (The contract of policies checks that they leave snapshots alone.)
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)
