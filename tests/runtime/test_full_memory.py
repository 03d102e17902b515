"""A prefix cache whose shared memory is too small (64 MB in most containers) turns itself off, and training goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "full_memory.py"
UNSHARE = ["unshare", "--map-root-user", "--mount"]


def may_mount() -> bool:
    """Whether this system lets its users mount, in a namespace of their own."""
    command = [*UNSHARE, "mount", "-t", "tmpfs", "-o", "size=1m", "none", "/dev/shm"]
    return (
        shutil.which("unshare") is not None
        and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


def test_a_cache_without_room_turns_itself_off() -> None:
    if not may_mount():
        pytest.skip("no mounts in a namespace of one's own")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*UNSHARE, sys.executable, str(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 0, (done.returncode, done.stderr)
    reasons = done.stdout.splitlines()
    assert len(reasons) == 2
    assert all("No space left on device" in reason for reason in reasons), reasons
