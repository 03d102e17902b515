"""IceFrog's ablation ``throughput=ddp-only``, in a world in which the LLaMA-class tasks are sharded in truth.

    python scripts/ablation_throughput.py [--seeds 0,1,2] [--load 20] [--cluster 12x4:a800-80gb]

The catalogue has the traffic of these tasks in the synchronisation of replicas; here it is where sharding has it
(``workloads.modelled.as_sharded``, the same volumes). Both arms live in that world; one prices the tasks by Eq. 9 and 10,
the other by what Eq. 5-7 can make of the same steps. Of 120 x load jobs (synth:philly-120) only those of these tasks are
kept: one or two in a hundred. One row a seed: mean JCT.
"""

from __future__ import annotations

import argparse

import numpy as np

from icefrog.replay import TraceChoice, prepare, run_policy
from icefrog.simulate import SimSettings, icefrog_scenario
from icefrog.specfile import parse_cluster
from icefrog.workloads import load_catalogue
from icefrog.workloads.modelled import as_sharded

ARMS = ("layer-aware", "ddp-only")


def mean_jcts_h(seed: int, load: float, cluster_text: str) -> tuple[int, list[float]]:
    """How many jobs, and their mean JCT in hours under each arm."""
    catalogue, cluster = load_catalogue(), parse_cluster(cluster_text)
    sharded = {n: as_sharded(catalogue[n].profile) for n, task in catalogue.tasks.items() if task.throughput.sharded}
    settings = SimSettings(seed=seed)
    work = prepare(TraceChoice("synth:philly-120", load=load, seed=seed), cluster, profiles=sharded)
    specs = tuple(spec for spec in work.specs if spec.workload in sharded)
    means = []
    for arm in ARMS:
        scenario = icefrog_scenario(specs, work.profiles, work.curves, cluster, settings)
        run, _ = run_policy(scenario, "icefrog", {"throughput": arm}, settings)
        means.append(float(np.mean([job.jct_s / 3600 for job in run.jobs if job.jct_s is not None])))
    return len(specs), means


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--load", type=float, default=20.0)
    parser.add_argument("--cluster", default="12x4:a800-80gb")
    args = parser.parse_args()
    print(f"| seed | jobs | {', h | '.join(ARMS)}, h | ratio |\n|---|---|---|---|---|")
    for seed in args.seeds.split(","):
        count, (aware, blind) = mean_jcts_h(int(seed), args.load, args.cluster)
        print(f"| {seed} | {count} | {aware:.3f} | {blind:.3f} | {blind / aware:.3f} |", flush=True)


if __name__ == "__main__":
    main()
