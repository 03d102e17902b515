"""Replaying a trace under several policies: trace -> jobs -> simulations -> tables and report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from icefrog.eventlog import read_log
from icefrog.policies import make_policy
from icefrog.profile import Profile
from icefrog.report import RunRecord, fold, summarise, summary_document, write_jobs_csv, write_report, write_summary
from icefrog.simulate import Progress, RunResult, SimSettings, icefrog_scenario, simulate
from icefrog.spec import ClusterSpec, JobSpec
from icefrog.traces import Trace, read_trace, sample, scale_load, window
from icefrog.traces.jobs import task_mix, to_specs
from icefrog.traces.synth import PREFIX, synth_trace
from icefrog.workloads import LayerCurves, job_curves, job_profile, load_catalogue


@dataclass(frozen=True, slots=True)
class TraceChoice:
    """Which jobs of which trace."""

    source: str
    """A file, or ``synth:NAME``."""
    format: str | None = None
    load: float = 1.0
    start: datetime | None = None
    hours: float | None = None
    num_jobs: int | None = None
    seed: int = 0

    def read(self) -> Trace:
        """Read (or generate), cut, sample, compress. Raises :class:`icefrog.errors.UserError`.

        A sample or a generator has ``load`` times the jobs in the same time; a whole file is played ``load`` times as
        fast.
        """
        generated = self.source.startswith(PREFIX)
        trace = synth_trace(self.source, self.load, self.seed) if generated else read_trace(self.source, self.format)
        if self.start is not None or self.hours is not None:
            trace = window(trace, self.start, self.hours)
        if self.num_jobs is not None:
            trace = sample(trace, self.num_jobs, self.seed, load=self.load)
        elif not generated and self.load != 1.0:
            trace = scale_load(trace, self.load)
        return trace


@dataclass(frozen=True, slots=True)
class Workload:
    """Everything a simulation is given of its jobs."""

    specs: tuple[JobSpec, ...]
    profiles: Mapping[str, Profile]
    curves: Mapping[str, LayerCurves]
    trace: Mapping[str, Any]
    """For ``summary.json``: the source, the rows dropped by reason, the mix of models."""


def prepare(choice: TraceChoice, cluster: ClusterSpec) -> Workload:
    """Read the trace and match its jobs to the catalogue. Raises :class:`icefrog.errors.UserError`."""
    trace = choice.read()
    catalogue = load_catalogue()
    per_node = max(cluster.gpus_per_node)
    jobs = to_specs(trace, catalogue, seed=choice.seed, max_gpus=cluster.num_gpus, gpus_per_node=per_node)
    facts = {
        "source": trace.source,
        "start": None if trace.start is None else trace.start.isoformat(sep=" "),
        "load": choice.load,
        "seed": choice.seed,
        "jobs": len(jobs.specs),
        "rows_read": jobs.report.read,
        "dropped": dict(jobs.report.dropped),
        "workloads": task_mix(jobs.specs),
    }
    return Workload(
        specs=jobs.specs,
        profiles={spec.job_id: job_profile(spec, catalogue, per_node) for spec in jobs.specs},
        curves={spec.job_id: job_curves(spec, catalogue) for spec in jobs.specs},
        trace=facts,
    )


def replay(
    workload: Workload,
    cluster: ClusterSpec,
    policies: Sequence[str],
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    settings: SimSettings | None = None,
    out_dir: Path | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Simulate each policy over the same jobs; return the ``summary.json`` document.

    With ``out_dir``, also write it, ``report.html``, and ``jobs.csv`` and ``events.jsonl`` of each policy.

    Raises:
        UserError: an unknown policy or option, before anything is run.
    """
    settings = settings or SimSettings()
    chosen = options or {}
    for policy in policies:
        make_policy(policy, chosen.get(policy))
    runs: dict[str, RunRecord] = {}
    rows = []
    scenario = icefrog_scenario(workload.specs, workload.profiles, workload.curves, cluster, settings)
    for policy in policies:
        result = simulate(scenario, policy, chosen.get(policy), settings, out_dir, progress)
        runs[policy] = _fold(result, cluster)
        rows.append(_row(runs[policy], result))
        if out_dir is not None:
            write_jobs_csv(runs[policy], out_dir / policy / "jobs.csv")
    document = summary_document(workload.trace, cluster, rows)
    if out_dir is not None:
        write_summary(out_dir / "summary.json", document)
        write_report(out_dir / "report.html", runs, document)
    return document


def _fold(result: RunResult, cluster: ClusterSpec) -> RunRecord:
    records = result.records if result.events_path is None else read_log(result.events_path)
    return fold(records, cluster, live=False)


def _row(run: RunRecord, result: RunResult) -> dict[str, Any]:
    decision_s = {"mean": result.decisions.mean_s, "max": result.decisions.max_s}
    row = summarise(run, policy=result.policy, seed=result.seed, wall_s=result.wall_s, decision_s=decision_s)
    return {**row, "stalled": result.stalled} if result.stalled else row
