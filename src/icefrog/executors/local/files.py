"""Locks and atomic files: the only ways in which controller, supervisors and jobs agree on anything."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

_MAX_RECORD_BYTES = 1 << 24


def write_json(path: Path, value: Mapping[str, Any] | str) -> None:
    """Replace a file in one step: a reader sees the old content or the new one. A ``str`` is written as it is."""
    temporary = path.with_name(f".{path.name}.tmp")
    # O_NONBLOCK: a pipe that a job put there is an error and not a wait for its reader.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o666)
    with open(handle, "w", encoding="utf-8") as file:
        file.write(value if isinstance(value, str) else json.dumps(value))
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """A file of :func:`write_json`; None if it is not there."""
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return value


def read_record(path: Path) -> dict[str, Any] | None:
    """Like :func:`read_json`, for what a job may have meddled with: whatever is no JSON object in a file counts as missing.

    A power failure may have emptied it, the job may have replaced it: a folder, a pipe, a loop of links, another's file.
    """
    try:
        with open_regular(path) as file:
            value = json.loads(file.read(_MAX_RECORD_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read. Raises ``OSError`` for anything but a regular file; never waits, as opening a pipe would."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path} is not a file")
    return open(handle, "rb")


def try_lock(path: Path) -> int | None:
    """Take an exclusive lock for as long as this process lives; None if somebody else has it."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def is_locked(path: Path) -> bool:
    """Whether some process holds the lock. Those who take it try for longer than this test does."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def stragglers(lock: Path, marker: str) -> list[int]:
    """Processes that hold ``lock`` open or have ``marker`` (NAME=value) in their environment, without this one.

    Identity by what a process holds, not by its number, which may have been reused. Empty where there is no ``/proc``.
    """
    found = []
    wanted = os.path.realpath(lock)
    for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else ():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it is gone, or another user's
            if marker.encode() in (entry / "environ").read_bytes().split(b"\0") or any(
                os.path.realpath(handle) == wanted for handle in (entry / "fd").iterdir()
            ):
                found.append(int(entry.name))
    return found


def kill(pids: list[int]) -> None:
    """SIGKILL to each; one that is gone already is fine."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
