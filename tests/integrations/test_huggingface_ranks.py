"""The Hugging Face adapter in two processes (gloo), beside the Trainer's own data parallelism."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="pip install 'icefrog[huggingface]', or make test-adapters")
pytest.importorskip("accelerate", reason="pip install 'icefrog[huggingface]', or make test-adapters")

pytestmark = pytest.mark.adapters
HERE = Path(__file__).parent


def two_ranks(script: str, folder: Path) -> list[dict[str, Any]]:
    """What each rank saw."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / script), str(folder)],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in processes]
    found = []
    for out, err in outputs:
        lines = [line for line in out.splitlines() if line.startswith("SEEN ")]
        assert lines, err[-3000:]
        found.append(json.loads(lines[0].removeprefix("SEEN ")))
    return found


def test_two_ranks_are_the_trainers_own_data_parallelism_and_freezing_saves_bytes(tmp_path: Path) -> None:
    first, second = two_ranks("hf_two_ranks.py", tmp_path)
    for name in ("plain", "unfrozen", "frozen", "resumed", "tuned"):
        assert first[name]["model"] == second[name]["model"], name
    assert first["unfrozen"]["losses"] == first["plain"]["losses"]
    assert first["unfrozen"]["model"] == first["plain"]["model"]
    assert first["unfrozen"]["samples"] == 3 * 128

    (before, sent_before), (after, sent_after) = first["kept"]
    assert before == after
    assert (
        sent_after - sent_before == 2 * first["live_bytes"]
    )  # two steps, one all-reduce each: frozen layers send nothing
    assert first["frozen"]["model"] != first["unfrozen"]["model"]

    assert first["resumed"]["losses"][4:] == first["frozen"]["losses"][4:]
    assert first["resumed"]["model"] == first["frozen"]["model"]
    assert first["resumed"]["depth"] == 3
    assert len(first["tuned"]["decisions"]) == 6
    assert first["tuned"]["decisions"] == second["tuned"]["decisions"]
    assert "attach" in first["refused"]
