"""GPU types by the names that users write: how much memory one has, and whose measured speed it runs at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ANY_GPU = "any"
"""A GPU type that stands for all."""


@dataclass(frozen=True, slots=True)
class GpuType:
    """One type."""

    mem_bytes: float
    """As the vendor states it."""
    measured_as: str | None = None
    """The type of the public measurements that stands for it; None: nobody measured one like it."""


GPU_TYPES: Mapping[str, GpuType] = {
    "t4": GpuType(16e9, "t4"),
    "rtx": GpuType(11e9, "rtx2080ti"),
    "rtx2080ti": GpuType(11e9, "rtx2080ti"),
    "a100": GpuType(40e9, "a100"),  # the DGX A100 of the measurements
    "a100-40gb": GpuType(40e9, "a100"),
    "a100-80gb": GpuType(80e9, "a100"),
    "a800-80gb": GpuType(80e9, "a100"),  # an A100 with slower links between the GPUs
    "h100-80gb": GpuType(80e9),
}


def measured_as(gpu_type: str) -> str | None:
    """The measured type that stands for a name; a name that is not in the table stands for itself."""
    known = GPU_TYPES.get(gpu_type)
    return gpu_type if known is None else known.measured_as
