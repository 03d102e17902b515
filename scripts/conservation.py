"""Conservation laws of runs, audited from their event logs alone.

    python scripts/conservation.py [--trace synth:philly-120] [--cluster 12x4] [--policies a,b] [--seed 0]
    python scripts/conservation.py --live HOME [HOME ...]

One row a simulated policy or live run. ``icefrog.testing.conservation`` adds the log up by itself; what the report
says of the same run is held against that. Exit code 1 if a rule is broken.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from icefrog import events as ev
from icefrog.errors import UserError
from icefrog.home import Home
from icefrog.policies import policy_names
from icefrog.replay import TraceChoice, prepare, run_policy
from icefrog.report.metrics import job_row
from icefrog.report.record import RunRecord, fold
from icefrog.simulate import SimSettings, icefrog_scenario
from icefrog.spec import ClusterSpec
from icefrog.specfile import parse_cluster
from icefrog.testing.conservation import Audit, audit

FIXED_BATCH = {"icefrog": {"batch": "fixed"}}
"""A job that moves its batch counts samples by an efficiency that it does not report: nothing to hold them against."""
HEADER = (
    "run",
    "jobs, starts",
    "broken rules",
    "GPUs in use, most",
    "holders of a GPU, most",
    "GPU h by job",
    "by GPU",
    "in the report",
    "JCT - waiting - held, s",
    "held - restarts - logged, s (jobs)",
    "samples reported - promised, of P0",
    "at the end - P0, of P0",
)


def row(name: str, found: Audit, run: RunRecord) -> list[str]:
    """What is printed of one run."""
    told = {job.job_id: job_row(job) for job in run.jobs}
    # By the report: completion and queueing. By the log: seconds held.
    off_s = [abs(told[i]["jct_s"] - told[i]["queue_s"] - job.held_s) for i, job in found.jobs.items()]
    work_s = [job.work_gap_s for job in found.jobs.values() if job.work_gap_s is not None]
    gaps = [job.gap for job in found.jobs.values() if job.gap is not None]
    ends = [abs(job.counted / job.promised - 1) for job in found.jobs.values() if job.counted and job.promised]
    return [
        name,
        f"{len(found.jobs)}, {sum(job.starts for job in found.jobs.values())}",
        str(len(found.broken)),
        f"{found.most_in_use:g}",
        str(found.most_on_a_gpu),
        f"{found.gpu_s / 3600:.4f}",
        f"{found.in_use_gpu_s / 3600:.4f}",
        f"{sum(line['gpu_s'] for line in told.values()) / 3600:.4f}",
        f"{max(off_s):.0e}",
        f"{max(work_s):.0e} ({len(work_s)})" if work_s else "-",
        f"{max(gaps):.0e}" if gaps else "-",
        f"{max(ends):.0e}" if ends else "-",
    ]


def simulated(policy: str, trace: str, cluster: ClusterSpec, seed: int) -> tuple[Audit, list[str]]:
    """Simulate, and audit what was written."""
    settings = SimSettings(seed=seed)
    work = prepare(TraceChoice(trace, seed=seed), cluster)
    scenario = icefrog_scenario(work.specs, work.profiles, work.curves, cluster, settings)
    with tempfile.TemporaryDirectory() as name:
        run, _ = run_policy(scenario, policy, FIXED_BATCH.get(policy), settings, Path(name))
        with (Path(name) / policy / "events.jsonl").open() as lines:
            found = audit(map(json.loads, lines), cluster.gpus_per_node, settings.restart_s)
    return found, row(policy, found, run)


def live(path: Path) -> tuple[Audit, list[str]]:
    """Audit a finished live run. What its jobs report is measured: their rates promise nothing exact."""
    home = Home(path.absolute())
    settings = home.settings()
    if settings is None:
        raise UserError(f"{path} is no home of a controller", "give the folder of a finished run")
    with home.open_log() as log:
        records = log.read_all()
    # A job that is silent for long is counted as started later on, since when it was up: the log is in order by job only.
    lines = sorted((json.loads(ev.encode(one)) for one in records), key=lambda line: float(line["time_s"]))
    found = audit(lines, settings.cluster.gpus_per_node)
    for job in found.jobs.values():
        job.gap = job.counted = None
    return found, row(path.name, found, fold(records, settings.cluster))


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default="synth:philly-120")
    parser.add_argument("--cluster", default="12x4")
    parser.add_argument("--policies", help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--live", nargs="+", type=Path, default=[], metavar="HOME", help="live runs instead")
    args = parser.parse_args()
    cluster = parse_cluster(args.cluster)
    policies = args.policies.split(",") if args.policies else policy_names()
    runs = map(live, args.live) if args.live else (simulated(p, args.trace, cluster, args.seed) for p in policies)
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    broken: list[str] = []
    for found, cells in runs:
        print(f"| {' | '.join(cells)} |", flush=True)
        broken += [f"{cells[0]}: {what}" for what in found.broken]
    for what in broken:
        print(what)
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
