"""A job that is killed again and again, and resumed at another number of ranks and spread in another way, is the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "resized_jobs.py"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
def test_sixteen_lives(tmp_path: Path, seed: int) -> None:
    command = [sys.executable, str(PROGRAM), str(tmp_path), "16", str(seed)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False, env=env)
    assert done.returncode == 0, done.stderr
    lives = json.loads(done.stdout.splitlines()[-1])["lives"]
    assert len({kind for kind, _, _ in lives}) > 2
    assert lives[-1][-1] > 0
