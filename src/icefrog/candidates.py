"""The options of one job (Eq. 16): its best configuration at every GPU count, and a Pareto set of shared ones."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from icefrog.estimate.ddp_only import ddp_only
from icefrog.estimate.progress import offered_worth
from icefrog.estimate.sharing import MAX_UTIL_PCT, MEM_SAFETY
from icefrog.estimate.tuner import TunerChoice, TunerRule, TunerTable, max_frozen_layers, penalties, pick
from icefrog.profile import FloatArray, Profile
from icefrog.requested_candidates import MIN_TTA_S, exclusive_option, shared_options
from icefrog.spec import ClusterSpec
from icefrog.typed_candidates import on_cluster
from icefrog.types import Candidate, Config, Estimate, JobView, Pricing

IndexArray = npt.NDArray[np.intp]

MAX_SHARED_CANDIDATES = 8
PRIOR_EFFICIENCY = 0.95
"""What each doubling of the GPUs keeps of its speed-up, for a job that has not reported yet."""
PRIOR_REMAINING_S = 3600.0
"""Remaining time on one GPU assumed for such a job; it only sets how much the job's age weighs."""
ARGMAX_RULES = ("auto", "progress", "tuner")
"""Rules of job files that take the depth of the largest psi T: what it will be, the scheduler can reckon."""
LAYER_ELASTIC = Pricing(freezing="tuner")
"""The Layer Tuner, the job's batch as it is (Eq. 15)."""


def min_nodes(cluster: ClusterSpec, num_gpus: int) -> int | None:
    """Fewest nodes of the (empty) cluster that hold ``num_gpus``; None: the cluster is too small."""
    reach = cluster.largest_nodes_gpus
    return bisect_left(reach, num_gpus) + 1 if num_gpus <= reach[-1] else None


def candidates(
    view: JobView,
    cluster: ClusterSpec,
    now_s: float,
    pricing: Pricing = LAYER_ELASTIC,
    *,
    hysteresis: float = 0.0,
    max_shared: int = MAX_SHARED_CANDIDATES,
) -> tuple[Candidate, ...]:
    """All options of one job, exclusive ones by rising GPU count, then shared ones by rising T_acc.

    On a cluster of several GPU types: :mod:`icefrog.typed_candidates`.

    Args:
        view: what is known of the job.
        cluster: its size decides which counts fit, and how many nodes each spans at least.
        now_s: for T_age.
        pricing: by which rule layers may be frozen, whether the batch may move, what a sharer's speed is believed to be;
            the default is the Layer Tuner at the job's first batch.
        hysteresis: least relative gain in E for which the estimate leaves the configuration the job runs
            with.
        max_shared: largest size of the shared set.

    Returns:
        Empty if no GPU count fits the cluster and divides the batch. A job without a profile gets a prior:
        PRIOR_EFFICIENCY for each doubling of the GPUs, PRIOR_REMAINING_S on one; it is never offered for
        sharing (its memory is unknown).
    """

    def price(view: JobView, cluster: ClusterSpec) -> tuple[Candidate, ...]:
        return _on_equal_gpus(view, cluster, now_s, pricing, hysteresis, max_shared)

    counts = (view.spec.requested_gpus,) if is_rigid(pricing) else view.spec.gpus
    return on_cluster(view, cluster, pricing.by_gpu_type, counts, price)


def _on_equal_gpus(
    view: JobView, cluster: ClusterSpec, now_s: float, pricing: Pricing, hysteresis: float, max_shared: int
) -> tuple[Candidate, ...]:
    age_s = max(now_s - view.submit_s, 0.0)
    current = view.config if view.running and not view.shared else None
    if view.profile is not None and pricing.throughput == "ddp-only":
        view = replace(view, profile=ddp_only(view.profile))
    if view.profile is not None and is_rigid(pricing):
        return _requested(view, view.profile, cluster, pricing, current, age_s)
    placements = _spans(view.spec.gpus, cluster)
    if view.profile is None:
        return _prior_candidates(view, placements, age_s, pricing)
    rule = _rule(view, view.profile, cluster, placements, pricing)
    choices = _tuned(view, view.profile, rule, pricing, current, hysteresis, max_shared)
    remaining = _remaining_samples(view, view.profile)
    return tuple(Candidate(one.config, _floored(one.estimate(age_s, remaining))) for one in choices)


def is_rigid(pricing: Pricing) -> bool:
    """One GPU count, one batch, all layers: nothing to search."""
    return pricing.counts == "requested" and pricing.freezing == "none" and pricing.batch == "fixed"


def _requested(
    view: JobView, profile: Profile, cluster: ClusterSpec, pricing: Pricing, current: Config | None, age_s: float
) -> tuple[Candidate, ...]:
    nodes = min_nodes(cluster, view.spec.requested_gpus)
    remaining, mem = _remaining_samples(view, profile), cluster.gpu_mem_bytes
    alone = [] if nodes is None else exclusive_option(view, profile, nodes, mem, current, age_s, remaining)
    if not (pricing.shares and view.spec.share):
        return tuple(alone)
    return (*alone, *shared_options(view, profile, mem, pricing.sharing_speed, age_s, remaining))


def _tuned(
    view: JobView,
    profile: Profile,
    rule: TunerRule,
    pricing: Pricing,
    current: Config | None,
    hysteresis: float,
    max_shared: int,
) -> tuple[TunerChoice, ...]:
    table = TunerTable.of(profile, rule)
    psi = _offered_psi(view, profile, pricing)
    progress = table.progress(psi, _noise_scale(view))
    best = pick(table, psi, progress, current=current, hysteresis=hysteresis)
    shared = _shared_choices(table, psi, progress, max_shared, pricing.sharing_speed) if view.spec.share else []
    return (*best.values(), *shared)


def _batches(view: JobView, pricing: Pricing) -> tuple[int, ...]:
    """The global batches that may be granted: M0 alone, or all of the job's range."""
    return view.spec.batch.options() if pricing.batch == "elastic" else (view.spec.batch.initial,)


def _by_own_rule(view: JobView, pricing: Pricing) -> bool:
    """Whether the depth follows from no argmax over psi: the job has a rule of its own, or FreezeOut's schedule."""
    return view.spec.freeze.rule not in ARGMAX_RULES or pricing.freezing == "freezeout"


def _spans(counts: Sequence[int], cluster: ClusterSpec) -> tuple[tuple[int, int], ...]:
    """(num_gpus, fewest nodes that hold them) of every count that fits the cluster."""
    reach = cluster.largest_nodes_gpus
    return tuple((gpus, bisect_left(reach, gpus) + 1) for gpus in counts if gpus <= reach[-1])


def _rule(
    view: JobView, profile: Profile, cluster: ClusterSpec, placements: tuple[tuple[int, int], ...], pricing: Pricing
) -> TunerRule:
    spec = view.spec
    if pricing.freezing == "none":
        deepest = 0
    elif _by_own_rule(view, pricing):
        deepest = profile.num_layers - 1
    else:
        deepest = max_frozen_layers(profile.num_layers, spec.freeze.max_fraction)
    return TunerRule(placements, _batches(view, pricing), spec.batch.initial, deepest, cluster.gpu_mem_bytes)


def _offered_psi(view: JobView, profile: Profile, pricing: Pricing) -> FloatArray:
    """psi of the depths that the job may use; where it freezes by a rule of its own, of its present depth alone."""
    freeze = pricing.freezing != "none"
    stats = view.stats if freeze else None
    if stats is not None and len(stats.signal) == profile.num_layers:
        psi = offered_worth(stats.signal, min(view.frozen_layers, profile.num_layers - 1))
    else:
        known = stats is not None and len(stats.variance) == profile.num_layers
        psi = penalties(profile, np.array(stats.variance) if known and stats is not None else None)
    if freeze and _by_own_rule(view, pricing):
        depth = min(view.frozen_layers, profile.num_layers - 1)
        own = psi[depth] if np.isfinite(psi[depth]) else 1.0  # unpriced: no punishment
        psi = np.full_like(psi, np.nan)
        psi[depth] = own
    return psi


def _noise_scale(view: JobView) -> float | None:
    if view.stats is None:
        return None
    signal = sum(view.stats.sqr_norm)
    return sum(view.stats.variance) / signal if signal > 0 else None


def _remaining_samples(view: JobView, profile: Profile) -> float:
    if view.remaining_samples is not None:
        return max(view.remaining_samples, 0.0)
    return max(view.spec.max_epochs * profile.samples_per_epoch - view.effective_samples, 0.0)


def _floored(estimate: Estimate) -> Estimate:
    """T_acc > 0, since shares divide by it (a job submitted now with nothing left)."""
    return estimate if estimate.tta_s >= MIN_TTA_S else replace(estimate, tta_s=MIN_TTA_S)


def _shared_choices(
    table: TunerTable, psi: FloatArray, progress: FloatArray, limit: int, speed: float
) -> list[TunerChoice]:
    """The Pareto set over (m, l) of (T_acc, memory, utilisation) on one shared GPU, the fastest first.

    A configuration that breaks the sharing rule by itself is left out: it could never be half of a pair. A
    set larger than ``limit`` is thinned evenly along T_acc; the fastest and the slowest stay.
    """
    index = table.position(1)
    if index is None or limit < 1:
        return []
    alone, mem, util = progress[index], table.mem_bytes[index], table.util_pct[index]
    fits = (alone > 0) & (MEM_SAFETY * mem <= table.rule.gpu_mem_bytes) & (util <= MAX_UTIL_PCT)
    rows, depths = np.nonzero(fits)
    costs = np.column_stack([-alone[rows, depths], mem[rows, depths], util[rows, depths]])
    front = pareto_front(costs)
    if len(front) > limit:
        front = front[np.unique(np.linspace(0, len(front) - 1, limit).round().astype(np.intp))]
    return [
        table.choice((index, int(rows[i]), int(depths[i])), psi, float(-costs[i, 0]), shared=True, sharing_speed=speed)
        for i in front
    ]


def pareto_front(costs: FloatArray) -> IndexArray:
    """Indices of the rows of (N, 3) that no other row beats (<= everywhere, < somewhere), by rising first cost.

    Of equal rows the first stays.
    """
    order = np.lexsort((costs[:, 2], costs[:, 1], costs[:, 0]))
    second, third = costs[order, 1], costs[order, 2]
    beaten = (second[:, None] <= second) & (third[:, None] <= third)  # [i, j]: i beats j, if it comes earlier
    return np.asarray(order[~np.any(np.triu(beaten, k=1), axis=0)])


def _prior_candidates(
    view: JobView, placements: tuple[tuple[int, int], ...], age_s: float, pricing: Pricing
) -> tuple[Candidate, ...]:
    """Options of a job that has not reported: throughput in units of one GPU's, memory and utilisation unknown (0)."""
    batches = _batches(view, pricing)
    divided = [(gpus, next((m for m in batches if m % gpus == 0), None)) for gpus, _ in placements]
    options = []
    for gpus, batch in divided:
        if batch is None:
            continue
        speed_up = gpus * PRIOR_EFFICIENCY ** math.log2(gpus)
        samples_per_s = speed_up * batches[0]  # one GPU: a step of the smallest batch a second
        estimate = Estimate(
            step_s=batch / samples_per_s,
            throughput=samples_per_s,
            psi=1.0,
            effective_progress=samples_per_s,
            mem_bytes=0.0,
            util_pct=0.0,
            tta_s=age_s + PRIOR_REMAINING_S / speed_up,
            remaining_s=PRIOR_REMAINING_S / speed_up,
        )
        options.append(Candidate(Config(num_gpus=gpus, batch_per_gpu=batch // gpus), estimate))
    return tuple(options)
