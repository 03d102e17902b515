"""One job at a time keeps its checkpoints in a folder: two would number theirs alike and forget each other's.

The kernel holds the lock for this process, on a file ``.lock`` in the folder: it is gone with the process, however that
ends (a job that was killed can be restarted at once), and processes that are forked off, as a data loader's, do not inherit
it. Machines that share the folder see each other's locks if the file system carries them (NFS does, with its lock service);
where it does not, nobody is refused.

Such a lock belongs to a process, and closing the file anywhere in the process ends it. So there is one object for a folder
in a process, and what starts later in the same process (a notebook's cell that runs again) takes the folder over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import socket
import time
from pathlib import Path

from icefrog.errors import UserError

_WAIT_S = 3.0
"""For a job before that is just ending."""
_HELD = (errno.EACCES, errno.EAGAIN)


class FolderLock:
    """That of one folder, in this process. Get it from :func:`lock_of`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._owner: object = None
        self._file: int | None = None
        self._pid = 0

    def take(self, owner: object) -> None:
        """The folder is ``owner``'s from now on, whoever in this process had it before.

        Raises:
            UserError: another process has it.
        """
        if self._pid != os.getpid():  # else it is locked already; a lock is not inherited
            self._file, self._pid = None, os.getpid()
        elif self._file is not None and not self._in_place(
            self._file
        ):  # the folder was deleted, and is another's maybe
            os.close(self._file)
            self._file = None
        if self._file is None:
            self._file = self._lock()
        self._owner = owner

    def check(self, owner: object) -> None:
        """Make sure that the folder is ``owner``'s; take it if it is nobody's.

        Raises:
            UserError: another process has it, or something else in this one has taken it over.
        """
        if self._owner is not None and self._owner is not owner and self._pid == os.getpid():
            raise UserError(
                f"{self.folder} was taken over by another LayerElastic of this process",
                "give each its own checkpoint_dir=, and close() one before the next goes on in its place",
            )
        self.take(owner)

    def release(self, owner: object) -> None:
        """The folder is nobody's, if it was ``owner``'s."""
        if self._owner is owner:
            self._owner = None
            file, self._file = self._file, None
            if file is not None and self._pid == os.getpid():
                os.close(file)

    def _in_place(self, file: int) -> bool:
        """Whether the locked file is still the one in the folder, where others look."""
        try:
            return os.path.samestat(os.fstat(file), (self.folder / ".lock").stat())
        except OSError:
            return False

    def _lock(self) -> int | None:
        """The locked file; None: it cannot be made, or the file system has no locks."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return None  # saving will say so
        deadline = time.monotonic() + _WAIT_S
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in _HELD:
                    os.close(file)
                    return None
            if time.monotonic() > deadline:
                holder = os.read(file, 1000)
                os.close(file)
                raise UserError(
                    f"another job keeps its checkpoints in {self.folder}{_told(holder)}",
                    "give each job a checkpoint_dir= of its own, or end the other job first",
                )
            time.sleep(0.05)
        with contextlib.suppress(OSError):  # a full disk; it is only for whoever is refused
            os.ftruncate(file, 0)
            os.write(file, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode())
        return file


@functools.cache
def _lock_of(folder: Path) -> FolderLock:
    return FolderLock(folder)


def lock_of(folder: Path) -> FolderLock:
    """The one of this process for the folder."""
    return _lock_of(folder.resolve())


def _told(holder: bytes) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        told = json.loads(holder)
        return f" (process {told['pid']} on {told['host']})"
    return ""
