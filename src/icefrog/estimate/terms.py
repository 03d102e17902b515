"""The terms that the step-time models are put together from, Eq. 5-7; every function broadcasts over numpy arrays.

Each collapses at l = 0 (theta = omega = 1) to the full-layer measurement, to the last bit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from icefrog.profile import ComputeCurve, FloatArray, SyncCurve, ThroughputParams


def power_sum(x: npt.ArrayLike, y: npt.ArrayLike, exponent: float) -> FloatArray:
    """(x^p + y^p)^(1/p) for x, y >= 0, p >= 1; exactly x where y = 0. p = 1 adds, p -> inf takes the larger."""
    if exponent == 1.0:
        return np.add(x, y, dtype=np.float64)
    high = np.maximum(x, y).astype(np.float64)
    low = np.minimum(x, y)
    ratio = np.divide(low, high, out=np.zeros_like(high), where=high > 0)
    return np.asarray(high * (1.0 + ratio**exponent) ** (1.0 / exponent))


def compute_s(curve: ComputeCurve, batch_per_gpu: npt.ArrayLike) -> FloatArray:
    """Seconds of one pass over a local batch."""
    work = curve.beta_s * np.asarray(batch_per_gpu, dtype=np.float64)
    return power_sum(np.full_like(work, curve.alpha_s), work, curve.smooth)


def sync_s(curve: SyncCurve, num_gpus: npt.ArrayLike, num_nodes: npt.ArrayLike) -> FloatArray:
    """T_sync(a, 0), s: 0 on one GPU, else affine in the replicas beyond two, by placement.

    One node: intra; several nodes: inter, and with exactly two a term for each GPU beyond one per node.
    """
    gpus = np.asarray(num_gpus, dtype=np.float64)
    extra = np.maximum(gpus - 2.0, 0.0)
    intra = curve.intra_alpha_s + curve.intra_beta_s * extra
    nodes = np.asarray(num_nodes)
    crowded = np.where(nodes == 2, np.maximum(gpus / 2.0 - 1.0, 0.0), 0.0)
    inter = curve.inter_alpha_s + curve.inter_beta_s * extra + curve.pair_beta_s * crowded
    return np.where(gpus <= 1, 0.0, np.where(nodes > 1, inter, intra))


def wait_factor(params: ThroughputParams, num_gpus: npt.ArrayLike) -> FloatArray:
    """By how much compute stretches since every step waits for the slowest of a replicas; 1 on one GPU.

    The expected maximum of a uniform draws exceeds their mean by (a - 1)/(a + 1) of half the spread.
    """
    gpus = np.asarray(num_gpus, dtype=np.float64)
    return np.asarray(1.0 + params.straggler * (gpus - 1.0) / (gpus + 1.0))


def backward_s(params: ThroughputParams, theta: npt.ArrayLike, batch_per_gpu: npt.ArrayLike) -> FloatArray:
    """T_bwd(m, l) (Eq. 6), s. alpha_flop never exceeds the part of T_bwd(m, 0) that does not grow with m."""
    fixed = min(params.flop_alpha_s, params.bwd.alpha_s)
    kept = np.asarray(theta, dtype=np.float64) ** params.flop_gamma
    return np.asarray(compute_s(params.bwd, batch_per_gpu) * kept + fixed * (1.0 - kept))


def synchronise_s(
    params: ThroughputParams, omega: npt.ArrayLike, num_gpus: npt.ArrayLike, num_nodes: npt.ArrayLike
) -> FloatArray:
    """T_sync(a, l) (Eq. 7), s."""
    return unfrozen_part(sync_s(params.sync, num_gpus, num_nodes), params.sync_alpha_s, omega)


def unfrozen_part(full_s: FloatArray, fixed_s: float, share: npt.ArrayLike) -> FloatArray:
    """What is left of a transfer when ``share`` of its bytes is sent (Eq. 7), s; ``fixed_s`` stays, but never grows it."""
    kept = np.asarray(share, dtype=np.float64)
    return np.asarray(full_s * kept + np.minimum(fixed_s, full_s) * (1.0 - kept))
