"""Where the ranks of a job meet and part: the process group that LayerElastic starts where nobody did before.

PyTorch starts a group at ``MASTER_ADDR:MASTER_PORT`` with a store in rank 0, and ends both together. Ranks that start a
second one there would meet by chance: who is first finds the store of the group that rank 0 is about to leave, or, under
torchrun, whose store stays, the addresses of a group that is gone. So the store is kept as long as the process lives, and
each start has names of its own in it. Ranks part together, as far as all come: who leaves first could reset a connection
that another still reads from.
"""

from __future__ import annotations

import contextlib
import functools
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_PLACE = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
_PART_S = 10.0
"""A rank that does not come to part is late, or dead; the others go."""


@functools.cache
def meeting() -> Meeting:
    """The one of this process, which has one default process group."""
    return Meeting()


class Meeting:
    """One process's part in the groups that are started for it, one after another."""

    def __init__(self) -> None:
        self._place: tuple[str | None, ...] = ()
        self._store: Any = None
        self._rank, self._size = 0, 1
        self._names: Any = None  # of the present group: a part of the store
        self._group: Any = None
        self._users = 0

    def start(self, backend: str, timeout_s: float) -> None:
        """Collective. Start the default process group.

        Args:
            backend: as PyTorch names it.
            timeout_s: for the other ranks to come, and of every collective.
        """
        from torch.distributed.distributed_c10d import PrefixStore  # not in every build of PyTorch
        from torch.distributed.rendezvous import rendezvous

        timeout = timedelta(seconds=timeout_s)
        place = tuple(os.environ.get(name) for name in _PLACE)
        if place != self._place:
            self._store, self._place = None, ()  # first: it may hold the port
            self._store, self._rank, self._size = next(rendezvous("env://", timeout=timeout))
            self._place = place
        # Counted in the store, which may outlive this process.
        start = self._store.add(f"icefrog/starts/{self._rank}", 1)
        self._names = PrefixStore(f"icefrog/{start}", self._store)
        dist.init_process_group(
            backend,
            store=self._names,
            rank=self._rank,
            world_size=self._size,
            timeout=timeout,
        )
        self._group, self._users = dist.group.WORLD, 0

    def enter(self) -> Any:
        """One more user of the present default group: that group; None: it was not started here."""
        if self._group is None or self._group is not dist.group.WORLD:
            return None
        self._users += 1
        return self._group

    def leave(self, group: Any) -> None:
        """One user less. The last one ends the group: with the other ranks, but waits for them a short time only.

        Args:
            group: of :meth:`enter`; if it was ended by somebody else, nothing happens.
        """
        if group is not self._group or group is not dist.group.WORLD:
            return
        self._users -= 1
        if self._users > 0:
            return
        with contextlib.suppress(RuntimeError):  # some rank is late or dead
            self._part()
        dist.destroy_process_group()
        self._group = None

    def _part(self) -> None:
        """Collective. Return when every rank is here; rank 0, which may hold the store, when the others have left it."""
        limit = timedelta(seconds=_PART_S)
        store = self._names
        if store.add("part/here", 1) == self._size:
            store.set("part/all", "")
        store.wait(["part/all"], limit)
        if self._rank > 0:
            store.set(f"part/left/{self._rank}", "")
        else:
            store.wait([f"part/left/{rank}" for rank in range(1, self._size)], limit)
