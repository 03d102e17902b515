"""What the scheduler is told of jobs of the Pollux world.

With a fixed batch: the artifact's oracle, which knows the measured step times and the remaining iterations. With an elastic
batch: the model that each job has fitted to its own steps, as it reported it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from icefrog.executors.sim.pollux.application import MAX_GPUS, Application, LocalBatch, NotMeasuredError
from icefrog.executors.sim.pollux.goodput import best_batches
from icefrog.profile import Profile
from icefrog.spec import ClusterSpec
from icefrog.types import Candidate, Config, Estimate, GradientStats, JobView, Pricing

_PRIOR_STEP_S = 1.0
"""Step time assumed for a job that has measured nothing; only ratios of such estimates mean anything."""


def packed(num_gpus: int, cluster: ClusterSpec) -> tuple[int, ...]:
    """A placement on as few (full) nodes as possible."""
    per_node = max(cluster.gpus_per_node)
    full, rest = divmod(num_gpus, per_node)
    return (per_node,) * full + ((rest,) if rest else ())


@dataclass(frozen=True, slots=True)
class _Known:
    """What one answer was based on."""

    effective_samples: float
    profile: Profile | None
    stats: GradientStats | None
    elastic: bool
    options: tuple[Candidate, ...]


class PolluxCandidates:
    """A candidate source for jobs of the Pollux world.

    Estimates are made when a job reports, and stand until it reports again; so does their T_acc, whose age is that of the
    job at that time.

    Args:
        apps: measurements by application.
    """

    def __init__(self, apps: Mapping[str, Application]) -> None:
        self._apps = apps
        self._known: dict[str, _Known] = {}

    def __call__(self, view: JobView, cluster: ClusterSpec, now_s: float, pricing: Pricing) -> tuple[Candidate, ...]:
        """The job's options, by rising GPU count."""
        elastic = pricing.batch == "elastic"
        known = self._known.get(view.job_id)
        if (
            known is not None
            and known.effective_samples == view.effective_samples
            and known.stats is view.stats
            and known.profile is view.profile
            and known.elastic == elastic
        ):
            return known.options
        app = self._apps[view.spec.workload or ""]
        age_s = max(now_s - view.submit_s, 0.0)
        options = _fitted(app, view, cluster, age_s) if elastic else _oracle(app, view, cluster, age_s)
        self._known[view.job_id] = _Known(view.effective_samples, view.profile, view.stats, elastic, options)
        return options


def _oracle(app: Application, view: JobView, cluster: ClusterSpec, age_s: float) -> tuple[Candidate, ...]:
    """Measured step times; one GPU is taken to accumulate at least once, as in the artifact."""
    target = view.spec.batch.initial
    left = app.remaining_iterations(target, app.epochs_done(view.effective_samples / app.init_batch))
    most = min(app.max_gpus(target), MAX_GPUS, cluster.num_gpus)
    options = []
    for count in view.spec.gpus:
        if count > most and count != view.spec.requested_gpus:
            continue
        batch = app.local_batch(target, count)
        try:
            step_s = app.step_s(packed(count, cluster), app.local_batch(target, count, always_accumulate=True))
        except NotMeasuredError:
            continue
        options.append(_candidate(count, batch, step_s, 1.0, age_s, left * step_s))
    return tuple(options)


def _fitted(app: Application, view: JobView, cluster: ClusterSpec, age_s: float) -> tuple[Candidate, ...]:
    """The job's own model; before there is one its speed grows as its GPUs."""
    if app.rules.rigid is not None:
        count, target = app.rules.rigid
        return (_candidate(count, app.local_batch(target, count), _PRIOR_STEP_S, 1.0, age_s, _left_s(app, view, 1.0)),)
    per_node = max(cluster.gpus_per_node)
    most = min(app.max_gpus(app.max_batch), MAX_GPUS, cluster.num_gpus)
    counts = [count for count in view.spec.gpus if count <= most and (count < per_node or count % per_node == 0)]
    if view.profile is None or view.stats is None:
        return tuple(
            _candidate(
                count,
                app.local_batch(max(app.init_batch, app.min_local * count), count),
                _PRIOR_STEP_S / count,
                1.0,
                age_s,
                _left_s(app, view, float(count)),
            )
            for count in counts
        )
    sqr = view.stats.sqr_norm[0]
    noise = view.stats.variance[0] / app.init_batch / sqr if sqr > 0 else 1e12
    nodes = -(-np.array(counts) // per_node)
    best = best_batches(view.profile.throughput, noise, app, nodes, counts)
    columns = (best.goodput, best.step_s, best.batch_per_gpu, best.accum_steps)
    options = []
    for count, goodput, step_s, local, accum in zip(counts, *(column.tolist() for column in columns), strict=True):
        if goodput > 0.0:
            batch = LocalBatch(local, accum)
            per_step = count * local * (accum + 1) / step_s
            options.append(_candidate(count, batch, step_s, goodput / per_step, age_s, _left(app, view) / goodput))
    return tuple(options)


def _left(app: Application, view: JobView) -> float:
    """Effective samples left."""
    return max(app.thresholds[-1] * app.init_batch - view.effective_samples, 1.0)


def _left_s(app: Application, view: JobView, speed_up: float) -> float:
    return _left(app, view) / app.init_batch * _PRIOR_STEP_S / speed_up


def _candidate(
    count: int, batch: LocalBatch, step_s: float, efficiency: float, age_s: float, remaining_s: float
) -> Candidate:
    config = Config(count, batch.batch_per_gpu, batch.accum_steps + 1)
    throughput = config.global_batch / step_s
    estimate = Estimate(
        step_s=step_s,
        throughput=throughput,
        psi=1.0,
        effective_progress=throughput * efficiency,
        mem_bytes=0.0,
        util_pct=0.0,
        tta_s=age_s + remaining_s,
        remaining_s=remaining_s,
    )
    return Candidate(config, estimate)
