"""Locks and atomic files: the only ways in which controller, supervisors and jobs agree on anything."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Mapping[str, Any] | str) -> None:
    """Replace a file in one step: a reader sees the old content or the new one. A ``str`` is written as it is."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(value if isinstance(value, str) else json.dumps(value))
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """A file of :func:`write_json`; None if it is not there."""
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return value


def read_record(path: Path) -> dict[str, Any] | None:
    """Like :func:`read_json`, for what a process left behind: a file that a power failure emptied counts as missing."""
    try:
        return read_json(path)
    except ValueError:
        return None


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
        lock = os.open(path, os.O_RDONLY)
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
