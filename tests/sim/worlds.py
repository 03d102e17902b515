"""Small synthetic workloads: equal-layered models whose front layers settle first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from icefrog.profile import FloatArray, Profile
from icefrog.spec import JobSpec
from icefrog.testing.builders import job_spec, profile


@dataclass(frozen=True)
class SettlingCurves:
    """Layer i's variance falls from 1 towards a floor, the sooner the nearer it is to the input; all rise at the end."""

    num_layers: int
    floor: float = 0.02

    def variance(self, progress: float, frozen_start: float | None = None, frozen_depth: float = 0.0) -> FloatArray:
        depth = np.arange(self.num_layers) / self.num_layers
        falling = np.exp(-6.0 * progress * (1.2 - depth))
        suffix_falls = np.where(depth > 0.5, 1.0 - 0.9 * progress, 1.0)
        return np.asarray((self.floor + falling) * suffix_falls)

    def sqr_norm(self, progress: float) -> FloatArray:
        return np.full(self.num_layers, 0.01)


@dataclass(frozen=True)
class Workload:
    specs: tuple[JobSpec, ...]
    profiles: dict[str, Profile]
    curves: dict[str, SettlingCurves]


def workload(
    num_jobs: int,
    seed: int = 0,
    *,
    span_s: float = 14400.0,
    layers: int = 12,
    share: bool = True,
    max_gpus: int = 8,
    rule: str = "auto",
) -> Workload:
    """Jobs of 1-8 GPUs and minutes to hours, submitted within ``span_s``."""
    rng = np.random.default_rng(seed)
    specs, profiles, curves = [], {}, {}
    for index in range(num_jobs):
        name = f"job{index:03d}"
        request = min(int(rng.choice([1, 1, 1, 2, 4, 8])), max_gpus)
        counts = tuple(count for count in (1, 2, 4, 8) if count <= min(max(request * 2, 2), max_gpus))
        specs.append(
            job_spec(
                name,
                command=None,
                workload="synthetic",
                gpus=counts,
                num_gpus=request,
                batch={"global": 256},
                max_epochs=int(rng.integers(10, 60)),
                share=share and bool(rng.random() < 0.5),
                submit_s=round(float(rng.uniform(0.0, span_s)), 3),
                duration_s=round(float(np.exp(rng.normal(7.5, 1.2))), 3),
                freeze={"rule": rule},
            )
        )
        profiles[name] = profile(layers, samples_per_epoch=10_000)
        curves[name] = SettlingCurves(layers)
    return Workload(tuple(specs), profiles, curves)
