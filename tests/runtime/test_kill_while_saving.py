"""SIGKILL at random moments while a job saves at every step: it always resumes, from a state that it really was in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "killed_jobs.py"


def kill(variant: str, folder: Path, kills: int, seed: int) -> dict[str, Any]:
    command = [sys.executable, str(PROGRAM), variant, str(folder), str(kills), str(seed)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False, env=env)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check(found: dict[str, Any], left: list[str]) -> None:
    assert found["moved"] > found["kills"] // 3  # most lives got somewhere
    assert found["left"] == left  # after the next save nothing is left of any kill


PLAIN = [".json", ".json", ".pt", ".pt"]


def test_eight_kills(tmp_path: Path) -> None:
    check(kill("async", tmp_path, 8, seed=0), PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "left"), [("sync", PLAIN), ("async", PLAIN), ("sharded", [".dcp", ".dcp"])])
def test_fifty_kills(tmp_path: Path, variant: str, left: list[str]) -> None:
    check(kill(variant, tmp_path, 50, seed=1), left)
