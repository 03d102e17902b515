"""Small builders, so that a test names only what it is about."""

from __future__ import annotations

from typing import Any

from icefrog import events as ev
from icefrog.profile import ComputeCurve, LayerCost, OccupancyParams, Profile, SyncCurve, ThroughputParams
from icefrog.spec import ClusterSpec, JobSpec, NodeSpec
from icefrog.types import Candidate, Config, Estimate, GpuId, JobView


def job_spec(name: str = "job", **changes: Any) -> JobSpec:
    """A two-GPU job with a fixed batch."""
    fields: dict[str, Any] = {
        "name": name,
        "command": ("true",),
        "gpus": (1, 2),
        "batch": {"global": 64},
        "max_epochs": 10,
    }
    fields.update(changes)
    return JobSpec.model_validate(fields)


def cluster(nodes: int = 1, gpus: int = 4) -> ClusterSpec:
    """``nodes`` equal nodes."""
    return ClusterSpec(nodes=(NodeSpec(gpus=gpus, count=nodes),))


def profile(num_layers: int = 4, **changes: Any) -> Profile:
    """Equal layers, affine compute, cheap synchronisation."""
    fields: dict[str, Any] = {
        "schema": 1,
        "name": "test",
        "layers": tuple(LayerCost(name=f"l{i}", flops=1e9, param_bytes=1e6) for i in range(num_layers)),
        "throughput": ThroughputParams(
            fwd=ComputeCurve(alpha_s=0.002, beta_s=0.0005),
            bwd=ComputeCurve(alpha_s=0.004, beta_s=0.001),
            sync=SyncCurve(intra_alpha_s=0.002, intra_beta_s=0.0005, inter_alpha_s=0.01, inter_beta_s=0.002),
        ),
        "occupancy": OccupancyParams(mem_bytes=(1e9, 1e7, 1e9, 1e9), util_pct=(10.0, 0.2, 10.0, 5.0)),
        "samples_per_epoch": 1000,
        "max_local_batch": 256,
        "provenance": "made up for tests",
    }
    fields.update(changes)
    return Profile.model_validate(fields)


def candidate(num_gpus: int, tta_s: float, *, shared: bool = False, batch_per_gpu: int = 32) -> Candidate:
    """An option of which only the count and the time matter."""
    config = Config(num_gpus=num_gpus, batch_per_gpu=batch_per_gpu, shared=shared)
    return Candidate(config, Estimate(0.1, 100.0, 1.0, 100.0, 1e9, 40.0, tta_s))


def view(name: str, gpus: tuple[GpuId, ...] = (), shared: bool = False) -> JobView:
    """A job on these GPUs, or one that waits; it may have any number of GPUs up to 16."""
    return JobView(
        spec=job_spec(name, gpus=tuple(range(1, 17)), batch={"global": 720720}),
        profile=None,
        submit_s=0.0,
        gpus=gpus,
        shared=shared,
        running=bool(gpus),
        config=None,
        effective_samples=0.0,
        remaining_samples=None,
        frozen_layers=0,
        stats=None,
        attained_gpu_s=0.0,
        holding_since_s=None,
        waiting_since_s=None,
        restart_s=60.0,
        num_restarts=0,
    )


def gpus(count: int, node: int = 0, first: int = 0) -> tuple[GpuId, ...]:
    """``count`` neighbouring GPUs of one node."""
    return tuple(GpuId(node, first + i) for i in range(count))


def grant(num_gpus: int = 1, *, shared: bool = False) -> ev.Grant:
    """A plain grant."""
    return ev.Grant(num_gpus=num_gpus, batch_per_gpu=32, shared=shared)
