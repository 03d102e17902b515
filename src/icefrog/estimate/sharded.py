"""Step time of sharded data parallelism (FSDP, ZeRO-3), Eq. 9 and 10; broadcasts over numpy arrays.

    T_bwd(a,m,l) = (T_grad(m,l)^g_lm + T_para(a,l)^g_lm)^(1/g_lm)
    T_para(a,l)  = alpha_para + (T_para(a,0) - alpha_para) * omega_l;    T_para(1,l) = 0

T_grad is Eq. 6. T_iter is Eq. 5 with this T_bwd, and T_sync is the reduce-scatter of gradients (Eq. 7). The forward
all-gather overlaps with forward compute in the same way; freezing does not reduce it, since a frozen layer still runs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from icefrog.estimate.terms import (
    backward_s,
    compute_s,
    power_sum,
    sync_s,
    synchronise_s,
    unfrozen_part,
    wait_factor,
)
from icefrog.profile import FloatArray, Sharded, ThroughputParams


def sharded_step_s(
    params: ThroughputParams,
    sharded: Sharded,
    theta: npt.ArrayLike,
    omega: npt.ArrayLike,
    num_gpus: npt.ArrayLike,
    num_nodes: npt.ArrayLike,
    batch_per_gpu: npt.ArrayLike,
    accum_steps: npt.ArrayLike = 1,
) -> FloatArray:
    """T_iter from bare parameters, s; arguments as :func:`icefrog.estimate.throughput.params_step_s`.

    Every micro-step gathers the parameters anew; gradients are reduced at the last one.
    """
    micro = np.asarray(accum_steps, dtype=np.float64)
    wait = wait_factor(params, num_gpus)
    forward = sharded_forward_s(params, sharded, num_gpus, num_nodes, batch_per_gpu)
    gather = unfrozen_part(sync_s(sharded.gather, num_gpus, num_nodes), sharded.gather_alpha_s, omega)
    backward = power_sum(backward_s(params, theta, batch_per_gpu) * wait, gather, sharded.gather_gamma)
    sync = synchronise_s(params, omega, num_gpus, num_nodes)
    return np.asarray(micro * forward + (micro - 1.0) * backward + power_sum(backward, sync, params.overlap_gamma))


def sharded_forward_s(
    params: ThroughputParams,
    sharded: Sharded,
    num_gpus: npt.ArrayLike,
    num_nodes: npt.ArrayLike,
    batch_per_gpu: npt.ArrayLike,
) -> FloatArray:
    """Forward of one micro-step, s: compute, and the gather of all layers beside it."""
    compute = compute_s(params.fwd, batch_per_gpu) * wait_factor(params, num_gpus)
    return power_sum(compute, sync_s(sharded.gather, num_gpus, num_nodes), sharded.gather_gamma)
