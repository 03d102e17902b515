"""Mappings that never hold all of a trace's jobs at once: values made when they are asked for, or kept while of use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from typing import Generic, TypeVar

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


class WhileActive(Generic[V]):
    """What is remembered of jobs, as long as they are not finished.

    Args:
        active: the ids of the unfinished jobs, kept up to date by whoever owns it.
    """

    def __init__(self, active: Collection[str]) -> None:
        self._active = active
        self._kept: dict[str, V] = {}

    def get(self, job_id: str) -> V | None:
        """What is remembered of a job."""
        return self._kept.get(job_id)

    def put(self, job_id: str, remembered: V) -> None:
        """Remember it; the jobs that have finished are let go whenever as many are kept as are active, twice over."""
        self._kept[job_id] = remembered
        if len(self._kept) > 2 * len(self._active) + _SPARE:
            self._kept = {one: self._kept[one] for one in self._active if one in self._kept}

    def __len__(self) -> int:
        return len(self._kept)


_SPARE = 16
"""So that a nearly empty cluster is not looked through at each turn."""
