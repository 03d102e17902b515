"""Layer-aware throughput, Eq. 4; every function broadcasts over numpy arrays.

Replicated data parallelism (DDP, Eq. 5-7) is priced here; what a profile says of other kinds (``Profile.parallel``) by
:mod:`icefrog.estimate.sharded` and :mod:`icefrog.estimate.pipeline`:

    T_iter = k T_fwd(m) + (k - 1) T_bwd(m,l) + (T_bwd(m,l)^g + T_sync(a,l)^g)^(1/g)
    T_bwd(m,l)  = alpha_flop + (T_bwd(m,0) - alpha_flop) * theta_l^g_flop
    T_sync(a,l) = alpha_sync + (T_sync(a,0) - alpha_sync) * omega_l;    T_sync(1,l) = 0

The form with T(.,0) - alpha is the consistency decision: l = 0 gives back the full-layer profile, to the
last bit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from icefrog.estimate.pipeline import pipeline_step_s
from icefrog.estimate.sharded import sharded_step_s
from icefrog.estimate.sharing import SHARE_SLOWDOWN
from icefrog.estimate.terms import backward_s, compute_s, power_sum, synchronise_s, wait_factor
from icefrog.profile import FloatArray, Pipelined, Profile, Sharded, ThroughputParams


def params_step_s(
    params: ThroughputParams,
    theta: npt.ArrayLike,
    omega: npt.ArrayLike,
    num_gpus: npt.ArrayLike,
    num_nodes: npt.ArrayLike,
    batch_per_gpu: npt.ArrayLike,
    accum_steps: npt.ArrayLike = 1,
) -> FloatArray:
    """T_iter of replicas (Eq. 5) from bare parameters, s; theta and omega are those of the depth in question."""
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
    """Seconds of one optimiser step, T_iter(a, m, l) with k accumulation micro-steps, as the job is parallelised.

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
    parallel = profile.parallel
    if isinstance(parallel, Pipelined):
        return pipeline_step_s(profile, parallel, num_gpus, num_nodes, batch_per_gpu, frozen_layers, accum_steps)
    depth = np.asarray(frozen_layers, dtype=np.intp)
    theta, omega = profile.theta[depth], profile.omega[depth]
    at = (theta, omega, num_gpus, num_nodes, batch_per_gpu, accum_steps)
    if isinstance(parallel, Sharded):
        return sharded_step_s(profile.throughput, parallel, *at)
    return params_step_s(profile.throughput, *at)


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
