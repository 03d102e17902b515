"""How fast IceShare decides: sizes, sharing, and the ratio to the binary program, from one run on one core.

    OMP_NUM_THREADS=1 python benchmarks/bench_iceshare.py [--quick] [--ilp-limit 60]

Every row is the median (and the slowest) over several seeded instances: concave, linear, ragged and stair-like
scaling curves, five GPU counts a job, overload and underload, with and without weights. The time is that of ``solve``
from the arrays of a problem to a verified answer.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from icefrog.policies.iceshare import Problem, Solution, solve

COUNTS = np.array([1, 2, 4, 8, 16])


def scaling(rng: np.random.Generator, num_jobs: int) -> np.ndarray:
    """(N, 5) speed at every GPU count relative to one GPU; each job has one of four kinds of curve."""
    exponent = rng.uniform(0.4, 1.0, (num_jobs, 1))
    concave = COUNTS**exponent
    linear = COUNTS / (1 + 0.02 * (COUNTS - 1)) * np.ones((num_jobs, 1))
    ragged = concave * rng.uniform(0.6, 1.4, (num_jobs, 5))
    stairs = 1 + np.cumsum((np.diff(COUNTS, prepend=1)) * (rng.random((num_jobs, 5)) < 0.5), axis=1)
    kind = rng.integers(0, 4, num_jobs)
    return np.stack([concave, linear, ragged, stairs])[kind, np.arange(num_jobs)]


def generate(seed: int, num_jobs: int, num_gpus: int, share_fraction: float) -> Problem:
    """A seeded instance; odd seeds have weights, and sharers offer one to three configurations of different depth."""
    rng = np.random.default_rng(seed)
    speed = scaling(rng, num_jobs)
    work_s = 10 ** rng.uniform(3, 6, num_jobs)
    age_s = rng.uniform(0, 0.5, num_jobs) * work_s
    sharers = np.sort(rng.choice(num_jobs, int(num_jobs * share_fraction), replace=False))
    depth = 1 + seed % 3
    shared_s = (age_s[sharers] + work_s[sharers] / 0.9)[:, None] * np.linspace(1.0, 1.3, depth)
    mem = rng.uniform(5e9, 6e10, (len(sharers), 1)) * np.linspace(1.0, 0.5, depth)
    util = rng.uniform(10, 80, (len(sharers), 1)) * np.linspace(1.0, 0.6, depth)
    sizes = np.zeros(num_jobs, np.int64)
    sizes[sharers] = depth
    return Problem.from_arrays(
        num_gpus,
        opt_ptr=np.arange(num_jobs + 1) * len(COUNTS),
        opt_gpus=np.tile(COUNTS, num_jobs),
        opt_tta_s=(age_s[:, None] + work_s[:, None] / speed).ravel(),
        gpu_mem_bytes=8e10,
        weight=rng.choice([0.5, 1.0, 2.0], num_jobs) if seed % 2 else None,
        shr_ptr=np.append(0, np.cumsum(sizes)),
        shr_tta_s=shared_s.ravel(),
        shr_mem_bytes=mem.ravel(),
        shr_util_pct=util.ravel(),
    )


def measure(
    num_jobs: int, num_gpus: int, share_fraction: float, seeds: int, repeats: int = 1
) -> tuple[float, float, list[Solution]]:
    """(median s, slowest s, answers); every instance counts with the best of its ``repeats`` (others use the machine)."""
    times_s, answers = [], []
    for seed in range(seeds):
        runs = []
        for _ in range(repeats):
            problem = generate(seed, num_jobs, num_gpus, share_fraction)  # fresh: nothing cached from the last run
            runs.append(solve(problem, clock=time.perf_counter))
        times_s.append(min(run.solve_s for run in runs))
        answers.append(runs[0])
    return statistics.median(times_s), max(times_s), answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="leave out the largest size and shorten the ILP's limit")
    parser.add_argument("--ilp-limit", type=float, default=60.0, help="seconds per stage for the binary program")
    args = parser.parse_args()
    solve(generate(0, 30, 10, 0.3))  # imports and first calls are not what is measured

    rows = [(120, 48, 0.0, 12, 5), (120, 400, 0.0, 12, 5), (2400, 960, 0.0, 5, 3), (2400, 6000, 0.0, 5, 3)]
    rows += [] if args.quick else [(50_000, 100_000, 0.0, 2, 1), (50_000, 20_000, 0.0, 2, 1)]
    rows += [(120, 48, 1 / 3, 12, 5), (120, 200, 1 / 3, 12, 5), (2400, 960, 1 / 3, 3, 1), (2400, 3000, 1 / 3, 3, 1)]
    print(
        f"{'jobs':>7} {'GPUs':>7} {'sharing':>8} {'median ms':>10} {'slowest ms':>11} {'largest gap':>12} {'gap 0':>7}"
    )
    medians = {}
    for num_jobs, num_gpus, fraction, seeds, repeats in rows:
        median_s, slowest_s, answers = measure(num_jobs, num_gpus, fraction, seeds, repeats)
        medians[num_jobs, num_gpus, fraction] = median_s
        gaps = [a.gap for a in answers]
        closed = f"{sum(g == 0 for g in gaps)}/{len(gaps)}"
        print(
            f"{num_jobs:>7} {num_gpus:>7} {fraction:>8.2f} {median_s * 1e3:>10.2f} {slowest_s * 1e3:>11.2f}"
            f" {max(gaps):>12.1e} {closed:>7}"
        )

    limit_s = min(args.ilp_limit, 10.0) if args.quick else args.ilp_limit
    print(f"\nbinary program (HiGHS), 120 jobs, 48 GPUs, without sharing, at most {limit_s:g} s a stage")
    ilp_s = []
    for seed in range(3):
        answer = solve(generate(seed, 120, 48, 0.0), method="milp", time_limit_s=limit_s, clock=time.perf_counter)
        ours = solve(generate(seed, 120, 48, 0.0))
        ilp_s.append(answer.solve_s)
        print(
            f"  seed {seed}: {answer.solve_s:8.2f} s, sum {answer.sum_share:.6f} (gap {answer.gap:.1e}),"
            f" ours {ours.sum_share:.6f} (gap {ours.gap:.1e}) {answer.note}"
        )
    ratio = statistics.median(ilp_s) / medians[120, 48, 0.0]
    print(f"ratio ILP / exact at 120/48: {ratio:,.0f}x")
    print(f"ratio 2,400/960 to 120/48: {medians[2400, 960, 0.0] / medians[120, 48, 0.0]:.1f}x for 20x the jobs")
    print(f"ratio with sharing to without, 120/48: {medians[120, 48, 1 / 3] / medians[120, 48, 0.0]:.1f}x")


if __name__ == "__main__":
    main()
