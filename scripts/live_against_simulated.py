"""Completion times of live jobs against their simulation, from the event logs of finished runs (``scripts/live_runs.py``).

    python scripts/live_against_simulated.py HOME [HOME ...] [--jobs]

Every run is simulated with what every run of the same jobs measured (itself included), under its own policy and with the
controller's own code: one row a pair. ``--jobs`` lists the jobs of each pair.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from icefrog.errors import UserError
from icefrog.executors.sim.recorded import Recording, record, recorded_scenario, recorded_settings
from icefrog.home import Home, Settings
from icefrog.simulate import simulate


@dataclass(frozen=True)
class LiveRun:
    """A finished run and the settings of its controller."""

    name: str
    settings: Settings
    recording: Recording


@dataclass(frozen=True)
class Compared:
    """Completion times by job, s: live, simulated, and simulated with the samples that the live jobs needed."""

    live: dict[str, float]
    simulated: dict[str, float]
    told: dict[str, float]


def read(path: Path) -> LiveRun:
    """The run of a home folder."""
    home = Home(path.absolute())
    settings = home.settings()
    if settings is None:
        raise UserError(f"{path} is no home of a controller", "give the folder of a finished run")
    with home.open_log() as log:
        return LiveRun(path.name, settings, record(log.read_all()))


def compare(costs: LiveRun, run: LiveRun) -> Compared:
    """``run``, simulated from what ``costs`` measured."""
    needed = {job_id: job.needed_samples for job_id, job in run.recording.jobs.items()}
    return Compared(
        live={job_id: job.jct_s for job_id, job in run.recording.jobs.items()},
        simulated=jct_s(costs, run),
        told=jct_s(costs, run, needed),
    )


def jct_s(costs: LiveRun, run: LiveRun, needed: dict[str, float] | None = None) -> dict[str, float]:
    """Simulated completion times, by job."""
    of = run.settings
    scenario = recorded_scenario(costs.recording, run.recording, of.cluster, needed)
    settings = recorded_settings(run.recording, of.round_s, of.restart_s, of.seed)
    result = simulate(scenario, of.policy, of.options, settings)
    if result.stalled:
        raise UserError(result.stalled, "the simulation of a run that finished should finish")
    return {job_id: (job.finish_s or 0.0) - job.submit_s for job_id, job in result.state.jobs.items()}


def errors(found: Compared) -> tuple[float, float, float, float]:
    """(error of the mean, mean of the jobs' absolute errors, the largest, the first with the needed samples told), of 1."""
    live, simulated, told = (np.array(list(times.values())) for times in (found.live, found.simulated, found.told))
    each = np.abs(simulated - live) / live
    return simulated.mean() / live.mean() - 1.0, each.mean(), each.max(), told.mean() / live.mean() - 1.0


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("homes", nargs="+", type=Path)
    parser.add_argument("--jobs", action="store_true", help="also list every job")
    args = parser.parse_args()
    runs = [read(path) for path in args.homes]
    print(
        "| run | measured in | mean JCT live, s | simulated, s | error | a job's error, mean | largest | samples told |"
    )
    print("|---|---|---|---|---|---|---|---|")
    pairs = [(run, costs) for run in runs for costs in runs if run.recording.jobs.keys() == costs.recording.jobs.keys()]
    listed = []
    for run, costs in pairs:
        found = compare(costs, run)
        of_mean, mean, largest, told = errors(found)
        live, simulated = (np.mean(list(times.values())) for times in (found.live, found.simulated))
        source = "itself" if costs is run else costs.name
        print(
            f"| {run.name} | {source} | {live:.1f} | {simulated:.1f} | {of_mean:+.1%} | {mean:.1%} | {largest:.1%} | "
            f"{told:+.1%} |"
        )
        listed.append((run, source, found))
    if args.jobs:
        for run, source, found in listed:
            print(f"\n{run.name}, measured in {source}: job, JCT live, simulated, s")
            for job_id, live_s in found.live.items():
                print(f"  {job_id:20s} {live_s:8.1f} {found.simulated[job_id]:8.1f}")


if __name__ == "__main__":
    main()
