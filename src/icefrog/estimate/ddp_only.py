"""A sharded job as somebody would price it who knows data parallelism only: the ablation ``throughput=ddp-only`` of IceFrog.

Eq. 5-7 have one term for communication, beside the backward pass, and freezing takes its share of all of it. What sharding
adds (Eq. 9, 10: parameters gathered beside both passes, of which freezing spares those of the backward pass only) is put
into that term, so that steps with nothing frozen take what they take.
"""

from __future__ import annotations

from icefrog.estimate.full_layers import full_step_s
from icefrog.estimate.terms import compute_s, wait_factor
from icefrog.profile import Profile, Replicated, Sharded, SyncCurve, altered

_PLACES = ((2, 1), (4, 1), (8, 2), (16, 4))
"""(GPUs, nodes) at which the step is matched: two points for each of the two lines of a :class:`SyncCurve`."""


def ddp_only(profile: Profile) -> Profile:
    """The profile of replicas (Eq. 5-7) with the same step times at the largest local batch, nothing frozen.

    Replicas stay as they are; so do pipelines, whose passes are no replica's.
    """
    if not isinstance(profile.parallel, Sharded):
        return profile
    known = profile.memo.get("ddp only")
    if not isinstance(known, Profile):
        times_s = (_matched_sync_s(profile, *place) for place in _PLACES)
        sync = _lines(*zip((gpus for gpus, _ in _PLACES), times_s, strict=True))
        params = altered(profile.throughput, sync=sync)
        known = profile.memo["ddp only"] = altered(profile, throughput=params, parallel=Replicated())
    return known


def _matched_sync_s(profile: Profile, num_gpus: int, num_nodes: int) -> float:
    """T_sync that makes Eq. 5 give the sharded step: ((T_iter - T_fwd)^g - T_bwd^g)^(1/g)."""
    params, batch = profile.throughput, profile.max_local_batch
    wait = float(wait_factor(params, num_gpus))
    forward, backward = (float(compute_s(curve, batch)) * wait for curve in (params.fwd, params.bwd))
    rest = max(full_step_s(profile, num_gpus, num_nodes, batch) - forward, backward)
    gamma = params.overlap_gamma
    return float((rest**gamma - backward**gamma) ** (1.0 / gamma))


def _lines(*points: tuple[int, float]) -> SyncCurve:
    """Through the first two points within a node, through the other two beyond one; neither falls with more replicas."""
    (a, near), (b, near_too), (c, far), (d, far_too) = points
    intra = max((near_too - near) / (b - a), 0.0)
    inter = max((far_too - far) / (d - c), 0.0)
    return SyncCurve(
        intra_alpha_s=max(near - intra * (a - 2), 0.0),
        intra_beta_s=intra,
        inter_alpha_s=max(far - inter * (c - 2), 0.0),
        inter_beta_s=inter,
    )
