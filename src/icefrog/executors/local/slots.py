"""What this machine has: its GPUs, or CPU slots where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

from icefrog.errors import UserError
from icefrog.spec import ClusterSpec, NodeSpec

CPU = "cpu"
_MIB = 1024.0 * 1024.0


@dataclass(frozen=True, slots=True)
class Devices:
    """How an attempt's ranks are told which devices are theirs."""

    visible: tuple[str, ...] | None
    """Name of every GPU for CUDA_VISIBLE_DEVICES, by device index; None: CPU slots."""

    def env(self, indices: list[int]) -> dict[str, str]:
        """Environment that shows these devices and no others."""
        names = [] if self.visible is None else [self.visible[index] for index in indices]
        return {"CUDA_VISIBLE_DEVICES": ",".join(names)}


def local_cluster(slots: int | None = None) -> ClusterSpec:
    """One node: the GPUs that ``nvidia-smi`` lists (of those CUDA_VISIBLE_DEVICES allows), else a CPU slot per core.

    Args:
        slots: use this many CPU slots instead.

    Raises:
        UserError: ``slots`` is not positive.
    """
    if slots is not None and slots < 1:
        raise UserError(f"--slots is {slots}", "give a whole number from 1 on, or leave it out")
    gpus = _gpus() if slots is None else ()
    if gpus:
        kind, mem_bytes = gpus[0][1], min(mem for _, _, mem in gpus)
        node = NodeSpec(gpus=len(gpus), gpu_type=kind, gpu_mem_bytes=mem_bytes)
    else:
        count = slots or len(os.sched_getaffinity(0))
        ram_bytes = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        node = NodeSpec(gpus=count, gpu_type=CPU, gpu_mem_bytes=ram_bytes / count)
    return ClusterSpec(nodes=(node,))


def devices_of(cluster: ClusterSpec) -> Devices:
    """The devices behind a cluster of :func:`local_cluster`.

    Raises:
        UserError: it has more GPUs than this machine has now.
    """
    node = cluster.nodes[0]
    if node.gpu_type == CPU:
        return Devices(None)
    gpus = _gpus()
    if len(gpus) < node.gpus:
        raise UserError(
            f"this home was set up for {node.gpus} GPUs, nvidia-smi lists {len(gpus)}",
            "check the driver, or start with --slots N to use CPU slots",
        )
    return Devices(tuple(name for name, _, _ in gpus))


def _gpus() -> tuple[tuple[str, str, float], ...]:
    """(name for CUDA_VISIBLE_DEVICES, type, memory in bytes) of each usable GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return _parse_gpus(done.stdout, os.environ.get("CUDA_VISIBLE_DEVICES")) if done.returncode == 0 else ()


def _parse_gpus(listing: str, visible: str | None) -> tuple[tuple[str, str, float], ...]:
    """Lines of ``index, uuid, name, memory in MiB``; ``visible`` names indices or (beginnings of) UUIDs, in its order."""
    rows = [[cell.strip() for cell in line.split(",")] for line in listing.splitlines() if line.count(",") == 3]
    found = [(index, uuid, kind.lower().replace(" ", "-"), float(mem) * _MIB) for index, uuid, kind, mem in rows]
    if visible is None:
        return tuple((index, kind, mem) for index, _, kind, mem in found)
    usable = []
    for wanted in (name.strip() for name in visible.split(",")):
        match = [row for row in found if row[0] == wanted or (wanted and row[1].startswith(wanted))]
        if not match:  # CUDA's own rule: the list ends at the first name that is no device
            break
        usable.append((wanted, match[0][2], match[0][3]))
    return tuple(usable)
