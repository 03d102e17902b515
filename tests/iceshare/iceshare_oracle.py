"""Brute force over every assignment of a few jobs, and random problems: what the solver is compared with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from icefrog.policies.iceshare import ExclusiveOption, Job, Problem, SharedOption

GPU_MEM_BYTES = 80e9


@dataclass(frozen=True)
class Truth:
    max_min: float
    best_sum: float
    forced: frozenset[int]


def _pairable(problem: Problem, shared: Sequence[int]) -> bool:
    if not shared:
        return True
    first, rest = shared[0], shared[1:]
    for other in rest:
        memory = 1.1 * (problem.shr_mem_bytes[first] + problem.shr_mem_bytes[other])
        util = problem.shr_util_pct[first] + problem.shr_util_pct[other]
        fits = memory <= problem.gpu_mem_bytes and util <= 100
        if fits and _pairable(problem, [s for s in rest if s != other]):
            return True
    return False


def brute_force(problem: Problem, rho: float) -> Truth:
    """Every combination of options, by the words of the specification."""
    menus = []
    for k in range(problem.num_jobs):
        menu: list[tuple[float, float, int]] = [(0.0, 0.0, -1)]  # (GPUs, share, shared option)
        alone = [
            j for j in range(problem.opt_ptr[k], problem.opt_ptr[k + 1]) if problem.opt_gpus[j] <= problem.num_gpus
        ]
        menu += [(float(problem.opt_gpus[j]), float(problem.opt_share[j]), -1) for j in alone]
        menu += [(0.5, float(problem.shr_share[j]), j) for j in range(problem.shr_ptr[k], problem.shr_ptr[k + 1])]
        menus.append(menu)
    weight = problem.weight
    feasible: list[tuple[float, float, tuple[bool, ...]]] = []
    for combination in itertools.product(*menus):
        if sum(c[0] for c in combination) > problem.num_gpus:
            continue
        shared = [c[2] for c in combination if c[2] >= 0]
        if len(shared) % 2 or not _pairable(problem, shared):
            continue
        share = np.array([c[1] for c in combination])
        fair = share * weight if problem.literal_weights else share / weight
        feasible.append((float(fair.min()), float(weight @ share), tuple(c[0] > 0 for c in combination)))
    max_min = max(f[0] for f in feasible)
    floor = rho * max_min
    forced: set[int] = set()
    if floor > 0:
        forced = set(range(problem.num_jobs))
    else:
        for k in np.flatnonzero(problem.must_run).tolist():
            if any(all(runs[j] for j in (*forced, k)) for _, _, runs in feasible):
                forced.add(k)
    best = max(total for fair, total, runs in feasible if fair >= floor * (1 - 1e-12) and all(runs[j] for j in forced))
    return Truth(max_min, best, frozenset(forced))


@st.composite
def problems(draw: st.DrawFn, jobs: tuple[int, int] = (1, 5), most_gpus: int = 9) -> Problem:
    """Sharing, weights, ages, restarts, must_run, whole-node units, coarse times (many ties), more jobs than GPUs."""
    coarse = draw(st.booleans())
    time_s = st.integers(1, 8).map(lambda x: 10.0 * x) if coarse else st.floats(1.0, 100.0)
    unit = draw(st.sampled_from([1, 1, 1, 4, 8]))
    num_jobs = draw(st.integers(*jobs))
    built = []
    for k in range(num_jobs):
        age_s = draw(st.one_of(st.just(0.0), time_s))
        counts = draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3, unique=True))
        options = tuple(ExclusiveOption(unit * c, age_s + draw(time_s)) for c in counts)
        shared = tuple(
            SharedOption(age_s + draw(time_s), draw(st.floats(5e9, 6e10)), draw(st.floats(10, 80)))
            for _ in range(draw(st.integers(0, 2)))
        )
        held = [None, None, *(float(o.gpus) for o in options), *([0.5] if shared else [])]
        built.append(
            Job(
                id=f"j{k}",
                options=options,
                shared=shared,
                weight=draw(st.sampled_from([1.0, 1.0, 0.5, 2.0, 3.0])),
                current=draw(st.sampled_from(held)),
                restart_s=draw(st.sampled_from([0.0, 5.0, 60.0])),
                must_run=draw(st.sampled_from([False, False, True])),
            )
        )
    return Problem.from_jobs(
        draw(st.integers(1, most_gpus)) * draw(st.sampled_from([1, 1, unit])),
        built,
        GPU_MEM_BYTES,
        literal_weights=draw(st.sampled_from([False, False, True])),
    )


def seeded_problem(seed: int, num_jobs: int, num_gpus: int, share_fraction: float) -> Problem:
    """A middle-sized random problem from arrays."""
    rng = np.random.default_rng(seed)
    jobs = []
    for k in range(num_jobs):
        work_s, age_s = 10 ** rng.uniform(2, 5), rng.uniform(0, 1e4)
        counts = np.sort(rng.choice([1, 2, 3, 4, 6, 8, 16], rng.integers(1, 6), replace=False))
        speed = counts ** rng.uniform(0.3, 1.0) * rng.uniform(0.8, 1.2, len(counts))
        shared = ()
        if rng.random() < share_fraction:
            shared = tuple(
                SharedOption(
                    float(age_s + work_s / 0.9 * (1 + 0.2 * i)),
                    float(rng.uniform(1e10, 6e10) / (1 + i)),
                    float(rng.uniform(10, 80)),
                )
                for i in range(rng.integers(1, 4))
            )
        jobs.append(
            Job(
                id=f"j{k}",
                options=tuple(
                    ExclusiveOption(int(a), float(age_s + work_s / s)) for a, s in zip(counts, speed, strict=True)
                ),
                shared=shared,
                weight=float(rng.choice([0.5, 1.0, 2.0])),
                must_run=bool(rng.random() < 0.1),
            )
        )
    return Problem.from_jobs(num_gpus, jobs, GPU_MEM_BYTES)
