"""One rank is killed; its peer, left to itself, ends with an error that says so, and the job resumes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from icefrog.runtime.peers import PeerLostError, peers_needed

PROGRAM = Path(__file__).parent / "peer_lost.py"


def check(folder: Path, kind: str, lives: int) -> None:
    command = [sys.executable, str(PROGRAM), kind, str(folder), str(lives), "1"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=env)
    assert done.returncode == 0, done.stderr
    steps = [0]
    for found in json.loads(done.stdout.splitlines()[-1]):
        assert found["status"] not in (None, 0), found
        assert found["took_s"] < 60, found
        assert "another rank of this job has ended" in found["words"], found["words"]
        steps.append(found["step"])
    # A life of two steps may be over before its first checkpoint is on disk, and none is ever lost.
    assert steps == sorted(steps), steps
    assert len(set(steps)) > len(steps) // 2, f"the job did not go on from its checkpoints: {steps}"


@pytest.mark.parametrize("kind", ["auto", "fsdp"])
def test_a_rank_whose_peer_was_killed_ends_with_an_error_that_says_so(tmp_path: Path, kind: str) -> None:
    check(tmp_path, kind, 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auto", "fsdp", "pipeline", "replicas"])
def test_many_such_lives(tmp_path: Path, kind: str) -> None:
    check(tmp_path, kind, 12)


def test_only_errors_of_the_backend_are_named_so() -> None:
    with pytest.raises(PeerLostError, match=r"Start all ranks again.*reset by peer"), peers_needed():
        raise RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")
    with pytest.raises(PeerLostError), peers_needed():
        raise dist.DistBackendError("NCCL error: remote process exited")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as info, peers_needed():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert not isinstance(info.value, PeerLostError)
