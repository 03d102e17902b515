"""Seeded generators of traces: ``synth:NAME``. They need no data: what they draw from is fitted and committed.

A generator draws, for load x its number of jobs: submissions from a density over its hours (with bursts, where the log has
them: the density of each interval is multiplied by a gamma factor of mean 1); a *shape* of job (GPUs, and what else the log
tells together with them) by its frequency; a duration from the quantiles of ln(duration) for that shape, or by estimate
for the applications of Pollux; and, for CHRONUS, deadlines. Consecutive jobs are independent.

``scripts/fit_philly_generator.py`` and ``scripts/fit_trace_generators.py`` fit them; the source, and what was left out,
stands in each fitted file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from icefrog.errors import UserError
from icefrog.profile import FloatArray
from icefrog.traces.pollux import GPU_TYPE, Application, applications
from icefrog.traces.trace import ReadReport, Trace, TraceJob

PREFIX = "synth:"
MAX_JOBS = 1_000_000
_NAMES = ("philly-120", "philly-week", "chronus-mix1", "chronus-mix2", "pollux-160", "sia-960")


@dataclass(frozen=True, slots=True)
class Shape:
    """What is drawn together: a GPU count, and what goes with it."""

    num_gpus: int
    vc: str
    application: str
    batch_size: int | None
    at: FloatArray  # probabilities, ascending from 0 to 1; empty: the duration is estimated
    log_duration: FloatArray  # ln of seconds at those probabilities


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Deadlines of CHRONUS: by kind of job and length."""

    kinds: tuple[str, ...]
    kind_weight: FloatArray
    applications: tuple[str, ...]
    vcs: tuple[str, ...]
    edges_s: FloatArray  # (classes - 1,): upper bounds of the duration classes but the last
    at: FloatArray  # (points,)
    ratio: FloatArray  # (classes, points): deadline / duration at those probabilities
    steps_s: tuple[tuple[float, ...], ...]  # of soft jobs: after the first deadline
    step_weight: FloatArray
    worth: tuple[float, ...]  # of a soft job at each of its deadlines
    strict_worth: float


@dataclass(frozen=True, slots=True)
class Generator:
    """A fitted generator of jobs."""

    name: str
    about: str
    source: str
    jobs_at_load_1: int
    arrival_edges_s: FloatArray  # (bins + 1,)
    arrival_weight: FloatArray  # (bins,), sums to 1
    burst_shape: float | None  # of the gamma factor of each bin
    shapes: tuple[Shape, ...]
    shape_weight: FloatArray  # (shapes,), sums to 1
    deadlines: Deadlines | None = None

    def draw(self, num_jobs: int, seed: int) -> tuple[TraceJob, ...]:
        """``num_jobs`` jobs in order of submission; the same seed draws the same jobs."""
        rng = np.random.default_rng([seed, num_jobs, 2])
        weight = self.arrival_weight
        if self.burst_shape is not None:
            weight = weight * np.maximum(rng.gamma(self.burst_shape, size=len(weight)), 1e-12)
            weight = weight / weight.sum()
        bins = rng.choice(len(weight), size=num_jobs, p=weight)
        widths = np.diff(self.arrival_edges_s)
        submit_s = np.sort(self.arrival_edges_s[bins] + rng.random(num_jobs) * widths[bins])
        kinds = rng.choice(len(self.shapes), size=num_jobs, p=self.shape_weight)
        levels = rng.random(num_jobs)
        known = applications() if any(shape.batch_size for shape in self.shapes) else {}
        extras = _extras(self.deadlines, rng, num_jobs)
        jobs = []
        for index in range(num_jobs):
            shape = self.shapes[int(kinds[index])]
            duration_s = _duration_s(shape, float(levels[index]), known)
            estimated = shape.batch_size is not None
            jobs.append(
                TraceJob(
                    job_id=f"{self.name}-{index:04d}",
                    submit_s=round(float(submit_s[index]), 3),
                    num_gpus=shape.num_gpus,
                    duration_s=duration_s,
                    **{
                        "vc": shape.vc,
                        "gpu_type": GPU_TYPE if estimated else "",
                        "application": shape.application,
                        "num_replicas": shape.num_gpus if estimated else None,
                        "batch_size": shape.batch_size,
                        **extras.of(index, duration_s),
                    },
                )
            )
        return tuple(jobs)


@dataclass(frozen=True, slots=True)
class _Extras:
    """What is drawn beside shape and duration; nothing without deadlines."""

    deadlines: Deadlines | None
    kind: Sequence[int] = ()
    application: Sequence[int] = ()
    vc: Sequence[int] = ()
    level: Sequence[float] = ()
    step: Sequence[int] = ()

    def of(self, index: int, duration_s: float) -> dict[str, Any]:
        """Fields of job ``index``."""
        fitted = self.deadlines
        if fitted is None:
            return {}
        vc, kind = fitted.vcs[self.vc[index]], fitted.kinds[self.kind[index]]
        fields = {"vc": vc, "kind": kind, "application": fitted.applications[self.application[index]]}
        if kind == "best":
            return fields
        length = int(np.searchsorted(fitted.edges_s, duration_s, side="right"))
        ratio = float(np.interp(self.level[index], fitted.at, fitted.ratio[length]))
        first = round(ratio * duration_s, 3)
        steps = (0.0, *fitted.steps_s[self.step[index]]) if kind == "soft" else (0.0,)
        worth = fitted.worth if kind == "soft" else (fitted.strict_worth,)
        rewards = tuple((first + step, value) for step, value in zip(steps, worth, strict=False))
        return {**fields, "deadline_s": first, "rewards": rewards}


def synth_names() -> tuple[str, ...]:
    """The generators there are, without the prefix."""
    return _NAMES


def synth_listing() -> tuple[tuple[str, str], ...]:
    """(name, what it is like) of every generator."""
    return tuple((name, _raw(name)["about"]) for name in _NAMES)


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
    raw = _raw(name)
    shapes = raw["gpu_counts"]
    weight = np.array([shape["weight"] for shape in shapes], dtype=np.float64)
    arrival = np.array(raw["arrival_weight"], dtype=np.float64)
    tables = {key: {k: np.array(v) for k, v in table.items()} for key, table in raw["log_duration"].items()}
    nothing = {"at": np.zeros(0), "ln_s": np.zeros(0)}
    return Generator(
        name=name,
        about=raw["about"],
        source=raw["source"],
        jobs_at_load_1=raw["jobs_at_load_1"],
        arrival_edges_s=np.linspace(0.0, raw["hours"] * 3600.0, len(arrival) + 1),
        arrival_weight=arrival / arrival.sum(),
        burst_shape=raw.get("burst_shape"),
        shapes=tuple(
            Shape(
                num_gpus=shape["num_gpus"],
                vc=shape.get("vc", ""),
                application=shape.get("application", ""),
                batch_size=shape.get("batch_size"),
                at=tables.get(shape.get("table"), nothing)["at"],
                log_duration=tables.get(shape.get("table"), nothing)["ln_s"],
            )
            for shape in shapes
        ),
        shape_weight=weight / weight.sum(),
        deadlines=_deadlines(raw["deadlines"]) if "deadlines" in raw else None,
    )


def _deadlines(raw: Mapping[str, Any]) -> Deadlines:
    kinds = np.array(list(raw["kinds"].values()), dtype=np.float64)
    steps = np.array([step["weight"] for step in raw["soft_steps"]], dtype=np.float64)
    return Deadlines(
        kinds=tuple(raw["kinds"]),
        kind_weight=kinds / kinds.sum(),
        applications=tuple(raw["applications"]),
        vcs=tuple(raw["vcs"]),
        edges_s=np.array(raw["edges_s"], dtype=np.float64),
        at=np.array(raw["at"], dtype=np.float64),
        ratio=np.array(raw["ratio"], dtype=np.float64),
        steps_s=tuple(tuple(step["after_s"]) for step in raw["soft_steps"]),
        step_weight=steps / steps.sum() if len(steps) else steps,
        worth=tuple(raw["soft_worth"]),
        strict_worth=raw["strict_worth"],
    )


def _extras(fitted: Deadlines | None, rng: np.random.Generator, num_jobs: int) -> _Extras:
    if fitted is None:
        return _Extras(None)
    return _Extras(
        deadlines=fitted,
        kind=rng.choice(len(fitted.kinds), size=num_jobs, p=fitted.kind_weight).tolist(),
        application=rng.integers(len(fitted.applications), size=num_jobs).tolist(),
        vc=rng.integers(len(fitted.vcs), size=num_jobs).tolist(),
        level=rng.random(num_jobs).tolist(),
        step=rng.choice(len(fitted.steps_s), size=num_jobs, p=fitted.step_weight).tolist() if fitted.steps_s else (),
    )


def _duration_s(shape: Shape, level: float, known: Mapping[str, Application]) -> float:
    if shape.batch_size is not None:
        return round(known[shape.application].duration_s(shape.num_gpus, shape.batch_size), 3)
    return round(math.exp(float(np.interp(level, shape.at, shape.log_duration))), 3)


def _raw(name: str) -> Mapping[str, Any]:
    file = resources.files("icefrog.traces") / "fitted" / f"{name.replace('-', '_')}.json"
    raw: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return raw
