"""Step time of a pipeline (Eq. 11, 12) and of replicas of one (hybrid, Eq. 13); broadcasts over numpy arrays.

Of a GPUs, d = a / p replicas have p stages each (pure pipeline: d = 1, p = a). With F(l, j) the frozen layers of stage j,

    once  = sum_j T_fwd_j + T_act_j + sum_j T_bwd_j(F(l,j)) + T_grad_j
    T_iter = k (sum_j (T_fwd_j + T_act_j) + (mu - 1) max_j (T_fwd_j + T_act_j + T_bwd_j + T_grad_j))
             + (k - 1) B + (B^g + T_sync^g)^(1/g),     B = sum_j (T_bwd_j + T_grad_j)
    T_sync(p,d,l) = sum_j T_sync_j(d, F(l,j))

mu micro-batches pass through the stages; the paper has mu = 1, where T_iter is the sum over the stages. A stage has its part
of the network's launch cost by layers, of its compute by FLOPs, and of its gradients by parameter bytes. Inside a stage
freezing acts as in Eq. 6 and 7; a stage that is frozen whole runs no backward pass and synchronises nothing. Stage j sends a
gradient to stage j - 1 only if a layer before stage j trains. With one stage all of it is the model of plain replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from icefrog.estimate.stages import balanced_split
from icefrog.estimate.terms import power_sum, sync_s, wait_factor
from icefrog.profile import FloatArray, Link, Pipelined, Profile


@dataclass(frozen=True, slots=True)
class Stages:
    """A split into p stages, as shares. Rows of the two-dimensional ones: l = 0..L; columns: stages."""

    launches: FloatArray  # (p,) layers of the stage over all
    flops: FloatArray  # (p,) FLOPs of the stage over all
    param_bytes: FloatArray  # (p,)
    theta: FloatArray  # (L + 1, p) unfrozen FLOPs of the stage over the stage's
    omega: FloatArray  # (L + 1, p) the same of parameter bytes
    trains: FloatArray  # (L + 1, p) 1 where a layer of the stage is not frozen, else 0
    sent_bytes: FloatArray  # (p,) output of a stage for one sample; 0 for the last
    returned_bytes: FloatArray  # (p,) gradient that a stage sends back for one sample; 0 for the first
    returns: FloatArray  # (L + 1, p) 1 where the stage sends a gradient back

    @classmethod
    def of(cls, profile: Profile, layer_counts: tuple[int, ...]) -> Stages:
        """Of so many layers a stage, in forward order."""
        num_layers, num_stages = profile.num_layers, len(layer_counts)
        starts = np.concatenate(([0], np.cumsum(layer_counts)[:-1]))
        stage_of = np.repeat(np.arange(num_stages), layer_counts)
        member = (stage_of[:, None] == np.arange(num_stages)).astype(np.float64)  # (L, p)
        unfrozen = (np.arange(num_layers) >= np.arange(num_layers + 1)[:, None]).astype(np.float64)  # (L + 1, L)
        flops = np.array([layer.flops for layer in profile.layers])
        flops = flops if flops.any() else np.ones(num_layers)
        sizes = np.array([layer.param_bytes for layer in profile.layers])
        outputs = np.array([layer.activation_bytes for layer in profile.layers])
        sent = np.append(outputs[starts[1:] - 1], 0.0)
        boundaries = np.arange(num_layers + 1)[:, None]
        return cls(
            launches=np.asarray(layer_counts) / num_layers,
            flops=member.T @ flops / flops.sum(),
            param_bytes=member.T @ sizes / sizes.sum(),
            theta=_share(unfrozen @ (member * flops[:, None])),
            omega=_share(unfrozen @ (member * sizes[:, None])),
            trains=(boundaries < starts + np.asarray(layer_counts)).astype(np.float64),
            sent_bytes=sent,
            returned_bytes=np.concatenate(([0.0], sent[:-1])),
            returns=(boundaries < starts).astype(np.float64),
        )


def stages_of(profile: Profile, num_stages: int) -> Stages:
    """The split of a profile into so many stages; kept with the profile, which never changes."""
    key = ("stages", num_stages)
    known = profile.memo.get(key)
    if not isinstance(known, Stages):
        given = profile.parallel.stage_layers if isinstance(profile.parallel, Pipelined) else None
        if given is None or len(given) != num_stages:
            given = balanced_split([layer.flops for layer in profile.layers], num_stages)
        known = profile.memo[key] = Stages.of(profile, given)
    return known


def replicas_of(profile: Profile, num_gpus: int) -> int:
    """d: how many parts of a batch are worked on side by side on so many GPUs, each by a whole network."""
    pipelined = profile.parallel
    if not isinstance(pipelined, Pipelined):
        return num_gpus
    return 1 if pipelined.num_stages is None else num_gpus // _num_stages(profile, pipelined, num_gpus)


def _num_stages(profile: Profile, pipelined: Pipelined, num_gpus: int) -> int:
    most = min(num_gpus, profile.num_layers)
    return most if pipelined.num_stages is None else min(pipelined.num_stages, most)


def pipeline_step_s(
    profile: Profile,
    pipelined: Pipelined,
    num_gpus: npt.ArrayLike,
    num_nodes: npt.ArrayLike,
    batch_per_gpu: npt.ArrayLike,
    frozen_layers: npt.ArrayLike = 0,
    accum_steps: npt.ArrayLike = 1,
) -> FloatArray:
    """T_iter, s; arguments as :func:`icefrog.estimate.throughput.step_s`.

    A replica gets a m / d samples in each of the k accumulation micro-steps. GPUs beyond d p are idle; a pipeline has no
    more stages than layers.
    """
    given = (num_gpus, num_nodes, batch_per_gpu, frozen_layers, accum_steps)
    gpus, nodes, batch, depth, micro = np.broadcast_arrays(*given)
    found = np.empty(gpus.shape)
    for count in np.unique(gpus):
        here = gpus == count
        stages = stages_of(profile, _num_stages(profile, pipelined, int(count)))
        at = (int(count), replicas_of(profile, int(count)), nodes[here], batch[here], depth[here], micro[here])
        found[here] = _steps(profile, pipelined, stages, *at)
    return found


def _steps(
    profile: Profile,
    pipelined: Pipelined,
    at: Stages,
    num_gpus: int,
    replicas: int,
    nodes: npt.NDArray[np.int_],
    batch_per_gpu: npt.NDArray[np.int_],
    depth: npt.NDArray[np.intp],
    accum_steps: npt.NDArray[np.int_],
) -> FloatArray:
    """Of N configurations with the same GPU count; all arrays of shape (N,)."""
    params, passes, micro = profile.throughput, pipelined.micro_batches, accum_steps.astype(np.float64)
    wait = wait_factor(params, replicas)
    samples = (num_gpus * batch_per_gpu.astype(np.float64) / (replicas * passes))[:, None]  # of one micro-batch
    trains, returns = at.trains[depth], at.returns[depth]
    fwd = wait * power_sum(params.fwd.alpha_s * at.launches, params.fwd.beta_s * at.flops * samples, params.fwd.smooth)
    full = power_sum(params.bwd.alpha_s * at.launches, params.bwd.beta_s * at.flops * samples, params.bwd.smooth)
    fixed = min(params.flop_alpha_s, params.bwd.alpha_s) * at.launches
    bwd = wait * trains * (fixed + (full - fixed) * at.theta[depth] ** params.flop_gamma)
    spans_nodes = (nodes > 1) & (len(at.launches) * nodes > num_gpus)  # else a pipeline lies within a node
    link = _send_s(pipelined.link, spans_nodes[:, None])
    act = np.where(np.arange(len(at.launches)) < len(at.launches) - 1, link[0] + link[1] * at.sent_bytes * samples, 0.0)
    grad = returns * (link[0] + link[1] * at.returned_bytes * samples)
    forward, backward = (fwd + act).sum(axis=1), (bwd + grad).sum(axis=1)
    slowest = (fwd + act + bwd + grad).max(axis=1)
    full_sync = sync_s(params.sync, replicas, nodes)[:, None] * at.param_bytes
    kept = at.omega[depth]
    least = np.minimum(params.sync_alpha_s * at.param_bytes, full_sync)
    sync = (trains * (full_sync * kept + least * (1.0 - kept))).sum(axis=1)
    last = power_sum(backward, sync, params.overlap_gamma)
    return np.asarray(micro * (forward + (passes - 1) * slowest) + (micro - 1.0) * backward + last)


def _send_s(link: Link, between_nodes: npt.NDArray[np.bool_]) -> tuple[FloatArray, FloatArray]:
    """(seconds a message, seconds a byte)."""
    return (
        np.where(between_nodes, link.inter_alpha_s, link.intra_alpha_s),
        np.where(between_nodes, link.inter_s_per_byte, link.intra_s_per_byte),
    )


def _share(unfrozen: FloatArray) -> FloatArray:
    """Rows over the first row; 0 where that is 0."""
    share: FloatArray = np.divide(unfrozen, unfrozen[0], out=np.zeros_like(unfrozen), where=unfrozen[0] > 0)
    return share
