"""Throughput and occupancy where nobody measured them: a roofline of stated figures. All of it is 'modelled'.

The machine is the paper's: A800-80GB (compute and memory of an A100), PCIe 3.0, one 200 Gb/s HDR link a node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

from icefrog.estimate.terms import compute_s
from icefrog.profile import ComputeCurve, FloatArray, OccupancyParams, Profile, Sharded, SyncCurve, ThroughputParams

PEAK_FLOPS = {"tf32": 156e12, "bf16": 312e12}  # NVIDIA A100 data sheet, dense
EFFICIENCY = {
    "tf32": 0.185,  # median of ResNet18, ResNet50, BERT, YOLOv3 on A100 (fitted_pollux.json): 0.21, 0.16, 0.24, 0.15
    "bf16": 0.40,  # LLaMA-65B: 380 tokens/s on an A100 = 0.47 (arXiv:2302.13971); less for the smaller matrices of 3B, 7B
}
LAUNCH_S = {  # host time of one convolution or matrix layer (forward, backward, update), where a step is launch-bound
    "tf32": 1.8e-3,  # median of the same four: 1.4, 1.9, 1.7, 2.5 ms
    "bf16": 0.3e-3,  # about 15 kernels of 10-20 us: large models run without the per-layer hooks of those files
}
HBM_BYTES_S = {"a100": 2039e9, "v100": 900e9}  # data sheets
HBM_EFFICIENCY = 0.8
PASSES_FWD, PASSES_BWD = 2.0, 4.0  # times that every saved activation crosses memory
LINK_BYTES_S = {"intra": 10e9, "inter": 10e9}  # ring over PCIe 3.0 x16 (15.8 GB/s raw); the HDR card hangs on one, too
RING_LATENCY_S = 20e-6  # of one collective, per parameter tensor group (layer)
SHARDED_VOLUME = 1.5  # two all-gathers and a reduce-scatter against one all-reduce
OVERLAP_GAMMA = 2.0
FLOP_GAMMA = (
    0.9  # backward falls less than its FLOPs: the paper's finding (Eq. 6), the figure is ours; one CPU thread: 0.95
)
FLOP_ALPHA_SHARE = 0.5  # half of backward's launch cost stays when layers are frozen
SYNC_ALPHA_SHARE = 0.05
CONTEXT_BYTES = 2.0e9  # CUDA context, libraries, cuDNN workspace, allocator slack: a round figure
BUSY_FLOOR = 0.25  # share of launch-bound time in which a kernel runs all the same
SHARDS = 4  # parameter state of LLaMA-class models is divided by the allocation unit


@dataclass(frozen=True, slots=True)
class Cost:
    """Sums over a model's layers, of one sample where it depends on samples."""

    flops: float
    param_bytes: float
    saved_bytes: float  # at the precision in use
    num_layers: int
    weighted_modules: int


def as_sharded(profile: Profile) -> Profile:
    """A sharded task with its traffic where it happens (Eq. 9, 10), of one that has it all in T_sync.

    Of the three parts of SHARDED_VOLUME one is the reduce-scatter of gradients; the other two gather parameters, beside the
    forward pass and beside the backward pass. The volumes are the same.
    """
    part = profile.throughput.sync.model_copy(update={name: time / 3 for name, time in profile.throughput.sync})
    alpha_s = profile.throughput.sync_alpha_s / 3
    params = profile.throughput.model_copy(update={"sync": part, "sync_alpha_s": alpha_s})
    parallel = Sharded(gather=part, gather_alpha_s=alpha_s, gather_gamma=OVERLAP_GAMMA)
    return profile.model_copy(update={"throughput": params, "parallel": parallel})


def with_freezing(params: ThroughputParams) -> ThroughputParams:
    """The same full-layer times, with the modelled effect of freezing (no public measurement has it)."""
    sync = params.sync
    present = [alpha for alpha in (sync.intra_alpha_s, sync.inter_alpha_s) if alpha > 0]
    return params.model_copy(
        update={
            "flop_gamma": FLOP_GAMMA,
            "flop_alpha_s": FLOP_ALPHA_SHARE * params.bwd.alpha_s,
            "sync_alpha_s": SYNC_ALPHA_SHARE * min(present, default=0.0),
        }
    )


def roofline(cost: Cost, precision: str, *, sharded: bool) -> ThroughputParams:
    """Compute from FLOPs or memory traffic, whichever takes longer, and the launch cost; synchronisation from bytes."""
    rate = PEAK_FLOPS[precision] * EFFICIENCY[precision]
    memory = HBM_BYTES_S["a100"] * HBM_EFFICIENCY
    launch_s = LAUNCH_S[precision] * cost.weighted_modules
    fwd_s = max(cost.flops / 3 / rate, PASSES_FWD * cost.saved_bytes / memory)
    bwd_s = max(cost.flops * 2 / 3 / rate, PASSES_BWD * cost.saved_bytes / memory)
    return _params(launch_s, fwd_s, bwd_s, cost, sharded=sharded)


def from_points(cost: Cost, points: Sequence[Sequence[float]], gpu: str) -> ThroughputParams:
    """A line through measured (local batch, step s) of another GPU type; the slope scaled by memory bandwidth."""
    slope, intercept = np.polyfit([p[0] for p in points], [p[1] for p in points], 1)
    per_sample_s = float(slope) * HBM_BYTES_S[gpu] / HBM_BYTES_S["a100"]
    return _params(float(intercept), per_sample_s / 3, per_sample_s * 2 / 3, cost, sharded=False)


def _params(launch_s: float, fwd_s: float, bwd_s: float, cost: Cost, *, sharded: bool) -> ThroughputParams:
    return with_freezing(
        ThroughputParams(
            fwd=ComputeCurve(alpha_s=launch_s / 3, beta_s=fwd_s),
            bwd=ComputeCurve(alpha_s=launch_s * 2 / 3, beta_s=bwd_s),
            sync=ring(cost.param_bytes * (SHARDED_VOLUME if sharded else 1.0), cost.num_layers),
            overlap_gamma=OVERLAP_GAMMA,
        )
    )


def compute_ratios(applications: Mapping[str, Any], gpu_type: str, other: str) -> tuple[float, float]:
    """Compute on one GPU type over that on another, (time of a step that no sample adds to, time a sample): the medians over
    the applications fitted on both."""
    fits = [(fit[gpu_type]["throughput"], fit[other]["throughput"]) for fit in applications.values()]

    def median(part: str) -> float:
        times = [tuple(fit["fwd"][part] + fit["bwd"][part] for fit in pair) for pair in fits]
        return float(np.median([one / base for one, base in times if base > 0]))

    return median("alpha_s"), median("beta_s")


def with_compute_scaled(params: ThroughputParams, alpha: float, beta: float) -> ThroughputParams:
    """Compute times scaled; synchronisation, which is the links' and not the GPU's, as it is."""

    def scaled(curve: ComputeCurve) -> ComputeCurve:
        return ComputeCurve(alpha_s=curve.alpha_s * alpha, beta_s=curve.beta_s * beta, smooth=curve.smooth)

    return with_freezing(params.model_copy(update={"fwd": scaled(params.fwd), "bwd": scaled(params.bwd)}))


def ring(num_bytes: float, num_layers: int) -> SyncCurve:
    """Ring all-reduce, 2 (a - 1) / a of the bytes per replica, as a line through a = 2 and a = 4 (16 across nodes)."""
    latency_s = RING_LATENCY_S * num_layers
    intra_s, inter_s = num_bytes / LINK_BYTES_S["intra"], num_bytes / LINK_BYTES_S["inter"]
    return SyncCurve(
        intra_alpha_s=intra_s + latency_s,
        intra_beta_s=intra_s * 0.5 / 2,
        inter_alpha_s=inter_s + latency_s,
        inter_beta_s=inter_s * 0.875 / 14,
    )


def occupancy(
    layers: Sequence[dict[str, Any]],
    params: ThroughputParams,
    batches: Sequence[int],
    *,
    dtype_bytes: int,
    optimizer_bytes: float,
    sharded: bool,
) -> OccupancyParams:
    """The two regressions, fitted to a grid of modelled points over local batch and frozen depth.

    Memory: context + weights + (gradients + optimizer state) of the unfrozen layers + activations saved for the backward
    pass of the unfrozen layers + the largest layer's of the forward pass. Utilisation: time in which kernels run over step
    time, on one GPU.
    """
    flops = np.array([layer["flops"] for layer in layers])
    weights = np.array([layer["param_bytes"] for layer in layers])
    saved = np.array([layer["saved_bytes"] for layer in layers]) * dtype_bytes / 4
    shards = SHARDS if sharded else 1
    state_per_weight = (dtype_bytes + optimizer_bytes) / dtype_bytes
    rows, mem_bytes, util_pct = [], [], []
    for depth in range(len(layers)):
        theta, omega = float(flops[depth:].sum() / flops.sum()), float(weights[depth:].sum() / weights.sum())
        fixed = CONTEXT_BYTES + (weights.sum() + weights[depth:].sum() * state_per_weight) / shards
        per_sample = saved[depth:].sum() + saved.max()
        rows += [(1.0, float(m), theta, omega) for m in batches]
        mem_bytes += [float(fixed + per_sample * m) for m in batches]
        util_pct += [_util_pct(params, m, theta) for m in batches]
    return OccupancyParams(
        mem_bytes=_regression(np.array(rows), np.array(mem_bytes)),
        util_pct=_regression(np.array(rows), np.array(util_pct)),
    )


def _regression(rows: FloatArray, values: FloatArray) -> tuple[float, float, float, float]:
    """Least squares with coefficients >= 0: nothing shrinks with the batch or with what is trained.

    Weighted between absolute and relative error: the regression has no term m * theta, so one of the two ends must give.
    """
    scale, weight = rows.max(axis=0), values**-0.5
    solution = nnls(rows / scale * weight[:, None], values * weight)[0] / scale
    first, second, third, fourth = (float(x) for x in solution)
    return first, second, third, fourth


def _util_pct(params: ThroughputParams, batch: int, theta: float) -> float:
    """Kernels fill the part of the step that grows with the batch, and BUSY_FLOOR of the rest."""
    busy_s = params.fwd.beta_s * batch + params.bwd.beta_s * batch * theta
    bwd_s = float(compute_s(params.bwd, batch))
    step_s = (
        float(compute_s(params.fwd, batch)) + params.flop_alpha_s + (bwd_s - params.flop_alpha_s) * theta**FLOP_GAMMA
    )
    share = min(busy_s / step_s, 1.0) if step_s > 0 else 1.0
    return 100.0 * (BUSY_FLOOR + (1.0 - BUSY_FLOOR) * share)
