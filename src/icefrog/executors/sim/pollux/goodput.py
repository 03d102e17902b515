"""Pollux's model of one job (OSDI'21, Eq. 6-12): step time, statistical efficiency, and the batch with the best goodput.

T_grad = alpha_c + beta_c m         T_sync = alpha + beta max(a - 2, 0), its own alpha and beta on one node and on several
T_iter = k T_grad + (T_grad^gamma + T_sync^gamma)^(1/gamma)        (k micro-steps before the one that synchronises)
EFFICIENCY(M) = (phi + M0) / (phi + M),  phi = M0 var / |G|^2;      GOODPUT = M / T_iter x EFFICIENCY
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from icefrog.estimate.throughput import params_step_s
from icefrog.profile import ComputeCurve, FloatArray, SyncCurve, ThroughputParams

IntArray = npt.NDArray[np.int64]

NUM_BATCHES = 50
"""Global batches tried, at geometric distances."""
_ROUNDING = 1e-8


class Limits(Protocol):
    """What bounds a job's batch, samples."""

    @property
    def init_batch(self) -> int:
        """Global batch at the start, M0."""
        ...

    @property
    def max_batch(self) -> int:
        """Largest global batch."""
        ...

    @property
    def min_local(self) -> int:
        """Smallest batch of a GPU."""
        ...

    @property
    def max_local(self) -> int:
        """Largest batch of a GPU."""
        ...


@dataclass(frozen=True, slots=True)
class PerfParams:
    """The seven throughput parameters; times in s."""

    alpha_c: float
    beta_c: float
    alpha_node: float
    beta_node: float
    alpha_local: float
    beta_local: float
    gamma: float

    def throughput_params(self) -> ThroughputParams:
        """The same in the layer-aware model: all compute overlaps as the backward pass does there."""
        return ThroughputParams(
            fwd=ComputeCurve(alpha_s=0.0, beta_s=0.0),
            bwd=ComputeCurve(alpha_s=self.alpha_c, beta_s=self.beta_c),
            sync=SyncCurve(
                intra_alpha_s=self.alpha_local,
                intra_beta_s=self.beta_local,
                inter_alpha_s=self.alpha_node,
                inter_beta_s=self.beta_node,
            ),
            overlap_gamma=self.gamma,
        )


@dataclass(frozen=True, slots=True)
class Best:
    """The best batch for each of several allocations, arrays of shape (n,)."""

    goodput: FloatArray  # useful samples/s, counted as those of the initial batch
    step_s: FloatArray
    batch_per_gpu: IntArray
    accum_steps: IntArray  # micro-steps before the one that synchronises


def best_batches(
    params: ThroughputParams,
    noise: float,
    limits: Limits,
    num_nodes: Sequence[int] | IntArray,
    num_gpus: Sequence[int] | IntArray,
) -> Best:
    """The global batch of the best goodput, for every (nodes, GPUs).

    Args:
        params: of the throughput.
        noise: var / |G|^2 at the initial batch.
        limits: of the batch.
        num_nodes: shape (n,).
        num_gpus: shape (n,).
    """
    gpus = np.asarray(num_gpus, dtype=np.int64)[:, None]
    nodes = np.asarray(num_nodes, dtype=np.int64)[:, None]
    first = np.maximum(limits.init_batch, limits.min_local * gpus).astype(np.float64)
    ratio = np.maximum(limits.max_batch / first, 1.0)
    per_gpu = first * ratio ** (np.arange(NUM_BATCHES) / (NUM_BATCHES - 1)) / gpus
    accum = np.ceil(per_gpu / limits.max_local - _ROUNDING) - 1.0
    accum = np.where((gpus == 1) & (per_gpu > limits.init_batch + _ROUNDING), np.maximum(accum, 1.0), accum)
    local = np.ceil(per_gpu / (accum + 1.0) - _ROUNDING)
    local = np.maximum(np.minimum(local, limits.max_batch // (gpus * (accum + 1.0))), 1.0)
    step_s = params_step_s(params, 1.0, 1.0, gpus, nodes, local, accum + 1.0)
    scale = gpus * local * (accum + 1.0) / limits.init_batch
    goodput = limits.init_batch * (noise + 1.0) / (noise / scale + 1.0) / step_s
    goodput = np.where((local >= limits.min_local) & (local <= limits.max_local), goodput, 0.0)
    at = np.arange(len(goodput)), goodput.argmax(axis=1)
    return Best(
        goodput[at], np.broadcast_to(step_s, goodput.shape)[at], local[at].astype(np.int64), accum[at].astype(np.int64)
    )
