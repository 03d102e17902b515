"""Peak memory and GPU utilisation: two linear regressions on (m, theta_l, omega_l) (section 8 of the paper)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from icefrog.profile import FloatArray, OccupancyParams, Profile


def _linear(
    coefficients: tuple[float, float, float, float],
    batch_per_gpu: npt.ArrayLike,
    theta: npt.ArrayLike,
    omega: npt.ArrayLike,
) -> FloatArray:
    base, per_sample, per_theta, per_omega = coefficients
    return np.asarray(
        base
        + per_sample * np.asarray(batch_per_gpu, dtype=np.float64)
        + per_theta * np.asarray(theta)
        + per_omega * np.asarray(omega)
    )


def mem_bytes(profile: Profile, batch_per_gpu: npt.ArrayLike, frozen_layers: npt.ArrayLike = 0) -> FloatArray:
    """Predicted peak memory of one GPU, bytes, >= 0; broadcasts. The safety factor 1.1 belongs to the sharing rule."""
    depth = np.asarray(frozen_layers, dtype=np.intp)
    coefficients = profile.occupancy.mem_bytes
    return np.maximum(_linear(coefficients, batch_per_gpu, profile.theta[depth], profile.omega[depth]), 0.0)


def util_pct(profile: Profile, batch_per_gpu: npt.ArrayLike, frozen_layers: npt.ArrayLike = 0) -> FloatArray:
    """Predicted GPU utilisation, percent, 0..100; broadcasts."""
    depth = np.asarray(frozen_layers, dtype=np.intp)
    coefficients = profile.occupancy.util_pct
    return np.clip(_linear(coefficients, batch_per_gpu, profile.theta[depth], profile.omega[depth]), 0.0, 100.0)


@dataclass(frozen=True, slots=True)
class OccupancyPoint:
    """One measurement."""

    batch_per_gpu: float
    theta: float
    omega: float
    mem_bytes: float
    util_pct: float


def fit_occupancy(points: Sequence[OccupancyPoint]) -> OccupancyParams:
    """Least squares on the points; what they do not vary (no frozen ones yet, say) has no influence.

    With fewer than four independent points, the slopes of least norm through them are taken, around their mean. So a depth
    that was never measured is not believed to free memory or compute: deep freezing must not look like a way to fit beside
    a partner before anything was seen of it.

    Raises:
        ValueError: no points.
    """
    if not points:
        raise ValueError("no occupancy points to fit")
    rows = np.array([[p.batch_per_gpu, p.theta, p.omega] for p in points])
    targets = np.array([[p.mem_bytes, p.util_pct] for p in points])
    scale = np.array([max(float(rows[:, 0].max()), 1.0), 1.0, 1.0])
    centre, middle = rows.mean(axis=0), targets.mean(axis=0)
    slopes = np.linalg.lstsq((rows - centre) / scale, targets - middle, rcond=1e-9)[0] / scale[:, None]
    solution = np.vstack([middle - centre @ slopes, slopes])
    mem, util = (tuple(float(value) for value in column) for column in solution.T)
    return OccupancyParams(mem_bytes=_four(mem), util_pct=_four(util))


def _four(values: tuple[float, ...]) -> tuple[float, float, float, float]:
    first, second, third, fourth = values
    return first, second, third, fourth
