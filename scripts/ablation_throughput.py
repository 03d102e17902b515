"""IceFrog's ablation ``throughput=ddp-only``, in a world in which the LLaMA-class tasks are sharded in truth.

    python scripts/ablation_throughput.py [--seeds 0,1,2] [--load 1] [--cluster 12x4:a800-80gb]

The catalogue has the traffic of these tasks in the synchronisation of replicas; here it is where sharding has it
(``workloads.modelled.as_sharded``, the same volumes). Both arms live in that world; one prices the tasks by Eq. 9 and 10,
the other by what Eq. 5-7 can make of the same steps. One row a seed: mean JCT of all jobs, and of the sharded ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np

from icefrog.replay import TraceChoice, prepare, run_policy
from icefrog.simulate import SimSettings, icefrog_scenario
from icefrog.specfile import parse_cluster
from icefrog.workloads import load_catalogue
from icefrog.workloads.modelled import as_sharded

ARMS = ("layer-aware", "ddp-only")


def mean_jcts_h(seed: int, load: float, cluster_text: str) -> Iterator[tuple[float, float, int]]:
    """For each arm (mean JCT in hours of all jobs, of the sharded ones, how many those are)."""
    catalogue, cluster = load_catalogue(), parse_cluster(cluster_text)
    sharded = {n: as_sharded(catalogue[n].profile) for n, task in catalogue.tasks.items() if task.throughput.sharded}
    for arm in ARMS:
        settings = SimSettings(seed=seed)
        work = prepare(TraceChoice("synth:philly-120", load=load, seed=seed), cluster, profiles=sharded)
        scenario = icefrog_scenario(work.specs, work.profiles, work.curves, cluster, settings)
        run, _ = run_policy(scenario, "icefrog", {"throughput": arm}, settings)
        jct_h = {job.job_id: job.jct_s / 3600 for job in run.jobs if job.jct_s is not None}
        mine = [jct_h[job.job_id] for job in run.jobs if job.workload in sharded]
        yield float(np.mean(list(jct_h.values()))), float(np.mean(mine)) if mine else np.nan, len(mine)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--load", type=float, default=1.0)
    parser.add_argument("--cluster", default="12x4:a800-80gb")
    args = parser.parse_args()
    print("| seed | layer-aware, h | ddp-only, h | ratio | sharded jobs | layer-aware, h | ddp-only, h | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for seed in args.seeds.split(","):
        (whole, mine, count), (other, theirs, _) = mean_jcts_h(int(seed), args.load, args.cluster)
        everybody = f"{whole:.3f} | {other:.3f} | {other / whole:.3f}"
        print(f"| {seed} | {everybody} | {count} | {mine:.3f} | {theirs:.3f} | {theirs / mine:.3f} |", flush=True)


if __name__ == "__main__":
    main()
