"""A job with batch normalisation and an average of weights that is killed and resumed at other numbers of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "averaged_jobs.py"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
def test_a_kill_changes_nothing_but_when_a_life_ends(tmp_path: Path, seed: int) -> None:
    command = [sys.executable, str(PROGRAM), str(tmp_path), "10", str(seed)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=env)
    assert done.returncode == 0, done.stderr
    lives = json.loads(done.stdout.splitlines()[-1])
    assert {world for world, _ in lives} == {1, 2}
    assert lives[-1][-1] > 10
