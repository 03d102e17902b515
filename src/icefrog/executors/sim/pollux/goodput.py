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

from icefrog.profile import ComputeCurve, FloatArray, SyncCurve, ThroughputParams

NOISY = 1e12
"""var / |G|^2 where the gradient is nothing but noise."""
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

    @classmethod
    def of(cls, params: ThroughputParams) -> PerfParams:
        """Back from :meth:`throughput_params`."""
        sync = params.sync
        return cls(
            params.bwd.alpha_s,
            params.bwd.beta_s,
            sync.inter_alpha_s,
            sync.inter_beta_s,
            sync.intra_alpha_s,
            sync.intra_beta_s,
            params.overlap_gamma,
        )

    def sync_s(self, num_nodes: int, num_gpus: int) -> float:
        """T_sync, s."""
        if num_gpus == 1:
            return 0.0
        extra = max(num_gpus - 2, 0)
        return self.alpha_node + self.beta_node * extra if num_nodes > 1 else self.alpha_local + self.beta_local * extra


@dataclass(frozen=True, slots=True)
class BatchGrid:
    """The batches that a job may run at some GPU counts, arrays of shape (counts, NUM_BATCHES)."""

    local: FloatArray  # samples of a micro-step on one GPU
    accum: FloatArray  # micro-steps before the one that synchronises
    scale: FloatArray  # global batch / initial batch; 0 where the local batch is not allowed

    @classmethod
    def of(cls, limits: Limits, num_gpus: Sequence[int]) -> BatchGrid:
        """Global batches at geometric distances, from the initial one (or the smallest on each GPU) to the largest."""
        gpus = np.asarray(num_gpus, dtype=np.float64)[:, None]
        first = np.maximum(limits.init_batch, limits.min_local * gpus)
        ratio = np.maximum(limits.max_batch / first, 1.0)
        per_gpu = first * ratio ** (np.arange(NUM_BATCHES) / (NUM_BATCHES - 1)) / gpus
        accum = np.ceil(per_gpu / limits.max_local - _ROUNDING) - 1.0
        accum = np.where(
            (gpus == 1) & (per_gpu > limits.init_batch + _ROUNDING), np.maximum(accum, 1.0), np.maximum(accum, 0.0)
        )
        local = np.ceil(per_gpu / (accum + 1.0) - _ROUNDING)
        local = np.maximum(np.minimum(local, limits.max_batch // (gpus * (accum + 1.0))), 1.0)
        allowed = (local >= limits.min_local) & (local <= limits.max_local)
        return cls(local, accum, np.where(allowed, gpus * local * (accum + 1.0) / limits.init_batch, 0.0))


@dataclass(frozen=True, slots=True)
class Best:
    """The best batch of one GPU count."""

    goodput: float  # useful steps of the initial batch a second; 0: no batch is allowed
    step_s: float
    batch_per_gpu: int
    accum_steps: int  # micro-steps before the one that synchronises


def best_batches(
    params: PerfParams, noise: float, grid: BatchGrid, num_nodes: Sequence[int], num_gpus: Sequence[int]
) -> list[Best]:
    """The batch of the best goodput for every GPU count of the grid.

    Args:
        params: of the throughput.
        noise: var / |G|^2 at the initial batch.
        grid: what may be run.
        num_nodes: over how many nodes each count spreads.
        num_gpus: the counts of the grid.
    """
    sync = np.array([[params.sync_s(n, a)] for n, a in zip(num_nodes, num_gpus, strict=True)])
    compute = params.alpha_c + params.beta_c * grid.local
    if params.gamma == 1.0:
        overlapped = compute + sync
    else:
        high, low = np.maximum(compute, sync), np.minimum(compute, sync)
        overlapped = high * (1.0 + (low / high) ** params.gamma) ** (1.0 / params.gamma)
    step_s = overlapped + grid.accum * compute
    # GOODPUT / M0 = (noise + 1) / (noise / scale + 1) / step = (noise + 1) x scale / ((noise + scale) x step)
    goodput = (noise + 1.0) * grid.scale / ((noise + grid.scale) * step_s)
    return [
        Best(float(goodput[row, at]), float(step_s[row, at]), int(grid.local[row, at]), int(grid.accum[row, at]))
        for row, at in enumerate(goodput.argmax(axis=1).tolist())
    ]
