"""Fitting a profile of any kind of parallelism to measured steps, with its error on configurations left out (Eq. 4-14).

Replicated jobs are fitted by :mod:`icefrog.estimate.fit`. For the others the same vector describes compute and gradient
synchronisation, and a few entries more what the kind adds: the all-gather of shards, the link between stages. What no point
can tell is absent (between nodes: a little more than within one).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from icefrog.estimate.fit import NOT_FITTED, fit_params
from icefrog.estimate.fit_vector import (
    ABSENT,
    INDEX,
    NAMES,
    PULL,
    UNSEEN_INTER_OVER_INTRA,
    BoolArray,
    Columns,
    ThroughputPoint,
    decode,
    descend,
    free_entries,
    restarts,
    rough_start,
    with_unseen,
)
from icefrog.estimate.pipeline import replicas_of
from icefrog.estimate.sharded import sharded_forward_s
from icefrog.estimate.throughput import step_s
from icefrog.profile import (
    FloatArray,
    Link,
    Parallel,
    Pipelined,
    Profile,
    Sharded,
    SyncCurve,
    ThroughputParams,
    altered,
)

FOLDS = 5
TOLERANCE = 1e-3
"""Measured steps scatter by percents; what follows after this changes nothing but the time that a fit takes."""


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One measured configuration of a job."""

    num_gpus: int
    num_nodes: int
    batch_per_gpu: int
    accum_steps: int
    frozen_layers: int
    step_s: float
    fwd_s: float | None = None  # forward of all micro-steps, if timed; the rest of a step counts as backward
    sync_s: float | None = None  # exposed synchronisation


@dataclass(frozen=True, slots=True)
class PointError:
    """What a fit says of one point."""

    point: StepPoint
    fitted_s: float  # by the fit to all points
    unseen_s: float | None  # by a fit that had not seen this configuration; None: too few points

    @property
    def fitted_error(self) -> float:
        """|predicted / measured - 1|."""
        return abs(self.fitted_s / self.point.step_s - 1.0)

    @property
    def unseen_error(self) -> float | None:
        """The same of the fit without this configuration."""
        return None if self.unseen_s is None else abs(self.unseen_s / self.point.step_s - 1.0)


@dataclass(frozen=True, slots=True)
class ProfileFit:
    """The profile with its fitted parameters, and how far off it is, point by point."""

    profile: Profile
    errors: tuple[PointError, ...]

    def fitted_errors(self) -> FloatArray:
        """Of all points."""
        return np.array([error.fitted_error for error in self.errors])

    def unseen_errors(self) -> FloatArray:
        """Of the points that were left out once; empty with too few points."""
        return np.array([e for error in self.errors if (e := error.unseen_error) is not None])


def fit_profile(profile: Profile, points: Sequence[StepPoint]) -> ProfileFit:
    """Fit ``throughput`` and ``parallel`` of a profile; its layers and its kind of parallelism are given.

    Args:
        profile: of the job; its times are not used.
        points: at least one, each of another configuration. With four or more, every configuration is predicted once by a
            fit that has not seen it: the points are dealt over at most five folds.

    Raises:
        ValueError: no points, or a count or time that is not positive and finite.
    """
    fitted = _fit(profile, points)
    predicted = _predict(fitted, points)
    unseen: list[float | None] = [None] * len(points)
    folds = min(FOLDS, len(points)) if len(points) >= 4 else 0
    for fold in range(folds):
        held = range(fold, len(points), folds)
        left = [point for index, point in enumerate(points) if index % folds != fold]
        again = _predict(_fit(profile, left), [points[index] for index in held])
        for index, time_s in zip(held, again.tolist(), strict=True):
            unseen[index] = time_s
    errors = zip(points, predicted.tolist(), unseen, strict=True)
    return ProfileFit(fitted, tuple(PointError(*error) for error in errors))


def _predict(profile: Profile, points: Sequence[StepPoint]) -> FloatArray:
    return step_s(profile, *_at(points))


def _at(points: Sequence[StepPoint]) -> npt.NDArray[np.int_]:
    """The arguments of :func:`icefrog.estimate.throughput.step_s`, one row each."""
    rows = [(p.num_gpus, p.num_nodes, p.batch_per_gpu, p.frozen_layers, p.accum_steps) for p in points]
    return np.array(rows, dtype=np.int_).T


def _fit(profile: Profile, points: Sequence[StepPoint]) -> Profile:
    match profile.parallel:
        case Sharded():
            return _fit_kind(profile, points, _SHARDED)
        case Pipelined():
            return _fit_kind(profile, points, _PIPELINED)
    return profile.model_copy(update={"throughput": fit_params([_replicated(profile, p) for p in points])})


def _replicated(profile: Profile, point: StepPoint) -> ThroughputPoint:
    """The point as one of replicas; those of a pipeline work on the samples of all their stages' GPUs."""
    replicas = replicas_of(profile, point.num_gpus)
    return ThroughputPoint(
        num_gpus=replicas,
        num_nodes=point.num_nodes if replicas > 1 else 1,
        batch_per_gpu=point.batch_per_gpu * point.num_gpus / replicas,
        step_s=point.step_s,
        sync_s=point.sync_s,
        fwd_s=None if point.fwd_s is None else point.fwd_s / point.accum_steps,
        theta=float(profile.theta[point.frozen_layers]),
        omega=float(profile.omega[point.frozen_layers]),
        accum_steps=point.accum_steps,
    )


@dataclass(frozen=True, slots=True)
class _Kind:
    """The entries that a kind of parallelism adds to the vector."""

    start: Callable[[Columns], FloatArray]
    pull: FloatArray
    free: Callable[[Profile, Columns, Sequence[StepPoint]], BoolArray]
    decode: Callable[[Parallel, FloatArray], Parallel]
    forward_s: Callable[[ThroughputParams, Parallel, Columns], FloatArray] | None  # None: is not timed apart


def _fit_kind(profile: Profile, points: Sequence[StepPoint], kind: _Kind) -> Profile:
    columns = Columns.of([_replicated(profile, point) for point in points])
    split = len(NAMES)
    free = np.concatenate([free_entries(columns), kind.free(profile, columns, points)])
    anchor = np.concatenate([rough_start(columns), kind.start(columns)])
    anchor[split:] = np.where(free[split:], anchor[split:], ABSENT)
    for name in NOT_FITTED:
        free[INDEX[name]], anchor[INDEX[name]] = False, ABSENT
    timed = np.isfinite(columns.fwd_s)
    at = _at(points)
    bare = profile.model_copy(update={"by_gpu_type": {}})  # its memo holds the stages, which every trial shares

    def errors(vector: FloatArray) -> FloatArray:
        params, parallel = decode(vector[:split]), kind.decode(profile.parallel, vector[split:])
        trial = altered(bare, throughput=params, parallel=parallel)
        trial.memo.update(bare.memo)
        error = np.log(step_s(trial, *at)) - columns.log_step
        if kind.forward_s is not None and timed.any():
            forward = kind.forward_s(params, parallel, columns)
            error = np.concatenate([error, np.log(forward[timed] / columns.fwd_s[timed])])
        return error

    step_s(bare, *at)
    pull = np.concatenate([PULL, kind.pull])
    best_cost, best = np.inf, anchor
    for first in restarts(anchor):
        vector, cost = descend(errors, first, anchor, free, pull, len(points), TOLERANCE)
        if cost < best_cost * (1.0 - 1e-9):
            best_cost, best = cost, vector
    params = with_unseen(decode(best[:split]), columns, None)
    return profile.model_copy(update={"throughput": params, "parallel": kind.decode(profile.parallel, best[split:])})


# -- what each kind adds -------------------------------------------------------------------------------------------------


def _gather_start(at: Columns) -> FloatArray:
    exposed = at.sync_s[(at.gpus > 1) & np.isfinite(at.sync_s)]
    guess = 0.5 * float(np.median(exposed)) if exposed.size else 0.1 * float(np.median(at.step_s))
    least = max(guess, 1e-6)
    return np.log([least, 0.02 * least, least, 0.02 * least, 0.3, 0.02])


def _gather_free(_profile: Profile, at: Columns, _points: Sequence[StepPoint]) -> BoolArray:
    intra, inter = (at.gpus > 1) & (at.nodes == 1), at.nodes > 1
    several = [len(np.unique(at.gpus[which])) > 1 for which in (intra, inter)]
    frozen = bool(((at.gpus > 1) & (at.theta < 1.0)).any())
    return np.array([bool(intra.any()), several[0], bool(inter.any()), several[1], bool((at.gpus > 1).any()), frozen])


def _sharded(_given: Parallel, vector: FloatArray) -> Sharded:
    *times, gamma, odds = _seconds(vector)
    gather = SyncCurve(**_both_links(times, ("alpha_s", "beta_s")))
    fixed = odds / (1.0 + odds) * max(gather.intra_alpha_s, gather.inter_alpha_s)
    return Sharded(gather=gather, gather_alpha_s=fixed, gather_gamma=1.0 + gamma)


def _sharded_forward_s(params: ThroughputParams, parallel: Parallel, at: Columns) -> FloatArray:
    assert isinstance(parallel, Sharded)
    return sharded_forward_s(params, parallel, at.gpus, at.nodes, at.batch)


_SHARDED = _Kind(
    start=_gather_start,
    pull=np.array([0.1, 0.1, 0.1, 0.1, 0.3, 0.3]),
    free=_gather_free,
    decode=_sharded,
    forward_s=_sharded_forward_s,
)


def _link_start(at: Columns) -> FloatArray:
    """A hundredth of a step a message, and a gigabyte a second."""
    least = 0.01 * float(np.median(at.step_s))
    return np.log([least, 1e-9, least, 1e-9])


def _link_free(profile: Profile, _at: Columns, points: Sequence[StepPoint]) -> BoolArray:
    free = []
    for across in (False, True):
        sent = set()
        for point in points:
            replicas = replicas_of(profile, point.num_gpus)
            stages = point.num_gpus // replicas
            if stages > 1 and (point.num_nodes > 1 and stages * point.num_nodes > point.num_gpus) == across:
                sent.add((stages, point.batch_per_gpu * point.num_gpus // replicas))
        sized = any(layer.activation_bytes for layer in profile.layers)
        free += [bool(sent), sized and len(sent) > 1]
    return np.array(free)


def _pipelined(given: Parallel, vector: FloatArray) -> Pipelined:
    assert isinstance(given, Pipelined)
    return given.model_copy(update={"link": Link(**_both_links(_seconds(vector), ("alpha_s", "s_per_byte")))})


_PIPELINED = _Kind(start=_link_start, pull=np.full(4, 0.1), free=_link_free, decode=_pipelined, forward_s=None)


def _seconds(vector: FloatArray) -> list[float]:
    """What is absent is exactly 0."""
    return [float(np.exp(entry)) if entry > ABSENT + 1.0 else 0.0 for entry in vector]


def _both_links(measured: Sequence[float], names: tuple[str, str]) -> dict[str, float]:
    """A constant and a slope within a node, and between nodes; where only the first were measured, the others are a little
    more."""
    intra, inter = list(measured[:2]), list(measured[2:])
    if inter[0] == 0.0:
        inter = [UNSEEN_INTER_OVER_INTRA * value for value in intra]
    keys = (f"{where}_{name}" for where in ("intra", "inter") for name in names)
    return dict(zip(keys, intra + inter, strict=True))
