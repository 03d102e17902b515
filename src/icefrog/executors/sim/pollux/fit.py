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
Row: TypeAlias = tuple[int, int, int, float, float]
"""(nodes, GPUs, local batch, logarithms of the compute time and of the step time in s)."""

_SMALLEST = 1e-8
_START = PerfParams(0.1, 0.01, 0.1, 0.01, 0.1, 0.01, 1.001)
_TOLERANCE = 1e-6  # of the loss: a millionth of a log error is nothing
_GAMMA_WEIGHT = 1e-3
_GROWTH_WEIGHT = 1e-2
UNSEEN_NODE_OVER_LOCAL = 1.1


def fit_params(seen: Mapping[Where, Times], start: PerfParams | None = None, *, only_there: bool = False) -> PerfParams:
    """Minimise :func:`loss` (L-BFGS-B; times by their logarithms, growths as ratios, so that all are of one size).

    What the steps cannot tell is fixed: with a single local batch the constant of the compute time is half its mean; local
    (node) terms stay negligible until several GPUs of one node (of several nodes) were seen, then node terms at 1.1 x local;
    growth with the GPUs stays negligible until more than two were seen.

    Args:
        seen: measured steps, at least one.
        start: an earlier fit, where a second search begins: the loss has more than one valley.
        only_there: search there alone: little is new.
    """
    compute_s = [step_s - sync_s for step_s, sync_s in seen.values()]
    rows = [log_row(where, times) for where, times in seen.items()]
    several = any(gpus > 2 for _, gpus, _ in seen)
    nodes, local = any(n > 1 for n, _, _ in seen), any(n == 1 and gpus > 1 for n, gpus, _ in seen)
    free = [len({m for _, _, m in seen}) > 1, True, nodes, nodes and several, local, local and several, True]
    tries: list[tuple[float, list[float]]] = []
    starts = (_START,) if start is None else (start,) if only_there else (start, _START)
    for first in starts:
        vector = [first.alpha_c, first.beta_c]
        vector += _sync_start(first.alpha_node, first.beta_node, nodes, several)
        vector += _sync_start(first.alpha_local, first.beta_local, local, several)
        vector.append(first.gamma)
        if not free[0]:
            vector[0] = sum(compute_s) / len(compute_s) / 2.0
        tries.append(_descend(vector, rows, [index for index in range(7) if free[index]]))
    found = min(tries, key=lambda one: one[0])[1]
    if not nodes:
        found[2] = max(found[2], UNSEEN_NODE_OVER_LOCAL * found[4])
        found[3] = max(found[3], UNSEEN_NODE_OVER_LOCAL * found[5])
    return PerfParams(*found)


def log_row(where: Where, times: Times) -> Row:
    """A measured step as :func:`loss` wants it."""
    step_s, sync_s = times
    return (*where, math.log(step_s - sync_s), math.log(step_s))


def _sync_start(alpha: float, beta: float, known: bool, several: bool) -> list[float]:
    """Where the search for one pair of synchronisation terms begins; negligible where nothing tells them."""
    if not known:
        return [_SMALLEST, _SMALLEST]
    alpha = alpha if alpha > 1e-5 else _START.alpha_node
    return [alpha, min(max(beta, 1e-3 * alpha), alpha) if several else _SMALLEST]


_RATIOS = {3: 2, 5: 4}  # growth -> its constant: searched as a ratio
_BOUNDS = {3: (0.0, None), 5: (0.0, None), 6: (1.0, 10.0)}  # of the searched value; others: any logarithm


def _descend(vector: list[float], rows: Sequence[Row], free: Sequence[int]) -> tuple[float, list[float]]:
    """One local minimum: (loss, vector)."""
    vector = list(vector)

    def put(part: FloatArray) -> None:
        for index, value in zip(free, part.tolist(), strict=True):
            if index not in _RATIOS:
                vector[index] = value if index == 6 else math.exp(value)
        for index, value in zip(free, part.tolist(), strict=True):
            if index in _RATIOS:
                vector[index] = max(value * vector[_RATIOS[index]], _SMALLEST)

    def objective(part: FloatArray) -> tuple[float, FloatArray]:
        put(part)
        value, slope = loss(vector, rows)
        for growth, constant in _RATIOS.items():
            if growth in free:  # the constant moves the growth with it
                slope[constant] += slope[growth] * vector[growth] / vector[constant]
        scale = [vector[_RATIOS[i]] if i in _RATIOS else 1.0 if i == 6 else vector[i] for i in free]
        return value, np.array([slope[index] * factor for index, factor in zip(free, scale, strict=True)])

    start = [
        vector[i] / vector[_RATIOS[i]] if i in _RATIOS else vector[i] if i == 6 else math.log(vector[i]) for i in free
    ]
    bounds = [_BOUNDS.get(index, (math.log(_SMALLEST), math.log(1e4))) for index in free]
    found = minimize(
        objective, np.array(start), jac=True, method="L-BFGS-B", bounds=bounds, options={"ftol": _TOLERANCE}
    )
    put(found.x)
    return float(found.fun), vector


def loss(vector: Sequence[float], rows: Sequence[Row]) -> tuple[float, list[float]]:
    """The loss and its gradient.

    Root mean square of the log error of the compute time, plus that of the step time, plus 1e-3 (gamma - 1)^2, plus
    1e-2 [(beta_node / alpha_node)^2 + (beta_local / alpha_local)^2]. Plain floats: a job has seen a handful of points.

    Args:
        vector: in the order of :class:`PerfParams`.
        rows: what was measured.
    """
    alpha_c, beta_c, alpha_n, beta_n, alpha_l, beta_l, gamma = vector
    square_c = square_t = 0.0
    slope_c = [0.0, 0.0]
    slope_t = [0.0] * 7
    for nodes, gpus, m, log_compute_s, log_step_s in rows:
        compute = alpha_c + beta_c * m
        log_compute = math.log(compute)
        error_c = log_compute - log_compute_s
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
        error_t = log_sum / gamma - log_step_s
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
