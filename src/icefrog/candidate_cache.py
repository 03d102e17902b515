"""Candidates again, without the work: between two reports of a job only its age and its remaining samples change."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from icefrog.candidates import LAYER_ELASTIC, candidates, is_rigid
from icefrog.lazymap import WhileActive
from icefrog.profile import Profile
from icefrog.requested_candidates import MIN_TTA_S
from icefrog.spec import ClusterSpec, JobSpec
from icefrog.types import Candidate, Config, Estimate, GradientStats, JobView, Pricing


@dataclass(frozen=True, slots=True)
class _Basis:
    """What a job's configurations depend on; T_acc comes on top."""

    spec: JobSpec
    profile: Profile
    stats: GradientStats | None
    current: Config | None
    frozen_layers: int
    cluster: ClusterSpec
    pricing: Pricing

    def same(self, other: _Basis) -> bool:
        """Equal; large parts by identity, since a state keeps the object until a report replaces it."""
        return (
            self.profile is other.profile
            and self.stats is other.stats
            and self.spec is other.spec
            and self.cluster is other.cluster
            and self.current == other.current
            and self.frozen_layers == other.frozen_layers
            and self.pricing == other.pricing
        )


class CandidateCache:
    """A :data:`~icefrog.controller.CandidateSource` that returns exactly what :func:`~icefrog.candidates.candidates` would.

    It remembers one set of options a job. Jobs that have not reported what they cost are not cached, nor is what costs next
    to nothing (the options of rigid policies).

    Args:
        active: the ids of the unfinished jobs (``ClusterState.active``); the others are forgotten.
    """

    def __init__(self, active: Collection[str]) -> None:
        self._known = WhileActive[tuple[_Basis, tuple[Candidate, ...]]](active)

    def __call__(
        self, view: JobView, cluster: ClusterSpec, now_s: float, pricing: Pricing = LAYER_ELASTIC
    ) -> tuple[Candidate, ...]:
        """The job's options at ``now_s``."""
        if view.profile is None or view.remaining_samples is None or is_rigid(pricing):
            return candidates(view, cluster, now_s, pricing)
        current = view.config if view.running and not view.shared else None
        basis = _Basis(view.spec, view.profile, view.stats, current, view.frozen_layers, cluster, pricing)
        known = self._known.get(view.job_id)
        if known is not None and known[0].same(basis):
            age_s = max(now_s - view.submit_s, 0.0)
            return tuple(_aged(option, age_s, view.remaining_samples) for option in known[1])
        fresh = candidates(view, cluster, now_s, pricing)
        self._known.put(view.job_id, (basis, fresh))
        return fresh


def _aged(option: Candidate, age_s: float, remaining_samples: float) -> Candidate:
    old = option.estimate
    left_s = max(remaining_samples, 0.0) / old.effective_progress
    tta_s, speed = max(age_s + left_s, MIN_TTA_S), old.effective_progress
    estimate = Estimate(old.step_s, old.throughput, old.psi, speed, old.mem_bytes, old.util_pct, tta_s, left_s)
    return Candidate(option.config, estimate)
