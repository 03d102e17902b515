"""Seeded generators of traces: ``synth:NAME``. They need no data: what they draw from is fitted and committed.

``philly-120``: 120 x load jobs shaped like those that users of Microsoft Philly submitted between 3 and 7 o'clock (local
time, all days pooled), submitted in the first 4 hours: the arrival density by quarter of an hour, the probability of
each GPU count, and for each GPU count the quantiles of the logarithm of the duration. ``scripts/fit_philly_generator.py``
fits them; the source and what was left out stand in the fitted file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from icefrog.errors import UserError
from icefrog.profile import FloatArray
from icefrog.traces.trace import ReadReport, Trace, TraceJob

PREFIX = "synth:"
MAX_JOBS = 1_000_000


@dataclass(frozen=True, slots=True)
class Generator:
    """A fitted generator of jobs."""

    name: str
    source: str
    jobs_at_load_1: int
    arrival_edges_s: FloatArray  # (bins + 1,)
    arrival_weight: FloatArray  # (bins,), sums to 1
    gpu_counts: tuple[int, ...]
    gpu_weight: FloatArray  # (counts,), sums to 1
    quantiles_at: tuple[FloatArray, ...]  # per count: probabilities, ascending from 0 to 1
    log_duration: tuple[FloatArray, ...]  # per count: ln of seconds at those probabilities

    def draw(self, num_jobs: int, seed: int) -> tuple[TraceJob, ...]:
        """``num_jobs`` jobs in order of submission; the same seed draws the same jobs."""
        rng = np.random.default_rng([seed, num_jobs, 2])
        bins = rng.choice(len(self.arrival_weight), size=num_jobs, p=self.arrival_weight)
        widths = np.diff(self.arrival_edges_s)
        submit_s = np.sort(self.arrival_edges_s[bins] + rng.random(num_jobs) * widths[bins])
        kinds = rng.choice(len(self.gpu_counts), size=num_jobs, p=self.gpu_weight)
        levels = rng.random(num_jobs)
        jobs = []
        for index in range(num_jobs):
            kind = int(kinds[index])
            log_s = np.interp(levels[index], self.quantiles_at[kind], self.log_duration[kind])
            jobs.append(
                TraceJob(
                    job_id=f"{self.name}-{index:04d}",
                    submit_s=round(float(submit_s[index]), 3),
                    num_gpus=self.gpu_counts[kind],
                    duration_s=round(math.exp(float(log_s)), 3),
                )
            )
        return tuple(jobs)


def synth_names() -> tuple[str, ...]:
    """The generators there are, without the prefix."""
    return ("philly-120",)


def synth_trace(name: str, load: float = 1.0, seed: int = 0) -> Trace:
    """A generated trace of ``jobs_at_load_1 * load`` jobs. ``name`` with or without ``synth:``.

    Raises:
        UserError: an unknown name, or a load that asks for less than one job or more than a million.
    """
    bare = name.removeprefix(PREFIX)
    if bare not in synth_names():
        known = ", ".join(PREFIX + n for n in synth_names())
        raise UserError(f"unknown generator {name!r}, allowed: {known}", "or give the path of a trace file")
    generator = load_generator(bare)
    most = MAX_JOBS / generator.jobs_at_load_1
    if not (math.isfinite(load) and 1 <= generator.jobs_at_load_1 * load <= MAX_JOBS):
        raise UserError(
            f"load: got {load}, allowed: a number > 0, at most {most:.0f}",
            f"load 1 is {generator.jobs_at_load_1} jobs, load 2 twice as many in the same time",
        )
    jobs = generator.draw(round(generator.jobs_at_load_1 * load), seed)
    return Trace(jobs, ReadReport(len(jobs), len(jobs)), f"{PREFIX}{bare}, load {load:g}, seed {seed}", None)


def load_generator(name: str) -> Generator:
    """The fitted numbers of one generator."""
    file = resources.files("icefrog.traces") / f"{name.replace('-', '_')}.json"
    raw: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    kinds = raw["gpu_counts"]
    weight = np.array([kind["weight"] for kind in kinds], dtype=np.float64)
    arrival = np.array(raw["arrival_weight"], dtype=np.float64)
    tables = raw["log_duration"]
    return Generator(
        name=name,
        source=raw["source"],
        jobs_at_load_1=raw["jobs_at_load_1"],
        arrival_edges_s=np.linspace(0.0, raw["hours"] * 3600.0, len(arrival) + 1),
        arrival_weight=arrival / arrival.sum(),
        gpu_counts=tuple(kind["num_gpus"] for kind in kinds),
        gpu_weight=weight / weight.sum(),
        quantiles_at=tuple(np.array(tables[kind["table"]]["at"]) for kind in kinds),
        log_duration=tuple(np.array(tables[kind["table"]]["ln_s"]) for kind in kinds),
    )
