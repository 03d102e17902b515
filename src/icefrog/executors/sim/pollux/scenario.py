"""A workload file in the Pollux world, as a scenario that any policy can be run in."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from icefrog.errors import UserError
from icefrog.executors.sim.pollux.job import WorldConfig
from icefrog.executors.sim.pollux.world import PolluxWorld, pollux_specs, read_applications
from icefrog.simulate import Scenario, SimSettings
from icefrog.spec import ClusterSpec
from icefrog.traces.trace import Trace

CLUSTER = "16x4"
"""That of the publication."""
ROUND_S = 60.0
RESTART_S = 30.0
POLICY_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "tiresias": {"placement": "spread"},
    "optimus": {"placement": "spread"},
}
"""How the artifact's versions of these schedulers place their jobs."""


def pollux_settings(
    seed: int = 0, round_s: float | None = None, restart_s: float | None = None, **others: Any
) -> SimSettings:
    """The publication's settings: rounds of 60 s, the first after one round, decisions in rounds only, restarts of 30 s."""
    every_s = ROUND_S if round_s is None else round_s
    return SimSettings(
        seed=seed,
        round_s=every_s,
        restart_s=RESTART_S if restart_s is None else restart_s,
        event_driven=False,
        first_round_s=every_s,
        **others,
    )


def default_data_dir() -> Path:
    """``$ICEFROG_DATA``, else ``../shared/data`` seen from where one is."""
    return Path(os.environ.get("ICEFROG_DATA") or "../shared/data")


def pollux_scenario(
    trace: Trace, cluster: ClusterSpec, data_dir: Path, settings: SimSettings | None = None
) -> tuple[Scenario, dict[str, Any]]:
    """The scenario, and the facts of its trace for ``summary.json``.

    Args:
        trace: of a Pollux or Sia workload file: jobs with an application and a batch, in order of submission. (The artifact
            takes the rows as they stand; all published files are sorted, and ties stay in the order of the file.)
        cluster: nodes of at most four GPUs, all of one type.
        data_dir: the folder that holds ``pollux/<application>/``.
        settings: of the runs; as :func:`pollux_settings` gives them by default.

    Raises:
        UserError: data, jobs or GPU types that this world does not know.
    """
    settings = settings or pollux_settings()
    if len(cluster.parts) > 1:
        raise UserError(
            f"the Pollux world has one GPU type, not {', '.join(cluster.parts)}",
            "its profiles are those of a T4: give a cluster of one type, or --world icefrog",
        )
    kept = [job for job in trace.jobs if job.num_gpus <= cluster.num_gpus]
    report = trace.report.drop(f"asks for more than {cluster.num_gpus} GPUs", len(trace.jobs) - len(kept))
    if not kept:
        raise UserError("no job of the trace fits this cluster", "give a larger cluster or another trace")
    if not any(job.application for job in kept):
        raise UserError(
            f"{trace.source} does not say what its jobs train",
            "the Pollux world replays workload files: name,time,application,num_replicas,batch_size",
        )
    apps = read_applications(data_dir, [job.application for job in kept])
    specs = pollux_specs(kept, apps, cluster)
    world = PolluxWorld(specs, apps, cluster, WorldConfig(settings.seed, settings.round_s, settings.restart_s))
    facts = {
        "source": trace.source,
        "start": None if trace.start is None else trace.start.isoformat(sep=" "),
        "world": "pollux",
        "seed": settings.seed,
        "jobs": len(specs),
        "rows_read": report.read,
        "dropped": dict(report.dropped),
        "workloads": dict(Counter(spec.workload or "" for spec in specs).most_common()),
    }
    return Scenario(cluster, world, len(specs), {}, world.candidates, POLICY_DEFAULTS), facts
