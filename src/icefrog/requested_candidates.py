"""Options of a rigid job: the GPU count that was asked for, all layers trained. As ``candidates``, in plain arithmetic.

A trace of 80,000 jobs under a policy that looks at one count would spend its time on tables of which one cell is read.
"""

from __future__ import annotations

from typing import NamedTuple

from icefrog.estimate.full_layers import full_steps_s
from icefrog.estimate.sharing import MAX_UTIL_PCT, MEM_SAFETY
from icefrog.estimate.tuner import split_batch
from icefrog.profile import Profile
from icefrog.types import Candidate, Config, Estimate, JobView

MIN_TTA_S = 1e-3
"""T_acc > 0, since shares divide by it."""
_EQUAL = 1.0 + 1e-12


class _Way(NamedTuple):
    """One split of the batch on the GPUs."""

    batch_per_gpu: int
    accum_steps: int
    step_s: float
    throughput: float
    mem_bytes: float
    util_pct: float


def exclusive_option(
    view: JobView,
    profile: Profile,
    num_nodes: int,
    gpu_mem_bytes: float,
    current: Config | None,
    age_s: float,
    remaining_samples: float,
) -> list[Candidate]:
    """The fastest way to run on the requested GPUs that fits, if there is one; what runs now stays among equals."""
    count = view.spec.requested_gpus
    ways = _ways(view, profile, count, num_nodes, gpu_mem_bytes)
    if not ways:
        return []
    best = max(ways, key=lambda way: way.throughput)
    if current is not None and current.num_gpus == count and not current.frozen_layers:
        held = (current.batch_per_gpu, current.accum_steps)
        same = next((way for way in ways if (way.batch_per_gpu, way.accum_steps) == held), best)
        best = same if best.throughput <= same.throughput * _EQUAL else best
    return [_candidate(best, count, age_s, remaining_samples)]


def shared_options(
    view: JobView, profile: Profile, gpu_mem_bytes: float, speed: float, age_s: float, remaining_samples: float
) -> list[Candidate]:
    """The ways to run on half a GPU that no other beats in time, memory and utilisation, the fastest first."""
    ways = [
        way
        for way in _ways(view, profile, 1, 1, gpu_mem_bytes)
        if MEM_SAFETY * way.mem_bytes <= gpu_mem_bytes and way.util_pct <= MAX_UTIL_PCT
    ]
    ways.sort(key=lambda way: (-way.throughput, way.mem_bytes, way.util_pct))
    front: list[_Way] = []
    for way in ways:
        if not any(other.mem_bytes <= way.mem_bytes and other.util_pct <= way.util_pct for other in front):
            front.append(way)
    return [_candidate(way, 1, age_s, remaining_samples, speed) for way in front]


def _ways(view: JobView, profile: Profile, num_gpus: int, num_nodes: int, gpu_mem_bytes: float) -> list[_Way]:
    """Those that fit into the memory of a GPU."""
    batch = view.spec.batch.initial
    mem, util = profile.occupancy.mem_bytes, profile.occupancy.util_pct
    fitting = []
    for m, k in split_batch(profile, batch, num_gpus):
        mem_bytes = max(mem[0] + mem[1] * m + mem[2] + mem[3], 0.0)
        if mem_bytes <= gpu_mem_bytes:
            fitting.append((m, k, mem_bytes))
    steps_s = full_steps_s(profile, num_gpus, num_nodes, [(m, k) for m, k, _ in fitting])
    return [
        _Way(m, k, s, batch / s, mem_bytes, min(max(util[0] + util[1] * m + util[2] + util[3], 0.0), 100.0))
        for (m, k, mem_bytes), s in zip(fitting, steps_s, strict=True)
    ]


def _candidate(
    way: _Way, num_gpus: int, age_s: float, remaining_samples: float, sharing_speed: float | None = None
) -> Candidate:
    speed = 1.0 if sharing_speed is None else sharing_speed
    samples_per_s = way.throughput * speed
    config = Config(num_gpus, way.batch_per_gpu, way.accum_steps, 0, sharing_speed is not None)
    return Candidate(
        config,
        Estimate(
            step_s=way.step_s / speed,
            throughput=samples_per_s,
            psi=1.0,
            effective_progress=samples_per_s,
            mem_bytes=way.mem_bytes,
            util_pct=way.util_pct,
            tta_s=max(age_s + remaining_samples / samples_per_s, MIN_TTA_S),
        ),
    )
