"""Replaying a trace under several policies: trace -> jobs -> simulations -> tables and report."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from icefrog.lazymap import LazyMap
from icefrog.policies import make_policy
from icefrog.profile import Profile
from icefrog.report import RunRecord, summarise, summary_document, write_jobs_csv, write_report, write_summary
from icefrog.report.record import Folder
from icefrog.simulate import Progress, RunResult, Scenario, SimSettings, icefrog_scenario, simulate
from icefrog.spec import ClusterSpec, JobSpec
from icefrog.traces import Trace, read_trace, sample, scale_load, window
from icefrog.traces.jobs import task_mix, to_specs
from icefrog.traces.synth import PREFIX, synth_trace
from icefrog.traces.window import pool_days
from icefrog.workloads import LayerCurves, job_curves, job_profile, load_catalogue
from icefrog.workloads.jobs import check_gpu_types


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
    day_hours: tuple[int, int] | None = None
    """Only jobs submitted from the first of these hours to before the second, of any day, the days laid over one another."""
    pace: float = 1.0
    """How many times as fast the submissions follow one another: the same jobs in less time."""

    def read(self) -> Trace:
        """Read (or generate), cut, sample, compress. Raises :class:`icefrog.errors.UserError`.

        A sample or a generator has ``load`` times the jobs in the same time; a whole file is played ``load`` times as
        fast.
        """
        generated = self.source.startswith(PREFIX)
        trace = synth_trace(self.source, self.load, self.seed) if generated else read_trace(self.source, self.format)
        if self.start is not None or self.hours is not None:
            trace = window(trace, self.start, self.hours)
        if self.day_hours is not None:
            first, last = self.day_hours
            trace = pool_days(trace, first, last - first)
        if self.num_jobs is not None:
            trace = sample(trace, self.num_jobs, self.seed, load=self.load)
        elif not generated and self.load != 1.0:
            trace = scale_load(trace, self.load)
        return trace if self.pace == 1.0 else scale_load(trace, self.pace)


@dataclass(frozen=True, slots=True)
class FreezeLimit:
    """A share of the jobs, chosen by the seed, that let at most ``max_fraction`` of their layers be frozen.

    With a limit in force every job carries the label ``freezing``: ``restricted`` or ``free``.
    """

    share: float
    max_fraction: float = 0.3

    def apply(self, specs: Sequence[JobSpec], seed: int) -> tuple[JobSpec, ...]:
        """The jobs, ``share`` of them (rounded to whole jobs) restricted. A job's luck depends on its name and the seed."""
        luck = {
            spec.job_id: np.random.default_rng([seed, zlib.crc32(spec.job_id.encode()), 4]).random() for spec in specs
        }
        chosen = set(sorted(luck, key=luck.__getitem__)[: round(self.share * len(specs))])
        return tuple(self._limited(spec, spec.job_id in chosen) for spec in specs)

    def _limited(self, spec: JobSpec, restricted: bool) -> JobSpec:
        labels = {**spec.labels, "freezing": "restricted" if restricted else "free"}
        if not restricted:
            return spec.model_copy(update={"labels": labels})
        freeze = spec.freeze.model_copy(update={"max_fraction": min(self.max_fraction, spec.freeze.max_fraction)})
        return spec.model_copy(update={"labels": labels, "freeze": freeze})


@dataclass(frozen=True, slots=True)
class Workload:
    """Everything a simulation is given of its jobs."""

    specs: tuple[JobSpec, ...]
    profiles: Mapping[str, Profile]
    curves: Mapping[str, LayerCurves]
    trace: Mapping[str, Any]
    """For ``summary.json``: the source, the rows dropped by reason, the mix of models."""


def prepare(
    choice: TraceChoice,
    cluster: ClusterSpec,
    limit: FreezeLimit | None = None,
    profiles: Mapping[str, Profile] | None = None,
) -> Workload:
    """Read the trace and match its jobs to the catalogue, in which ``profiles`` take the place of a workload's own cost.

    Raises:
        UserError: the trace cannot be read, or there is no such workload.
    """
    trace = choice.read()
    catalogue = load_catalogue().with_profiles(profiles or {})
    check_gpu_types(cluster.parts, catalogue)
    per_node = max(cluster.gpus_per_node)
    largest = max(part.num_gpus for part in cluster.parts.values())  # no job spans GPU types
    jobs = to_specs(trace, catalogue, seed=choice.seed, max_gpus=largest, gpus_per_node=per_node)
    specs = jobs.specs if limit is None else limit.apply(jobs.specs, choice.seed)
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
    by_id = {spec.job_id: spec for spec in specs}
    types = tuple(cluster.parts)
    return Workload(
        specs=specs,
        profiles=LazyMap(by_id, lambda job_id: job_profile(by_id[job_id], catalogue, per_node, types)),
        curves=LazyMap(by_id, lambda job_id: job_curves(by_id[job_id], catalogue)),
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
    scenario = icefrog_scenario(workload.specs, workload.profiles, workload.curves, cluster, settings)
    return replay_scenario(
        scenario, workload.trace, policies, options=options, settings=settings, out_dir=out_dir, progress=progress
    )


def replay_scenario(
    scenario: Scenario,
    trace: Mapping[str, Any],
    policies: Sequence[str],
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    settings: SimSettings | None = None,
    out_dir: Path | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """As :func:`replay`, in any world; ``trace`` are the facts of the jobs for ``summary.json``."""
    settings = settings or SimSettings()
    cluster = scenario.cluster
    chosen = options or {}
    for policy in policies:
        make_policy(policy, chosen.get(policy))
    runs: dict[str, RunRecord] = {}
    rows = []
    for policy in policies:
        runs[policy], row = run_policy(scenario, policy, chosen.get(policy), settings, out_dir, progress)
        rows.append(row)
        if out_dir is not None:
            write_jobs_csv(runs[policy], out_dir / policy / "jobs.csv")
    document = summary_document({**trace, **settings.outages.facts()}, cluster, rows)
    if out_dir is not None:
        write_summary(out_dir / "summary.json", document)
        write_report(out_dir / "report.html", runs, document)
    return document


def run_policy(
    scenario: Scenario,
    policy: str,
    options: Mapping[str, Any] | None = None,
    settings: SimSettings | None = None,
    out_dir: Path | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> tuple[RunRecord, dict[str, Any]]:
    """Simulate one policy; return the run and its entry in ``runs`` of ``summary.json``.

    Arguments as in :func:`icefrog.simulate.simulate`. The log is folded while it is written: it is neither kept nor read.
    """
    settings = settings or SimSettings()
    folder = Folder(scenario.cluster, live=False)
    result = simulate(scenario, policy, options, settings, out_dir, progress, folder)
    run = folder.run()
    return run, _row(run, result, settings.restart_s)


def _row(run: RunRecord, result: RunResult, restart_s: float) -> dict[str, Any]:
    decision_s = {"mean": result.decisions.mean_s, "max": result.decisions.max_s}
    row = summarise(
        run,
        policy=result.policy,
        seed=result.seed,
        wall_s=result.wall_s,
        decision_s=decision_s,
        restart_s=restart_s,
    )
    return {**row, "stalled": result.stalled} if result.stalled else row
