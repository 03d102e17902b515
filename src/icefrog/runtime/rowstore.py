"""Rows of bytes by key on local disk (or in shared memory), written by each process into a segment of its own, read by all.

Layout of a folder: ``<kind>/<segment>.index`` (one 16-byte key a row, appended after the row is there) and
``<kind>/<segment>.data`` (the rows, a sparse file). ``kind`` says what the rows are of; a store of another
kind deletes what it finds of older ones. Nothing here must survive a power cut: the boot id is part of ``kind``.

Rows are read through a memory map, and written with ``write``: through a map, a full disk (or a container's small /dev/shm)
would end the process with SIGBUS.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Key: TypeAlias = tuple[int, int]
"""128 bits, as two signed 64-bit words."""
ByteRows: TypeAlias = npt.NDArray[np.uint8]

_KEY = np.dtype([("a", "<i8"), ("b", "<i8")])
_SUFFIX = ".index"


class RowStore:
    """All rows have the same size. Several processes of one machine may use a folder at once.

    Args:
        folder: nobody else may look into it; its subfolders are this class's own.
        kind: what the rows are of: stores of equal kind share rows.
        row_bytes: size of a row.
        budget_bytes: most bytes that this process writes; what others wrote is theirs to count.

    Raises:
        OSError: the folder cannot be made, or is another user's: its rows would be computed with, and ours be read.
    """

    def __init__(self, folder: Path, kind: str, row_bytes: int, budget_bytes: float) -> None:
        self.row_bytes = row_bytes
        self.capacity = int(budget_bytes // max(row_bytes, 1))
        name = hashlib.sha256(f"{kind}/{row_bytes}/{_boot_id()}".encode()).hexdigest()[:24]
        self.folder = folder / name
        self._at: dict[Key, tuple[int, int]] = {}  # -> (segment, row)
        self._segments: list[ByteRows] = []
        self._read: dict[str, int] = {}  # index file -> keys read so far
        self._number: dict[str, int] = {}  # index file -> segment
        self._own_name = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._own_rows = 0
        self._index = self._data = -1  # this process's own files
        _make_private(folder)
        _forget_others(folder, name)

    def __len__(self) -> int:
        return len(self._at)

    @property
    def full(self) -> bool:
        """Whether this process has used up its budget."""
        return self._own_rows >= self.capacity

    def __contains__(self, key: Key) -> bool:
        return key in self._at

    def read(self, keys: Iterable[Key]) -> ByteRows | None:
        """The rows, shape (len(keys), row_bytes); None if one is missing."""
        found = [self._at.get(key) for key in keys]
        if any(place is None for place in found):
            return None
        rows = np.empty((len(found), self.row_bytes), dtype=np.uint8)
        for i, place in enumerate(found):
            assert place is not None
            rows[i] = self._segments[place[0]][place[1]]
        return rows

    def write(self, keys: Iterable[Key], rows: ByteRows) -> int:
        """Add rows whose key is new, as far as the budget goes; returns how many. Raises ``OSError`` if the disk does."""
        # A batch may hold a sample twice: of equal keys one place stays.
        fresh = {key: place for place, key in enumerate(keys) if key not in self._at}
        written = list(fresh)[: max(self.capacity - self._own_rows, 0)]
        if not written:
            return 0
        segment = self._open()
        data = np.ascontiguousarray(rows[[fresh[key] for key in written]])
        _write(self._data, data.tobytes(), self._own_rows * self.row_bytes)
        at = self._own_rows * _KEY.itemsize
        _write(self._index, np.array(written, dtype=_KEY).tobytes(), at)  # only now do others see the rows
        self._at.update({key: (segment, self._own_rows + row) for row, key in enumerate(written)})
        self._own_rows += len(written)
        return len(written)

    def refresh(self) -> int:
        """Learn of rows that other processes wrote; returns how many are new."""
        before = len(self._at)
        for index in sorted(self.folder.glob(f"*{_SUFFIX}")) if self.folder.is_dir() else []:
            name = index.name.removesuffix(_SUFFIX)
            if name != self._own_name:
                self._learn(name, index)
        return len(self._at) - before

    def close(self) -> None:
        """Delete what this process wrote; others lose nothing that they have opened."""
        for file, suffix in ((self._index, _SUFFIX), (self._data, ".data")):
            if file >= 0:
                os.close(file)
                (self.folder / f"{self._own_name}{suffix}").unlink(missing_ok=True)
        self._index = self._data = -1
        self._segments, self._at = [], {}
        try:
            self.folder.rmdir()
        except OSError:
            return  # another process still uses it, or it was never made

    # -- files -----------------------------------------------------------------------------------------------------------

    def _open(self) -> int:
        """The number of this process's own segment, which is there then."""
        if self._index < 0:
            _make_private(self.folder.parent)  # a peer may have ended, and removed it
            self.folder.mkdir(exist_ok=True)
            path = self.folder / f"{self._own_name}.data"
            flags = os.O_WRONLY | os.O_CREAT
            self._data = os.open(path, flags, 0o600)
            self._index = os.open(path.with_suffix(_SUFFIX), flags, 0o600)
            os.truncate(self._data, self.capacity * self.row_bytes)
            self._number[self._own_name] = len(self._segments)
            shape = (self.capacity, self.row_bytes)
            self._segments.append(np.memmap(path, dtype=np.uint8, mode="r", shape=shape))
        return self._number[self._own_name]

    def _learn(self, name: str, index: Path) -> None:
        try:
            raw = index.read_bytes()
            keys = np.frombuffer(raw[: len(raw) - len(raw) % _KEY.itemsize], dtype=_KEY)
            start = self._read.get(name, 0)
            if len(keys) <= start:
                return
            if name not in self._number:
                data = np.memmap(index.with_name(f"{name}.data"), dtype=np.uint8, mode="r")
                rows = data[: len(data) - len(data) % self.row_bytes].reshape(-1, self.row_bytes)
                self._number[name] = len(self._segments)
                self._segments.append(rows)
        except (OSError, ValueError):
            return  # deleted meanwhile
        segment = self._number[name]
        for row in range(start, min(len(keys), len(self._segments[segment]))):
            self._at.setdefault((int(keys[row]["a"]), int(keys[row]["b"])), (segment, row))
        self._read[name] = len(keys)


def _write(file: int, data: bytes, at: int) -> None:
    """All of it, or ``OSError``: a full disk takes a part first."""
    left = memoryview(data)
    while left:
        done = os.pwrite(file, left, at)
        left, at = left[done:], at + done


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()  # not what a link points to
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it is another user's", str(folder))
    folder.chmod(0o700)


def _forget_others(folder: Path, name: str) -> None:
    if folder.is_dir():
        for other in folder.iterdir():
            if other.is_dir() and other.name != name and len(other.name) == len(name):
                shutil.rmtree(other, ignore_errors=True)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"
