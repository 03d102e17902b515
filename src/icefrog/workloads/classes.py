"""Job classes by GPU time, and the tasks of each."""

from __future__ import annotations

from typing import Literal, TypeAlias

GpuTimeClass: TypeAlias = Literal["small", "medium", "large", "extra-large"]

CLASS_BOUNDS_H: tuple[tuple[GpuTimeClass, float], ...] = (("small", 1.0), ("medium", 10.0), ("large", 100.0))
"""Upper bounds in GPU hours, exclusive; above: extra-large (the paper's ends at 1000; a longer job stays in it)."""

CLASSES: tuple[GpuTimeClass, ...] = ("small", "medium", "large", "extra-large")


def gpu_time_class(gpu_seconds: float) -> GpuTimeClass:
    """The class of a job that takes ``gpu_seconds`` = duration x GPUs."""
    hours = gpu_seconds / 3600.0
    return next((name for name, bound in CLASS_BOUNDS_H if hours < bound), "extra-large")
