"""A mapping whose values are made when they are asked for: a trace of 80,000 jobs never has all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from typing import TypeVar

V = TypeVar("V")


class LazyMap(Mapping[str, V]):
    """``make(key)`` for every key.

    Args:
        keys: all there are, in order.
        make: must give equal values for equal keys.
        kept: where values are looked up before they are made, and kept then; None: each is made anew.
    """

    def __init__(
        self, keys: Collection[str], make: Callable[[str], V], kept: MutableMapping[str, V] | None = None
    ) -> None:
        self._keys = keys
        self._make = make
        self._kept = kept

    def __getitem__(self, key: str) -> V:
        found = None if self._kept is None else self._kept.get(key)
        if found is None:
            if key not in self._keys:
                raise KeyError(key)
            found = self._make(key)
            if self._kept is not None:
                self._kept[key] = found
        return found

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)
