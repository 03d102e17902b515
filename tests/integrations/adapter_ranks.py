"""Two processes that find each other on the loopback device, each running a script of this folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from icefrog.executors.local.supervisor import free_port

HERE = Path(__file__).parent


def two_ranks(script: str, folder: Path) -> list[dict[str, Any]]:
    """What each rank saw."""
    common = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
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
