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

HEADER = (
    "run",
    "costs measured in",
    "mean JCT live, s",
    "simulated, s",
    "error",
    "a job, mean",
    "slower by",
    "told that: error",
    "a job, mean",
)


@dataclass(frozen=True)
class LiveRun:
    """A finished run and the settings of its controller."""

    name: str
    settings: Settings
    recording: Recording


@dataclass(frozen=True)
class Compared:
    """Completion times by job, s."""

    live: dict[str, float]
    simulated: dict[str, float]
    slower: float | None  # how much slower training was than in the run that the costs are from; None: not to be told
    speed_told: dict[str, float]  # simulated, told that one number


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
    slower = run.recording.slower_than(costs.recording)
    return Compared(
        live={job_id: job.jct_s for job_id, job in run.recording.jobs.items()},
        simulated=jct_s(costs.recording, run),
        slower=slower,
        speed_told=jct_s(costs.recording.slowed(slower or 1.0), run),
    )


def jct_s(costs: Recording, run: LiveRun) -> dict[str, float]:
    """Simulated completion times, by job."""
    of = run.settings
    scenario = recorded_scenario(costs, run.recording, of.cluster)
    settings = recorded_settings(run.recording, of.round_s, of.restart_s, of.seed)
    result = simulate(scenario, of.policy, of.options, settings)
    if result.stalled:
        raise UserError(result.stalled, "the simulation of a run that finished should finish")
    return {job_id: (job.finish_s or 0.0) - job.submit_s for job_id, job in result.state.jobs.items()}


def errors(live: dict[str, float], simulated: dict[str, float]) -> list[str]:
    """Error of the mean, and the mean of the jobs' absolute errors."""
    truth, found = (np.array([times[job_id] for job_id in live]) for times in (live, simulated))
    return [f"{found.mean() / truth.mean() - 1:+.1%}", f"{np.abs(found / truth - 1).mean():.1%}"]


def row(run: LiveRun, source: str, found: Compared) -> list[str]:
    """What is printed of one pair."""
    means = [f"{float(np.mean(list(times.values()))):.1f}" for times in (found.live, found.simulated)]
    told = ["-"] * 3
    if found.slower is not None and source != "itself":
        told = [f"{found.slower:.2f}", *errors(found.live, found.speed_told)]
    return [run.name, source, *means, *errors(found.live, found.simulated), *told]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("homes", nargs="+", type=Path)
    parser.add_argument("--jobs", action="store_true", help="also list every job")
    args = parser.parse_args()
    runs = [read(path) for path in args.homes]
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    listed: list[str] = []
    for run in runs:
        for costs in runs:
            if run.recording.jobs.keys() == costs.recording.jobs.keys():
                found, source = compare(costs, run), "itself" if costs is run else costs.name
                print(f"| {' | '.join(row(run, source, found))} |", flush=True)
                listed += [
                    f"| {run.name} | {source} | {job_id} | {live_s:.1f} | {found.simulated[job_id]:.1f} |"
                    for job_id, live_s in found.live.items()
                ]
    if args.jobs:
        print(
            "\n| run | costs measured in | job | JCT live, s | simulated, s |\n|---|---|---|---|---|", *listed, sep="\n"
        )


if __name__ == "__main__":
    main()
