"""Layer-aware throughput of data-parallel training, Eq. 4-7; every function broadcasts over numpy arrays.

    T_iter = k T_fwd(m) + (k - 1) T_bwd(m,l) + (T_bwd(m,l)^g + T_sync(a,l)^g)^(1/g)
    T_bwd(m,l)  = alpha_flop + (T_bwd(m,0) - alpha_flop) * theta_l^g_flop
    T_sync(a,l) = alpha_sync + (T_sync(a,0) - alpha_sync) * omega_l;    T_sync(1,l) = 0

The form with T(.,0) - alpha is the consistency decision: l = 0 gives back the full-layer profile, to the
last bit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from icefrog.estimate.sharing import SHARE_SLOWDOWN
from icefrog.profile import ComputeCurve, FloatArray, Profile, SyncCurve, ThroughputParams


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
    full = sync_s(params.sync, num_gpus, num_nodes)
    kept = np.asarray(omega, dtype=np.float64)
    return np.asarray(full * kept + np.minimum(params.sync_alpha_s, full) * (1.0 - kept))


def params_step_s(
    params: ThroughputParams,
    theta: npt.ArrayLike,
    omega: npt.ArrayLike,
    num_gpus: npt.ArrayLike,
    num_nodes: npt.ArrayLike,
    batch_per_gpu: npt.ArrayLike,
    accum_steps: npt.ArrayLike = 1,
) -> FloatArray:
    """T_iter (Eq. 5) from bare parameters, s; theta and omega are those of the depth in question."""
    micro = np.asarray(accum_steps, dtype=np.float64)
    wait = wait_factor(params, num_gpus)
    forward = compute_s(params.fwd, batch_per_gpu) * wait
    backward = backward_s(params, theta, batch_per_gpu) * wait
    sync = synchronise_s(params, omega, num_gpus, num_nodes)
    return np.asarray(micro * forward + (micro - 1.0) * backward + power_sum(backward, sync, params.overlap_gamma))


def step_s(
    profile: Profile,
    num_gpus: npt.ArrayLike,
    num_nodes: npt.ArrayLike,
    batch_per_gpu: npt.ArrayLike,
    frozen_layers: npt.ArrayLike = 0,
    accum_steps: npt.ArrayLike = 1,
) -> FloatArray:
    """Seconds of one optimiser step, T_iter(a, m, l) with k accumulation micro-steps (Eq. 5).

    Args:
        profile: of the job.
        num_gpus: a.
        num_nodes: nodes that the a GPUs spread over.
        batch_per_gpu: m, samples of one micro-step on one GPU.
        frozen_layers: l, integers in 0..L.
        accum_steps: k.

    Returns:
        Array of the broadcast shape (0-d for scalars: ``float(step_s(...))``).
    """
    depth = np.asarray(frozen_layers, dtype=np.intp)
    theta, omega = profile.theta[depth], profile.omega[depth]
    return params_step_s(profile.throughput, theta, omega, num_gpus, num_nodes, batch_per_gpu, accum_steps)


def throughput(
    profile: Profile,
    num_gpus: npt.ArrayLike,
    num_nodes: npt.ArrayLike,
    batch_per_gpu: npt.ArrayLike,
    frozen_layers: npt.ArrayLike = 0,
    accum_steps: npt.ArrayLike = 1,
    *,
    shared: bool = False,
) -> FloatArray:
    """T(a, s, m, l) = M / T_iter * lambda, samples/s (Eq. 4); arguments as :func:`step_s`, lambda = 0.9 when shared."""
    samples = np.asarray(num_gpus, dtype=np.float64) * np.asarray(batch_per_gpu) * np.asarray(accum_steps)
    speed = samples / step_s(profile, num_gpus, num_nodes, batch_per_gpu, frozen_layers, accum_steps)
    return np.asarray(speed * (SHARE_SLOWDOWN if shared else 1.0))
