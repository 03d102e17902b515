"""The job's own fit of Pollux's throughput model to the steps it has measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from scipy.optimize import minimize

from icefrog.executors.sim.pollux.goodput import PerfParams
from icefrog.executors.sim.pollux.measurements import Times
from icefrog.profile import FloatArray

Where: TypeAlias = tuple[int, int, int]
"""(nodes, GPUs, local batch)."""

_SMALLEST = 1e-8
_START = (0.1, 0.01, 0.1, 0.01, 0.1, 0.01, 1.001)
_LOWER = (*(_SMALLEST,) * 6, 1.0)
_UPPER = (*(math.inf,) * 6, 10.0)
_TOLERANCE = 1e-6  # of the loss: a millionth of a log error is nothing
_GAMMA_WEIGHT = 1e-3
_GROWTH_WEIGHT = 1e-2
UNSEEN_NODE_OVER_LOCAL = 1.1


def fit_params(seen: Mapping[Where, Times], start: PerfParams | None = None) -> PerfParams:
    """Minimise :func:`loss` within bounds (L-BFGS-B).

    What the steps cannot tell is fixed: with a single local batch the constant of the compute time is half its mean; local
    (node) terms stay negligible until several GPUs of one node (of several nodes) were seen, then node terms at 1.1 x local;
    growth with the GPUs stays negligible until more than two were seen.

    Args:
        seen: measured steps, at least one.
        start: an earlier fit, where the search begins.
    """
    rows = [(*where, times[0] - times[1], times[0]) for where, times in seen.items()]
    vector = list(_START) if start is None else _vector(start)
    lower, upper = list(_LOWER), list(_UPPER)
    if len({m for _, _, m in seen}) == 1:
        lower[0] = upper[0] = sum(row[3] for row in rows) / len(rows) / 2.0
    several = any(gpus > 2 for _, gpus, _ in seen)
    nodes, local = any(n > 1 for n, _, _ in seen), any(n == 1 and gpus > 1 for n, gpus, _ in seen)
    for index, known in ((2, nodes), (3, nodes and several), (4, local), (5, local and several)):
        if not known:
            upper[index] = lower[index]
        elif start is not None and vector[index] <= 2 * _SMALLEST:
            vector[index] = _START[index]  # newly free
    free = [index for index in range(7) if lower[index] < upper[index]]
    vector = [min(max(value, low), high) for value, low, high in zip(vector, lower, upper, strict=True)]

    def objective(part: FloatArray) -> tuple[float, FloatArray]:
        for index, value in zip(free, part.tolist(), strict=True):
            vector[index] = value
        value, slope = loss(vector, rows)
        return value, np.array([slope[index] for index in free])

    found = minimize(
        objective,
        np.array([vector[index] for index in free]),
        jac=True,
        method="L-BFGS-B",
        bounds=[(lower[index], upper[index]) for index in free],
        options={"ftol": _TOLERANCE},
    )
    for index, value in zip(free, found.x.tolist(), strict=True):
        vector[index] = value
    if not nodes:
        vector[2] = max(vector[2], UNSEEN_NODE_OVER_LOCAL * vector[4])
        vector[3] = max(vector[3], UNSEEN_NODE_OVER_LOCAL * vector[5])
    return PerfParams(*vector)


def loss(vector: Sequence[float], rows: Sequence[tuple[int, int, int, float, float]]) -> tuple[float, list[float]]:
    """The loss and its gradient.

    Root mean square of the log error of the compute time, plus that of the step time, plus 1e-3 (gamma - 1)^2, plus
    1e-2 [(beta_node / alpha_node)^2 + (beta_local / alpha_local)^2]. Plain floats: a job has seen a handful of points.

    Args:
        vector: in the order of :class:`PerfParams`.
        rows: (nodes, GPUs, local batch, compute time, step time).
    """
    alpha_c, beta_c, alpha_n, beta_n, alpha_l, beta_l, gamma = vector
    square_c = square_t = 0.0
    slope_c = [0.0, 0.0]
    slope_t = [0.0] * 7
    for nodes, gpus, m, compute_s, step_s in rows:
        compute = alpha_c + beta_c * m
        log_compute = math.log(compute)
        error_c = log_compute - math.log(compute_s)
        square_c += error_c * error_c
        slope_c[0] += error_c / compute
        slope_c[1] += error_c * m / compute
        extra = gpus - 2 if gpus > 2 else _SMALLEST
        sync = alpha_n + beta_n * extra if nodes > 1 else alpha_l + beta_l * extra if gpus > 1 else _SMALLEST
        log_sync = math.log(sync)
        # log(compute^gamma + sync^gamma) / gamma, and the part of compute in the sum
        high, low = (log_compute, log_sync) if log_compute > log_sync else (log_sync, log_compute)
        ratio = math.exp(gamma * (low - high))
        log_sum = gamma * high + math.log1p(ratio)
        share = (1.0 if log_compute > log_sync else ratio) / (1.0 + ratio)
        error_t = log_sum / gamma - math.log(step_s)
        square_t += error_t * error_t
        slope_t[0] += error_t * share / compute
        slope_t[1] += error_t * share * m / compute
        if gpus > 1:
            at = 2 if nodes > 1 else 4
            part = error_t * (1.0 - share) / sync
            slope_t[at] += part
            slope_t[at + 1] += part * extra
        slope_t[6] += error_t * ((share * log_compute + (1.0 - share) * log_sync) - log_sum / gamma) / gamma
    num = len(rows)
    rms_c, rms_t = math.sqrt(square_c / num), math.sqrt(square_t / num)
    ratio_n, ratio_l = beta_n / alpha_n, beta_l / alpha_l
    value = rms_c + rms_t + _GAMMA_WEIGHT * (gamma - 1.0) ** 2 + _GROWTH_WEIGHT * (ratio_n**2 + ratio_l**2)
    by_c, by_t = 1.0 / (num * max(rms_c, 1e-12)), 1.0 / (num * max(rms_t, 1e-12))
    slope = [part * by_t for part in slope_t]
    slope[0] += slope_c[0] * by_c
    slope[1] += slope_c[1] * by_c
    slope[2] -= 2.0 * _GROWTH_WEIGHT * ratio_n**2 / alpha_n
    slope[3] += 2.0 * _GROWTH_WEIGHT * ratio_n / alpha_n
    slope[4] -= 2.0 * _GROWTH_WEIGHT * ratio_l**2 / alpha_l
    slope[5] += 2.0 * _GROWTH_WEIGHT * ratio_l / alpha_l
    slope[6] += 2.0 * _GAMMA_WEIGHT * (gamma - 1.0)
    return value, slope


def _vector(params: PerfParams) -> list[float]:
    return [
        params.alpha_c,
        params.beta_c,
        params.alpha_node,
        params.beta_node,
        params.alpha_local,
        params.beta_local,
        params.gamma,
    ]
