"""Runs a script once in real processes so that it measures itself, for ``icefrog profile``."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from icefrog import events as ev
from icefrog.errors import UserError
from icefrog.executors.local.attempts import JobFolder
from icefrog.executors.local.slots import devices_of, local_cluster
from icefrog.runtime import protocol
from icefrog.spec import JobSpec
from icefrog.types import GpuId

_POLL_S = 0.05


class ProbeFailedError(Exception):
    """The run ended without a measurement; the message says how."""


def usable_gpus(most: int) -> str:
    """The type of this machine's GPUs, or ``cpu``.

    Raises:
        UserError: it has GPUs, but fewer than ``most``. CPU slots are as many as are asked for.
    """
    cluster = local_cluster()
    node = cluster.nodes[0]
    if devices_of(cluster).visible is not None and node.gpus < most:
        raise UserError(f"--gpus: {most} GPUs are asked for, this machine has {node.gpus}", f"give at most {node.gpus}")
    return node.gpu_type


def run_probe(
    folder: Path,
    spec: JobSpec,
    grant: ev.Grant,
    probe: protocol.ProbeRequest,
    parallel: str,
    timeout_s: float,
    keep_going: Callable[[], bool] = lambda: True,
) -> protocol.Probed:
    """One gang of ``grant.num_gpus`` processes, ended when it has measured everything, or after ``timeout_s``.

    Raises:
        ProbeFailedError: it died, left without a word, or took too long.
    """
    if folder.exists():
        shutil.rmtree(folder)
    attempt = JobFolder(folder).attempt(1)
    cluster = local_cluster()
    devices = devices_of(cluster)
    indices = list(range(grant.num_gpus))
    attempt.create(spec, tuple(GpuId(0, i) for i in indices), grant, devices.env(indices), probe, parallel)
    supervisor = attempt.spawn()
    deadline = time.monotonic() + timeout_s
    try:
        while supervisor.poll() is None and time.monotonic() < deadline and keep_going():
            time.sleep(_POLL_S)
    finally:
        late = supervisor.poll() is None
        if late:
            attempt.ask_kill()
            supervisor.wait()
    found = attempt.path / protocol.PROBE_FILE
    try:
        return protocol.Probed.model_validate_json(found.read_text())
    except (OSError, ValidationError):
        pass
    if late:
        raise ProbeFailedError(f"not done after {timeout_s:.0f} s")
    record = attempt.exit_record()
    failure = None if record is None else record.failure()
    if record is not None and record.problem:
        raise ProbeFailedError(record.problem)
    words = attempt.last_words()
    if failure is None:
        raise ProbeFailedError("the script ended before it had made enough steps" + (f": {words}" if words else ""))
    raise ProbeFailedError(f"rank {failure[0]} exited with {failure[1]}: {words or 'it said nothing'}")
