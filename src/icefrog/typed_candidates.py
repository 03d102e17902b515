"""Candidates where GPU types differ: one set of options a type, or one set that holds on whatever the job is given.

A policy that knows of types (``Pricing.by_gpu_type``) is offered every count on every type, at that type's speed and memory.
Any other is offered each count once: for any type, at the speed of the slowest, so that no promise is broken wherever the
job comes to lie. What does not fit into the memory of every type is offered where it does, on the type with the most GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeAlias

from icefrog.estimate.throughput import throughput
from icefrog.gpu_types import ANY_GPU
from icefrog.profile import Profile
from icefrog.spec import ClusterSpec, JobSpec
from icefrog.types import Candidate, JobView

Price: TypeAlias = Callable[[JobView, ClusterSpec], tuple[Candidate, ...]]
"""The options of a job on nodes that are taken for alike, by its profile as it stands in the view."""


def on_cluster(
    view: JobView, cluster: ClusterSpec, by_gpu_type: bool, counts: Iterable[int], price: Price
) -> tuple[Candidate, ...]:
    """A job's options on a cluster whose nodes may differ; exclusive ones by count, then shared ones, type by type.

    Args:
        view: the job; its profile is that of its own GPU type, with what is known of others.
        cluster: the nodes.
        by_gpu_type: whether the policy wants options that name types.
        counts: the GPU counts that it wants priced.
        price: prices the job on equal nodes.
    """
    parts = cluster.parts
    if by_gpu_type:
        return tuple(o for t, part in parts.items() for o in _named(price(_on(view, t, named=True), part), t))
    if len(parts) == 1:
        return price(_on(view, next(iter(parts))), cluster)
    return _on_any(view, cluster, counts, price)


def _on_any(view: JobView, cluster: ClusterSpec, counts: Iterable[int], price: Price) -> tuple[Candidate, ...]:
    largest = max(part.num_gpus for part in cluster.parts.values())  # no job spans types
    anywhere = price(_on(view, slowest_type(view, cluster)), cluster)
    options: dict[tuple[bool, int], list[Candidate]] = {}
    for option in (o for o in anywhere if o.config.num_gpus <= largest):
        options.setdefault(_kind(option), []).append(option)
    missing = {(False, count) for count in counts if count <= largest}
    missing |= {(True, 1)} if view.spec.share else set()
    missing -= set(options)
    for gpu_type, part in cluster.parts.items() if missing else ():
        found = [o for o in _named(price(_on(view, gpu_type), part), gpu_type) if _kind(o) in missing]
        for option in found:
            options.setdefault(_kind(option), []).append(option)
        missing -= {_kind(option) for option in found}
    return tuple(option for kind in sorted(options) for option in options[kind])


def slowest_type(view: JobView, cluster: ClusterSpec) -> str:
    """The type on which the job as it was asked for (requested count, first batch, nothing frozen) is slowest."""
    profile, types = view.profile, tuple(cluster.parts)
    if profile is None:
        return types[0]
    key = ("slowest", types, view.spec.requested_gpus, view.spec.batch.initial)
    known = profile.memo.get(key)
    if not isinstance(known, str):
        known = min(types, key=lambda t: _speed(profile.on(t), view.spec, cluster.parts[t]))
        profile.memo[key] = known
    return known


def _speed(profile: Profile, spec: JobSpec, part: ClusterSpec) -> float:
    """Samples/s as asked for; a batch that is too large for a GPU goes in micro-steps."""
    gpus = spec.requested_gpus
    nodes = -(-gpus // max(part.gpus_per_node))
    micro = -(-spec.batch.initial // (gpus * profile.max_local_batch))
    return float(throughput(profile, gpus, nodes, spec.batch.initial / (gpus * micro), 0, micro))


def _kind(option: Candidate) -> tuple[bool, int]:
    return option.config.shared, option.config.num_gpus


def _on(view: JobView, gpu_type: str, *, named: bool = False) -> JobView:
    """The view with the costs of a type; ``named``: what it runs with counts only if it runs on that type."""
    profile = None if view.profile is None else view.profile.on(gpu_type)
    elsewhere = named and view.config is not None and view.config.gpu_type != gpu_type
    if profile is view.profile and not elsewhere:
        return view
    return replace(view, profile=profile, config=None if elsewhere else view.config)


def _named(options: Iterable[Candidate], gpu_type: str) -> tuple[Candidate, ...]:
    if gpu_type == ANY_GPU:
        return tuple(options)
    return tuple(Candidate(replace(o.config, gpu_type=gpu_type), o.estimate) for o in options)
