"""Compare the Pollux world with the published completion times, job by job.

    python scripts/pollux_world_check.py [--data DIR] [--policy tiresias,optimus,pollux] [--workload 1,2,3,4,5,6] [--jobs]

Prints one line a run: our mean JCT and the published one, their ratio, the largest difference of a job, CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small fits in several threads cost many times as much

from icefrog.executors.sim.pollux.scenario import CLUSTER, default_data_dir, pollux_scenario, pollux_settings
from icefrog.simulate import simulate
from icefrog.specfile import parse_cluster
from icefrog.traces import read_trace


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=default_data_dir())
    parser.add_argument("--policy", default="tiresias,optimus,pollux")
    parser.add_argument("--workload", default="1,2,3,4,5,6")
    parser.add_argument("--jobs", action="store_true", help="print every job that differs")
    arguments = parser.parse_args()
    published = json.loads((arguments.data / "pollux" / "published_jct.json").read_text())
    print(
        "| workload | policy | mean JCT, s | published, s | ratio | jobs that differ | largest difference, s | CPU, s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for policy in arguments.policy.split(","):
        for number in arguments.workload.split(","):
            check(arguments.data, policy, f"workload-{number}", published, show_jobs=arguments.jobs)


def check(data: Path, policy: str, workload: str, published: dict[str, dict[str, dict]], *, show_jobs: bool) -> None:
    """One run, one line."""
    settings = pollux_settings()
    trace = read_trace(str(data / "pollux" / "workloads" / f"{workload}.csv"))
    scenario, _ = pollux_scenario(trace, parse_cluster(CLUSTER), data, settings)
    started_s = time.process_time()
    result = simulate(scenario, policy, settings=settings)
    cpu_s = time.process_time() - started_s
    expected = published[policy][workload]["jct_s"]
    ours = {j.job_id: j.finish_s - j.submit_s for j in result.state.jobs.values() if j.finish_s is not None}
    differences = {job_id: ours.get(job_id, float("inf")) - jct_s for job_id, jct_s in expected.items()}
    wrong = {job_id: value for job_id, value in differences.items() if value != 0.0}
    mean_s, published_s = sum(ours.values()) / len(ours), published[policy][workload]["avg_jct_s"]
    largest = max(map(abs, differences.values()))
    print(
        f"| {workload} | {policy} | {mean_s:.5f} | {published_s:.5f} | {mean_s / published_s:.4f} | {len(wrong)} of "
        f"{len(expected)} | {largest:g} | {cpu_s:.2f} |",
        flush=True,
    )
    if show_jobs:
        for job_id, value in wrong.items():
            print(f"    {job_id}: {ours.get(job_id)} s, published {expected[job_id]} s ({value:+g})")


if __name__ == "__main__":
    main()
