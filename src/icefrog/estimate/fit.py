"""Fitting the throughput parameters (Eq. 14) to measured steps: deterministic, robust, with an error on unseen points.

Least squares on the *log* error of the step time (a step of 5 ms counts as much as one of 5 s) under a soft-L1 loss
(one disturbed measurement must not bend the curve), with a weak pull towards the start. Only what the points can tell is
free: a term whose regime was never measured keeps its prior.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from icefrog.estimate.fit_vector import (
    ABSENT,
    INDEX,
    PULL,
    Columns,
    ThroughputPoint,
    decode,
    descend,
    encode,
    free_entries,
    restarts,
    rough_start,
    with_unseen,
)
from icefrog.estimate.terms import compute_s, wait_factor
from icefrog.estimate.throughput import params_step_s
from icefrog.profile import FloatArray, ThroughputParams

HOLD_OUT_EVERY = 5
NOT_FITTED = ("smooth",)
"""A flat start of compute beat the affine curve on no application's unseen points: see the evidence."""


@dataclass(frozen=True, slots=True)
class FitError:
    """Relative errors |predicted / measured - 1| of the step time."""

    num_points: int
    median: float
    p90: float
    largest: float
    largest_at: ThroughputPoint


@dataclass(frozen=True, slots=True)
class FitResult:
    """The parameters, and how far off they are on the points fitted and on points not seen."""

    params: ThroughputParams
    seen: FitError
    unseen: FitError | None  # of a fit without every fifth point; None with fewer than ten points


def predict_s(params: ThroughputParams, points: Sequence[ThroughputPoint]) -> FloatArray:
    """Step times that the parameters give for the points, shape (N,)."""
    return _predict(params, Columns.of(points))


def fit_error(params: ThroughputParams, points: Sequence[ThroughputPoint]) -> FitError:
    """Relative error on the points.

    Raises:
        ValueError: no points.
    """
    if not points:
        raise ValueError("no points to check the fit on")
    measured = np.array([point.step_s for point in points])
    error = np.abs(predict_s(params, points) / measured - 1.0)
    worst = int(error.argmax())
    return FitError(
        len(points), float(np.median(error)), float(np.quantile(error, 0.9)), float(error[worst]), points[worst]
    )


def fit_throughput(points: Sequence[ThroughputPoint], prior: ThroughputParams | None = None) -> FitResult:
    """Fit to all points; the error on unseen points comes from a second fit without every fifth point.

    Args:
        points: at least one; order matters only for which ones are held out.
        prior: parameters for what the points cannot tell, and the start of the fit (the last fit, when called online). None:
            no synchronisation cost where none was measured (several nodes: 1.1 x one node), forward a third of compute,
            freezing as Eq. 6, 7 with gamma_flop = 1 and no fixed part.

    Raises:
        ValueError: no points, or a time, batch or count that is not positive and finite.
    """
    _check(points)
    unseen = None
    if len(points) >= 2 * HOLD_OUT_EVERY:
        held = [point for index, point in enumerate(points) if index % HOLD_OUT_EVERY == HOLD_OUT_EVERY - 1]
        kept = [point for index, point in enumerate(points) if index % HOLD_OUT_EVERY != HOLD_OUT_EVERY - 1]
        unseen = fit_error(fit_params(kept, prior), held)
    params = fit_params(points, prior)
    return FitResult(params, fit_error(params, points), unseen)


def fit_params(
    points: Sequence[ThroughputPoint], prior: ThroughputParams | None = None, without: Collection[str] = NOT_FITTED
) -> ThroughputParams:
    """The parameters alone; arguments and errors as :func:`fit_throughput`.

    ``without`` names terms that are not fitted but absent (or the prior's): ``smooth``, ``straggler``, ``pair_beta_s``.
    """
    _check(points)
    columns = Columns.of(points)
    rough = rough_start(columns)
    anchor = rough if prior is None else encode(prior)
    free = free_entries(columns)
    for name in without:
        free[INDEX[name]] = False
        if prior is None:
            anchor[INDEX[name]] = ABSENT
    timed = np.isfinite(columns.fwd_s)

    def errors(vector: FloatArray) -> FloatArray:
        params = decode(vector)
        error = np.log(_predict(params, columns)) - columns.log_step
        if timed.any():
            forward = compute_s(params.fwd, columns.batch) * wait_factor(params, columns.gpus)
            error = np.concatenate([error, np.log(forward[timed] / columns.fwd_s[timed])])
        return error

    best_cost, best = np.inf, anchor
    starts = restarts(np.where(free, rough, anchor))
    for first in starts if prior is None else (anchor, *starts):
        vector, cost = descend(errors, first, anchor, free, PULL, len(points))
        if cost < best_cost * (1.0 - 1e-9):
            best_cost, best = cost, vector
    return with_unseen(decode(best), columns, prior)


def _check(points: Sequence[ThroughputPoint]) -> None:
    if not points:
        raise ValueError("no throughput points to fit")
    for point in points:
        values = (point.num_gpus, point.num_nodes, point.batch_per_gpu, point.step_s, point.accum_steps)
        if not all(np.isfinite(value) and value > 0 for value in values):
            raise ValueError(f"counts, batch and step time must be positive and finite: {point}")


def _predict(params: ThroughputParams, at: Columns) -> FloatArray:
    return params_step_s(params, at.theta, at.omega, at.gpus, at.nodes, at.batch, at.accum)
