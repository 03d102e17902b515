"""Conservation laws of simulated runs, audited from their event logs alone.

    python scripts/conservation.py [--trace synth:philly-120] [--cluster 12x4] [--policies a,b] [--seed 0]

One row a policy. ``icefrog.testing.conservation`` adds the log up by itself; what ``jobs.csv`` says of the same run is held
against that. Exit code 1 if a law is broken.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from pathlib import Path

from icefrog.policies import policy_names
from icefrog.replay import TraceChoice, prepare, replay
from icefrog.simulate import SimSettings
from icefrog.spec import ClusterSpec
from icefrog.specfile import parse_cluster
from icefrog.testing.conservation import Audit, audit

FIXED_BATCH = {"icefrog": {"batch": "fixed"}}
"""A job that moves its batch counts samples by an efficiency that it does not report: nothing to hold them against."""
HEADER = (
    "policy",
    "jobs, starts",
    "broken rules",
    "GPUs in use, most",
    "holders of a GPU, most",
    "GPU h by job",
    "by GPU",
    "in jobs.csv",
    "JCT - waiting - held, s",
    "held - restarts - logged, s (jobs)",
    "samples reported - promised, of P0",
    "at the end - P0, of P0",
)


def row(policy: str, found: Audit, jobs_csv: Path) -> list[str]:
    """What is printed of one run."""
    with jobs_csv.open(newline="") as file:
        told = {line["job_id"]: line for line in csv.DictReader(file)}
    # By jobs.csv: completion and queueing. By the log: seconds held.
    off_s = [abs(float(told[i]["jct_s"]) - float(told[i]["queue_s"]) - job.held_s) for i, job in found.jobs.items()]
    work_s = [job.work_gap_s for job in found.jobs.values() if job.work_gap_s is not None]
    gaps = [job.gap for job in found.jobs.values() if job.gap is not None]
    ends = [abs(job.counted / job.promised - 1) for job in found.jobs.values() if job.counted and job.promised]
    return [
        policy,
        f"{len(found.jobs)}, {sum(job.starts for job in found.jobs.values())}",
        str(len(found.broken)),
        f"{found.most_in_use:g}",
        str(found.most_on_a_gpu),
        f"{found.gpu_s / 3600:.4f}",
        f"{found.in_use_gpu_s / 3600:.4f}",
        f"{sum(float(line['gpu_s']) for line in told.values()) / 3600:.4f}",
        f"{max(off_s):.0e}",
        f"{max(work_s):.0e} ({len(work_s)})" if work_s else "-",
        f"{max(gaps):.0e}" if gaps else "-",
        f"{max(ends):.0e}" if ends else "-",
    ]


def run(policy: str, trace: str, cluster: ClusterSpec, seed: int) -> tuple[Audit, list[str]]:
    """Simulate, and audit what was written."""
    settings = SimSettings(seed=seed)
    workload = prepare(TraceChoice(trace, seed=seed), cluster)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        replay(workload, cluster, [policy], options=FIXED_BATCH, settings=settings, out_dir=folder)
        with (folder / policy / "events.jsonl").open() as lines:
            found = audit(map(json.loads, lines), cluster.gpus_per_node, settings.restart_s)
        return found, row(policy, found, folder / policy / "jobs.csv")


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default="synth:philly-120")
    parser.add_argument("--cluster", default="12x4")
    parser.add_argument("--policies", help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    cluster = parse_cluster(args.cluster)
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    broken: list[str] = []
    for policy in args.policies.split(",") if args.policies else policy_names():
        found, cells = run(policy, args.trace, cluster, args.seed)
        print(f"| {' | '.join(cells)} |", flush=True)
        broken += [f"{policy}: {what}" for what in found.broken]
    for what in broken:
        print(what)
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
