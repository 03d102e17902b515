"""What the scheduler is told of jobs of the Pollux world.

With a fixed batch: the artifact's oracle, which knows the measured step times and the remaining iterations. With an elastic
batch: the model that each job has fitted to its own steps, as it reported it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, overload

from icefrog.executors.sim.pollux.application import MAX_GPUS, Application, LocalBatch, NotMeasuredError
from icefrog.executors.sim.pollux.goodput import NOISY, PerfParams, best_batches
from icefrog.lazymap import WhileActive
from icefrog.profile import Profile
from icefrog.spec import ClusterSpec, JobSpec
from icefrog.types import Candidate, Config, Estimate, GradientStats, JobView, Pricing

_PRIOR_STEP_S = 1.0
"""Step time assumed for a job that has measured nothing; only ratios of such estimates mean anything."""


def packed(num_gpus: int, cluster: ClusterSpec) -> tuple[int, ...]:
    """A placement on as few (full) nodes as possible."""
    per_node = max(cluster.gpus_per_node)
    full, rest = divmod(num_gpus, per_node)
    return (per_node,) * full + ((rest,) if rest else ())


class _Options(Sequence[Candidate]):
    """A job's options, each made when it is asked for: most never are."""

    def __init__(self, make: Callable[[int], Candidate], count: int) -> None:
        self._make = make
        self._made: list[Candidate | None] = [None] * count

    def __len__(self) -> int:
        return len(self._made)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self._made)))]
        found = self._made[index]
        if found is None:
            found = self._made[index] = self._make(index if index >= 0 else index + len(self._made))
        return found

    def __contains__(self, option: object) -> bool:
        return any(option is made for made in self._made) or any(option == mine for mine in self)


@dataclass(frozen=True, slots=True)
class _Known:
    """What one answer was based on."""

    effective_samples: float
    profile: Profile | None
    stats: GradientStats | None
    pricing: Pricing
    options: Sequence[Candidate]


_Menu: TypeAlias = list[tuple[Config, float]]
"""(configuration, step time in s) by rising GPU count."""


class PolluxCandidates:
    """A candidate source for jobs of the Pollux world.

    Estimates are made when a job reports, and stand until it reports again; so does their T_acc, whose age is that of the
    job at that time.

    Args:
        apps: measurements by application.
        active: the ids of the unfinished jobs; the others are forgotten.
    """

    def __init__(self, apps: Mapping[str, Application], active: Collection[str]) -> None:
        self._apps = apps
        self._known = WhileActive[_Known](active)
        self._menus: dict[tuple[str, int, tuple[int, ...], int, bool], _Menu] = {}

    def __call__(self, view: JobView, cluster: ClusterSpec, now_s: float, pricing: Pricing) -> Sequence[Candidate]:
        """The job's options, by rising GPU count."""
        known = self._known.get(view.job_id)
        if (
            known is not None
            and known.effective_samples == view.effective_samples
            and known.stats is view.stats
            and known.profile is view.profile
            and (known.pricing is pricing or known.pricing == pricing)
        ):
            return known.options
        app = self._apps[view.spec.workload or ""]
        age_s = max(now_s - view.submit_s, 0.0)
        if pricing.batch == "elastic":
            options = _fitted(app, view, cluster, age_s)
        else:
            options = self._oracle(app, view, cluster, age_s, pricing.counts == "requested")
        self._known.put(view.job_id, _Known(view.effective_samples, view.profile, view.stats, pricing, options))
        return options

    def _oracle(
        self, app: Application, view: JobView, cluster: ClusterSpec, age_s: float, rigid: bool
    ) -> Sequence[Candidate]:
        """Measured step times, and the remaining iterations of the artifact's oracle."""
        target = view.spec.batch.initial
        key = (app.name, target, view.spec.gpus, view.spec.requested_gpus, rigid)
        menu = self._menus.get(key)
        if menu is None:
            menu = self._menus[key] = _menu(app, view.spec, cluster, rigid)
        left = app.remaining_iterations(target, app.epochs_done(view.effective_samples))
        samples = _left(app, view)

        def make(index: int) -> Candidate:
            config, step_s = menu[index]
            return _candidate(config, step_s, samples / (left * step_s), age_s, left * step_s)

        return _Options(make, len(menu))


def _menu(app: Application, spec: JobSpec, cluster: ClusterSpec, rigid: bool) -> _Menu:
    """A fixed batch at every count that was measured. One GPU is taken to accumulate at least once, as in the artifact.

    A rigid policy gives what was requested, whatever the application's largest size.
    """
    target = spec.batch.initial
    most = min(app.max_gpus(target), MAX_GPUS, cluster.num_gpus)
    menu = []
    for count in spec.gpus:
        if count > most and not (rigid and count == spec.requested_gpus):
            continue
        batch = app.local_batch(target, count)
        try:
            step_s = app.step_s(packed(count, cluster), app.local_batch(target, count, always_accumulate=True))
        except NotMeasuredError:
            continue
        menu.append((_config(count, batch), step_s))
    return menu


def _fitted(app: Application, view: JobView, cluster: ClusterSpec, age_s: float) -> Sequence[Candidate]:
    """The job's own model; before there is one its speed grows as its GPUs."""
    samples = _left(app, view)

    def prior(count: int, batch: int) -> Candidate:
        progress = app.init_batch * count / _PRIOR_STEP_S
        config = _config(count, app.local_batch(batch, count))
        return _candidate(config, config.global_batch / progress, progress, age_s, samples / progress)

    if app.rules.rigid is not None:
        return (prior(*app.rules.rigid),)
    per_node = max(cluster.gpus_per_node)
    most = min(app.max_gpus(app.max_batch), MAX_GPUS, cluster.num_gpus)
    counts = tuple(count for count in view.spec.gpus if count <= most)
    if view.profile is None or view.stats is None:
        return tuple(prior(count, max(app.init_batch, app.min_local * count)) for count in counts)
    sqr = view.stats.sqr_norm[0]
    noise = view.stats.variance[0] / app.init_batch / sqr if sqr > 0 else NOISY
    nodes = [-(-count // per_node) for count in counts]
    best = best_batches(PerfParams.of(view.profile.throughput), noise, app.grid(counts), nodes, counts)
    allowed = [(count, one) for count, one in zip(counts, best, strict=True) if one.goodput > 0.0]

    def make(index: int) -> Candidate:
        count, one = allowed[index]
        config = _config(count, LocalBatch(one.batch_per_gpu, one.accum_steps))
        progress = one.goodput * app.init_batch
        return _candidate(config, one.step_s, progress, age_s, samples / progress)

    return _Options(make, len(allowed))


def _left(app: Application, view: JobView) -> float:
    """Effective samples left."""
    return max(app.sample_thresholds[-1] - view.effective_samples, 1.0)


def _config(count: int, batch: LocalBatch) -> Config:
    return Config(count, batch.batch_per_gpu, batch.accum_steps + 1)


def _candidate(config: Config, step_s: float, progress: float, age_s: float, remaining_s: float) -> Candidate:
    throughput = config.global_batch / step_s
    return Candidate(config, Estimate(step_s, throughput, 1.0, progress, 0.0, 0.0, age_s + remaining_s, remaining_s))
