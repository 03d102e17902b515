"""Cells on a Ray cluster (``pip install "icefrog[ray]"``): the same cells, the same results, other machines.

Our code travels to the nodes with the job; what it depends on (numpy, polars, ...) must be installed there. Traces travel
as bytes, so that no node needs to see the files.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import icefrog
from icefrog.errors import UserError
from icefrog.experiment.backends import Outcome, Outcomes, compute
from icefrog.experiment.cells import Cell
from icefrog.experiment.digest import program_digest

_IN_FLIGHT_PER_SLOT = 2
"""Cells handed to Ray for every CPU it has: enough to keep it busy, few enough to give up quickly."""
_KNOCK_S = 10.0
"""How long a cluster has to answer."""


class RayCluster:
    """Tasks of one CPU each.

    Args:
        address: ``auto`` (a cluster this machine belongs to), ``HOST:PORT``, or ``ray://HOST:PORT`` (a client).
        workers: at most so many cells at a time; None: as many as the cluster has CPUs.

    Raises:
        UserError: Ray is not installed, or there is no cluster at the address.
    """

    def __init__(self, address: str, workers: int | None = None) -> None:
        self._ray = _import_ray()
        _knock(address)
        package = str(Path(icefrog.__file__).parent)
        try:
            self._ray.init(
                address=address, runtime_env={"py_modules": [package]}, log_to_driver=False, logging_level="error"
            )
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise _no_cluster(address, error) from error
        cpus = int(self._ray.cluster_resources().get("CPU", 1))
        self.slots = min(workers or cpus, max(cpus, 1))

    def run(self, cells: Sequence[Cell]) -> Outcomes:
        """See :class:`icefrog.experiment.backends.Backend`."""
        ray = self._ray
        task = ray.remote(num_cpus=1, max_retries=2)(_compute_there)
        contents = {path: ray.put(_content(path)) for path in {cell.trace.path for cell in cells}}
        waiting = list(reversed(range(len(cells))))
        running: dict[Any, int] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.slots * _IN_FLIGHT_PER_SLOT:
                    index = waiting.pop()
                    cell = cells[index]
                    reference = task.remote(index, cell, program_digest(), contents[cell.trace.path])
                    running[reference] = index
                done, _ = ray.wait(list(running), num_returns=1)
                for reference in done:
                    yield self._outcome(reference, running.pop(reference))
        finally:
            for reference in running:
                ray.cancel(reference, force=True)
            ray.shutdown()

    def _outcome(self, reference: Any, index: int) -> Outcome:
        try:
            outcome: Outcome = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            return Outcome(index, None, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        return outcome


def _compute_there(index: int, cell: Cell, program: str, content: tuple[str, bytes] | None) -> Outcome:
    """Runs on a node: the trace is written to a temporary file if it is not a generator."""
    if content is None:
        return compute(index, cell, program)
    name, data = content
    with tempfile.TemporaryDirectory(prefix="icefrog-") as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        there = replace(cell, trace=cell.trace.model_copy(update={"source": str(path), "name": cell.trace.label}))
        return compute(index, there, program)


def _content(path: str) -> tuple[str, bytes] | None:
    """(file name, bytes) of a trace; None of a generator. Raises :class:`UserError` for a folder."""
    if path.startswith("synth:"):
        return None
    where = Path(path)
    if where.is_dir():
        raise UserError(f"--ray: the trace {path} is a folder", "`icefrog trace convert` makes one file of it")
    return where.name, where.read_bytes()


def _knock(address: str) -> None:
    """Raise :class:`UserError` if nobody listens at ``HOST:PORT``: Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return  # auto, local: Ray knows where
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, error) from error


def _no_cluster(address: str, error: Exception) -> UserError:
    return UserError(
        f"--ray: no cluster at {address!r}: {' '.join(str(error).split())[:200]}",
        "`ray start --head` starts one; --ray auto finds the one this machine belongs to",
    )


def _import_ray() -> ModuleType:
    try:
        import ray
    except ImportError as error:
        raise UserError("--ray: Ray is not installed here", 'pip install "icefrog[ray]"') from error
    module: ModuleType = ray
    return module
