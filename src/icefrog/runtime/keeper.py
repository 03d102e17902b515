"""Keeps a job's checkpoints: copied at a step boundary, written beside training, read back at the start.

Training waits for a copy to host memory and nothing else; a thread writes, syncs, renames and forgets old checkpoints.
One save is in flight at most, and a save that finds another one in flight waits for it. So there is one copy of the state
in host memory, and which checkpoints exist does not depend on the disk's speed; where the disk is slower than the job
saves, the wait is measured and shows it.
"""

from __future__ import annotations

import atexit
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from icefrog.errors import UserError
from icefrog.runtime.checkpoint import CheckpointStore, load
from icefrog.runtime.folder_lock import lock_of
from icefrog.runtime.hostcopy import HostCopy
from icefrog.runtime.reporting import Reporter
from icefrog.runtime.world import World


def open_store(folder: Path, *, sharded: bool) -> CheckpointStore:
    """The checkpoints in a folder. Collective where they are sharded.

    Args:
        folder: of one job, the same on all ranks.
        sharded: no rank holds the whole state.
    """
    if not sharded:
        store = CheckpointStore(folder)
    else:
        from icefrog.runtime.sharded import ShardedStore  # half a second to load

        store = ShardedStore(folder, dist.new_group(backend="gloo"))
    store.lock = lock_of(folder)
    return store


@dataclass(slots=True)
class _Save:
    """One checkpoint on its way to the disk."""

    state: dict[str, Any]
    summary: dict[str, Any]
    wait_s: float  # that training stood still for it


class Keeper:
    """Saves and restores one job.

    Args:
        store: where; None: nothing is saved.
        world: rank 0 writes and reads for all.
        reporter: told of each checkpoint once it is durable.
        warn: told what the user should know.
    """

    def __init__(
        self, store: CheckpointStore | None, world: World, reporter: Reporter, warn: Callable[[str], None]
    ) -> None:
        self.store = store
        self.wait_s = 0.0
        """Seconds that training has stood still for checkpoints so far."""
        self._world = world
        self._reporter = reporter
        self._warn = warn
        self._copy = HostCopy()
        self._thread: threading.Thread | None = None
        self._failed: tuple[_Save, Exception] | None = None
        self._told = False

    # --- saving

    def save(self, pack: Callable[[], dict[str, Any]], summary: Mapping[str, Any]) -> None:
        """Copy the state and write it beside training. Call at a step boundary, on every rank.

        Args:
            pack: gives the state; called on rank 0 only, or on every rank where the store is a collective one.
            summary: a few JSON values for humans, among them ``effective_samples``.
        """
        if self.store is None or (self._world.rank != 0 and not self.store.collective):
            return
        start = time.perf_counter()
        self.join()
        self.tell()
        self._forgive()
        state = self._copy.take(pack())
        wait_s = time.perf_counter() - start
        self.wait_s += wait_s
        job = _Save(state, {**summary, "wait_s": round(wait_s, 6)}, wait_s)
        # Not a daemon: the interpreter waits for it when it exits.
        self._thread = threading.Thread(target=self._run, args=(job,), name="icefrog-checkpoint", daemon=False)
        self._thread.start()

    def tell(self) -> None:
        """Warn, once, if the last checkpoint could not be written. Cheap: called at every step boundary."""
        if self._failed is not None and not self._told:
            self._told = True
            self._warn(f"a checkpoint could not be written ({self._failed[1]}); the next save tries again")

    def wait(self) -> None:
        """Return when the last checkpoint is on disk. One that could not be written is tried once more.

        Raises:
            UserError: it cannot be written.
        """
        self.join()
        if self._failed is None:
            return
        job, _ = self._failed
        self._forgive()
        try:
            self._write(job)
        except Exception as error:
            assert self.store is not None
            raise UserError(
                f"the last checkpoint could not be written: {error}",
                f"make room in {self.store.folder}, or make it writable; the checkpoint before it is still there",
            ) from error

    def close(self) -> None:
        """As :meth:`wait`; and the folder is free for another job.

        Raises:
            UserError: the last checkpoint cannot be written.
        """
        try:
            self.wait()
        finally:
            if self.store is not None:
                self.store.close()

    def join(self) -> None:
        """Return when no write is in flight any more, whether it went well or not."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, job: _Save) -> None:
        assert self.store is not None
        path = self.store.save(job.state, job.summary)
        try:
            self._reporter.checkpointed(path, float(job.summary["effective_samples"]), job.wait_s)
        except OSError as error:  # of rank 0 alone: saving anew would wait for ranks that know of no failure
            warnings.warn(f"{path} is written, but could not be reported: {error}", stacklevel=1)

    def _run(self, job: _Save) -> None:
        """In the thread."""
        try:
            self._write(job)
        except Exception as error:  # whatever it is, the training thread must hear of it
            atexit.register(self._last_words)
            self._failed = (job, error)

    def _forgive(self) -> None:
        if self._failed is not None:
            atexit.unregister(self._last_words)
            self._failed, self._told = None, False

    def _last_words(self) -> None:
        """The program ends without another save, and without :meth:`wait`."""
        if self._failed is not None:
            warnings.warn(f"the last checkpoint could not be written: {self._failed[1]}", stacklevel=1)

    # --- restoring

    def newest(self, held: Callable[[], Mapping[str, torch.Tensor]]) -> dict[str, Any] | None:
        """Collective. The state of the newest checkpoint that is whole; None: there is none. The folder is this job's then.

        Args:
            held: gives what this rank holds of a model that is spread over ranks: of a sharded checkpoint no more is read.

        Raises:
            UserError: another job keeps its checkpoints there; on all ranks.
        """
        self.join()
        self._claim()
        path = None
        if self.store is not None and self._world.rank == 0:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                path = self.store.newest_valid()
            for item in caught:
                self._warn(str(item.message))
        path = self._world.from_rank0(path)
        if path is None:
            return None
        if path.suffix != ".dcp":
            return load(path, torch.device("cpu"))
        from icefrog.runtime import sharded

        return sharded.load(path, held() if self.store is not None and self.store.collective else None)

    def _claim(self) -> None:
        refused: tuple[str, str] | None = None
        if self.store is not None and self._world.rank == 0:
            try:
                self.store.claim()
            except UserError as error:
                refused = error.message, error.hint
        refused = self._world.from_rank0(refused)
        if refused is not None:
            raise UserError(*refused)
