"""How fast the simulator is: jobs per CPU second, in absolute numbers and against a plain Python loop of the same run.

    python benchmarks/bench_simulator.py [--quick] [--only NAME] [--data DIR] [--json]

Times are CPU seconds of this one process, so that a busy machine decides less; what a machine does to Python is in the
reference, a loop of a million additions that is timed before and after every case (the faster of the two counts). A case is
everything between a trace's name and the end of its simulation, the event log on disk; a report comes on top. The cases
named ``philly`` and ``pollux`` need the public measurements (``--data``, ``$ICEFROG_DATA``) and are left out without.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when numpy is loaded

from icefrog.executors.sim.pollux.world import PolluxWorld, pollux_specs, read_applications
from icefrog.replay import TraceChoice, prepare
from icefrog.simulate import RunResult, Scenario, SimSettings, icefrog_scenario, simulate
from icefrog.spec import ClusterSpec, NodeSpec
from icefrog.traces import read_trace

LOOP = 1_000_000
PHILLY = "311x8+1x2"
"""2,490 GPUs."""


@dataclass(frozen=True)
class Row:
    """One case."""

    case: str
    policy: str
    jobs: int
    gpus: int
    prepare_s: float
    simulate_s: float
    decisions: int
    reference_s: float

    @property
    def jobs_per_s(self) -> float:
        """Per CPU second, preparation included."""
        return self.jobs / (self.prepare_s + self.simulate_s)

    @property
    def loops(self) -> float:
        """The whole in units of the reference loop."""
        return (self.prepare_s + self.simulate_s) / self.reference_s

    def line(self) -> str:
        """For the terminal."""
        return (
            f"{self.case:22} {self.policy:9} {self.jobs:6} jobs {self.gpus:5} GPUs  prepare {self.prepare_s:7.2f} s  "
            f"simulate {self.simulate_s:7.2f} s  {self.decisions:6} decisions  {self.jobs_per_s:7.1f} jobs/s  "
            f"{self.loops:8.1f} loops  {1e6 * self.simulate_s / max(self.jobs, 1):7.0f} us/job"
        )


def reference_s() -> float:
    """CPU seconds of the reference loop."""
    started_s, total = time.process_time(), 0
    for value in range(LOOP):
        total += value
    return time.process_time() - started_s


def cluster_of(label: str) -> ClusterSpec:
    """``311x8+1x2`` -> the nodes."""
    parts = [part.split("x") for part in label.split("+")]
    return ClusterSpec(nodes=tuple(NodeSpec(gpus=int(gpus), count=int(count)) for count, gpus in parts))


def measure(case: str, policy: str, make: Callable[[], Scenario], **run: Any) -> Row:
    """Prepare and simulate once."""
    before_s = reference_s()
    started_s = time.process_time()
    scenario = make()
    prepared_s = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        result: RunResult = simulate(scenario, policy, out_dir=Path(folder), **run)
    ended_s = time.process_time()
    if result.stalled:
        raise SystemExit(f"{case} under {policy} did not end: {result.stalled}")
    return Row(
        case=case,
        policy=policy,
        jobs=scenario.num_jobs,
        gpus=scenario.cluster.num_gpus,
        prepare_s=prepared_s - started_s,
        simulate_s=ended_s - prepared_s,
        decisions=result.decisions.count,
        reference_s=min(before_s, reference_s()),
    )


def icefrog_world(choice: TraceChoice, cluster: ClusterSpec) -> Scenario:
    """The IceFrog world of a trace."""
    work = prepare(choice, cluster)
    return icefrog_scenario(work.specs, work.profiles, work.curves, cluster)


def pollux_world(data: Path, workload: str) -> Scenario:
    """The Pollux world of one of the publication's workloads."""
    cluster = cluster_of("16x4")
    apps = read_applications(data)
    specs = pollux_specs(read_trace(str(data / "pollux" / "workloads" / f"{workload}.csv"), None).jobs, apps, cluster)
    world = PolluxWorld(specs, apps, cluster)
    return Scenario(cluster, world, len(specs), {}, world.candidates)


def cases(data: Path | None, quick: bool) -> Iterator[tuple[str, Callable[[], Row]]]:
    """(name, measurement), the quick ones first."""

    def synth(name: str, policy: str, load: float, nodes: str) -> tuple[str, Callable[[], Row]]:
        choice = TraceChoice("synth:philly-120", load=load)
        return name, lambda: measure(name, policy, lambda: icefrog_world(choice, cluster_of(nodes)))

    def philly(name: str, policy: str, num_jobs: int | None) -> tuple[str, Callable[[], Row]]:
        choice = TraceChoice(str(data / "philly" / "jobs.csv.gz") if data else "", num_jobs=num_jobs)
        return name, lambda: measure(name, policy, lambda: icefrog_world(choice, cluster_of(PHILLY)))

    def pollux(name: str, policy: str) -> tuple[str, Callable[[], Row]]:
        # The publication's settings: rounds of a minute, a restart of half of one, GPUs from the emptiest nodes.
        settings = SimSettings(round_s=60.0, restart_s=30.0, event_driven=False)
        run = {"options": {"placement": "spread"}, "settings": settings}
        return name, lambda: measure(name, policy, lambda: pollux_world(data or Path(), "workload-1"), **run)

    for policy in ("fifo", "srtf", "tiresias"):
        yield synth("synth-120", policy, 1.0, "12x4")
    yield synth("synth-120", "icefrog", 1.0, "12x4")
    if data is not None:
        for policy in ("tiresias", "optimus"):
            yield pollux("pollux-160", policy)
        for policy in ("fifo", "srtf", "tiresias", "lucid"):
            yield philly("philly-2000", policy, 2000)
    if quick:
        return
    yield synth("synth-2400", "icefrog", 20.0, "240x4")
    if data is not None:
        for policy in ("fifo", "srtf", "tiresias", "lucid"):
            yield philly("philly-24000", policy, 24_000)
        for policy in ("fifo", "srtf", "tiresias", "lucid"):
            yield philly("philly", policy, None)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = os.environ.get("ICEFROG_DATA", "../shared/data")
    parser.add_argument("--data", type=Path, default=Path(default), help="folder of the public measurements")
    parser.add_argument("--quick", action="store_true", help="only cases of seconds")
    parser.add_argument("--only", help="cases whose name begins so")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    data = args.data if (args.data / "philly").is_dir() else None
    if data is None:
        print(f"{args.data} holds no measurements: philly and pollux are left out", file=sys.stderr)
    for name, run in cases(data, args.quick):
        if args.only and not name.startswith(args.only):
            continue
        row = run()
        peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        more = {"jobs_per_s": row.jobs_per_s, "loops": row.loops, "peak_gb": peak_gb}
        print(json.dumps(asdict(row) | more) if args.json else f"{row.line()}  peak {peak_gb:.2f} GB", flush=True)


if __name__ == "__main__":
    main()
