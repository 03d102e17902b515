"""The frozen penalty (Eq. 3) and the per-layer gradient statistics behind it. Pure numpy: the runtime feeds it.

One vector V prices every depth at every time. For a layer that trains, V is its present smoothed variance;
for a frozen layer, the value last observed before it froze. Then psi(l) is the suffix sum over the whole
sum, for shallower depths (what un-freezing would give) as well as for deeper ones. The stored prefix stays
while the suffix falls, so psi falls, and the tuner opens layers again.

Units: V is the *per-sample* variance S = M * tr Cov(g), which does not change with the batch M.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from icefrog.profile import FloatArray
from icefrog.types import GradientStats

EMA_DECAY = 0.95
READY_STEPS = 20


def frozen_penalty(variance: npt.ArrayLike) -> FloatArray:
    """psi(l) for every depth l (Eq. 3).

    Args:
        variance: V, shape (L,), any common unit, >= 0.

    Returns:
        Shape (L + 1,). ``psi[0] == 1`` always. ``psi[l]`` is NaN where no variance is left behind the
        boundary (always at l = L): such a depth is not offered. 1/psi - 1 extra iterations are needed per
        full-layer iteration.

    Raises:
        ValueError: ``variance`` is empty, not one-dimensional, negative or not finite.
    """
    values = np.asarray(variance, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"variance must have one value a layer, got shape {values.shape}")
    scale = float(values.max())  # sums of huge values must not overflow
    if not (scale < np.inf and float(values.min()) >= 0.0):  # NaN is neither
        raise ValueError(f"variance must be finite and >= 0, got {values.tolist()}")
    psi = np.full(len(values) + 1, np.nan)
    if scale > 0:
        suffix = np.cumsum(values[::-1] / scale)[::-1]  # from the back: no cancellation
        np.divide(suffix, suffix[0], out=psi[:-1], where=suffix > 0)
    psi[0] = 1.0
    return psi


def replica_estimate(
    sqr_norms: npt.ArrayLike, mean_sqr_norm: npt.ArrayLike, samples: npt.ArrayLike
) -> tuple[FloatArray, FloatArray]:
    """Per-layer S and |G|^2 of one step from R >= 2 replicas or micro-batches (section 3).

    With g = sum (n_r/M) g_r:  tr Cov(g) = sum (n_r/M) |g_r - g|^2 / (R - 1) = (sum (n_r/M) |g_r|^2 -
    |g|^2) / (R - 1), so that norms are all that is needed.

    Args:
        sqr_norms: |g_r|^2 by replica and layer, shape (R, L).
        mean_sqr_norm: |g|^2 by layer, shape (L,).
        samples: n_r, shape (R,).

    Returns:
        (S, |G|^2), each (L,). S = M * tr Cov(g) is clamped at 0 (rounding); |G|^2 = |g|^2 - tr Cov(g) may
        be negative in one step: clamping it here would bias its average, so :class:`GradientTracker`
        clamps after smoothing.

    Raises:
        ValueError: fewer than two replicas, or shapes that do not match.
    """
    norms = np.asarray(sqr_norms, dtype=np.float64)
    mean = np.asarray(mean_sqr_norm, dtype=np.float64)
    sizes = np.asarray(samples, dtype=np.float64)
    if norms.ndim != 2 or norms.shape[0] < 2:
        raise ValueError(f"need |g_r|^2 of at least two replicas, shape (R, L), got shape {norms.shape}")
    if mean.shape != norms.shape[1:] or sizes.shape != norms.shape[:1] or np.any(sizes <= 0):
        raise ValueError(f"shapes do not match: {norms.shape}, {mean.shape}, {sizes.shape} (sizes > 0)")
    total = float(sizes.sum())
    weighted = (sizes / total) @ norms
    trace_cov = np.maximum(weighted - mean, 0.0) / (len(sizes) - 1)
    return total * trace_cov, mean - trace_cov


def successive_estimate(
    diff_sqr_norm: npt.ArrayLike, dot: npt.ArrayLike, batch: float
) -> tuple[FloatArray, FloatArray]:
    """Per-layer S and |G|^2 from two successive steps of one replica, the case R = 1 (section 3).

    Args:
        diff_sqr_norm: |g_t - g_(t-1)|^2 by layer, shape (L,). Biased up by the drift of the mean gradient.
        dot: g_t . g_(t-1) by layer, shape (L,).
        batch: M, samples of each of the two steps.

    Returns:
        (S, |G|^2), each (L,); |G|^2 may be negative in one step, see :func:`replica_estimate`.

    Raises:
        ValueError: shapes that do not match, or ``batch`` <= 0.
    """
    diff = np.asarray(diff_sqr_norm, dtype=np.float64)
    sqr = np.asarray(dot, dtype=np.float64)
    if diff.shape != sqr.shape or diff.ndim != 1 or not batch > 0:
        raise ValueError(f"shapes do not match: {diff.shape}, {sqr.shape} (batch {batch} > 0)")
    return batch * np.maximum(diff, 0.0) / 2.0, sqr.copy()


class GradientTracker:
    """Per-layer bookkeeping: EMA of layers that train, stored values of frozen ones, through every move of the boundary.

    Args:
        num_layers: L >= 1.
        decay: of the bias-corrected EMA, where each step is measured.
        ready_steps: fresh steps that a layer needs before its own EMA is believed.
    """

    def __init__(self, num_layers: int, *, decay: float = EMA_DECAY, ready_steps: int = READY_STEPS) -> None:
        if num_layers < 1 or not 0.0 <= decay < 1.0 or ready_steps < 1:
            raise ValueError(
                f"need num_layers >= 1, 0 <= decay < 1, ready_steps >= 1: {num_layers}, {decay}, {ready_steps}"
            )
        self.num_layers = num_layers
        self.decay = decay
        self.ready_steps = ready_steps
        self.skipped_steps = 0
        self._frozen = 0
        self._ema = np.zeros((2, num_layers))  # rows: S, |G|^2; not yet bias-corrected
        self._squares = np.zeros((2, num_layers))  # the same of their squares
        self._sqr_weight = np.zeros(num_layers)  # sum of the squared weights in the EMA
        self._steps = np.zeros(num_layers, dtype=np.int64)  # measured since the layer was (re-)opened
        self._missing = np.ones(num_layers)  # weight that the EMA lacks: the product of its decays
        self._stored = np.full((2, num_layers), np.nan)  # as last observed before freezing

    @property
    def frozen_layers(self) -> int:
        """The boundary now in force."""
        return self._frozen

    def observe(self, variance: npt.ArrayLike, sqr_norm: npt.ArrayLike, every: int = 1) -> bool:
        """Take in S and |G|^2 of one step, shape (L,) each; entries of frozen layers are not looked at.

        A step with a non-finite entry (an overflow under mixed precision) is skipped whole and counted.

        Where each n-th step is measured, the EMA decays by ``decay ** sqrt(n)``: with ``decay`` itself it would lag behind n
        times as long, with ``decay ** n`` average n times fewer estimates. That was as close to the variance smoothed
        over 121 steps as measuring each step was, for n up to 5 (docs/elastic-training.md).

        Args:
            variance: S.
            sqr_norm: |G|^2.
            every: n.

        Returns:
            Whether the step was used.

        Raises:
            ValueError: wrong shape.
        """
        rows = np.array([variance, sqr_norm], dtype=np.float64)
        if rows.shape != self._ema.shape:
            raise ValueError(f"expected {self.num_layers} layers, got shape {rows.shape[1:]}")
        live = slice(self._frozen, None)
        if not np.all(np.isfinite(rows[:, live])):
            self.skipped_steps += 1
            return False
        decay = self.decay ** math.sqrt(every)
        self._ema[:, live] = decay * self._ema[:, live] + (1.0 - decay) * rows[:, live]
        self._squares[:, live] = decay * self._squares[:, live] + (1.0 - decay) * rows[:, live] ** 2
        self._sqr_weight[live] = decay**2 * self._sqr_weight[live] + (1.0 - decay) ** 2
        self._missing[live] *= decay
        self._steps[live] += 1
        return True

    def set_boundary(self, frozen_layers: int) -> None:
        """Freeze the first ``frozen_layers`` layers from now on; deeper ones are opened. No change: nothing happens.

        A layer that freezes keeps the value in force (its EMA, or the older stored one where the EMA is
        still young); a layer that opens starts its EMA afresh.

        Raises:
            ValueError: not in 0..L-1: at least one layer trains.
        """
        if not 0 <= frozen_layers < self.num_layers:
            raise ValueError(f"frozen_layers must be in 0..{self.num_layers - 1}, got {frozen_layers}")
        if frozen_layers > self._frozen:
            closing = slice(self._frozen, frozen_layers)
            self._stored[:, closing] = self._current()[:, closing]
        opened = slice(frozen_layers, self._frozen)
        self._ema[:, opened] = 0.0
        self._squares[:, opened] = 0.0
        self._sqr_weight[opened] = 0.0
        self._missing[opened] = 1.0
        self._steps[opened] = 0
        self._frozen = frozen_layers

    @property
    def ready(self) -> bool:
        """Whether every layer has a value to be believed: a stored one, or ``ready_steps`` fresh steps."""
        known = np.isfinite(self._stored[0])
        return bool(np.all(known | ((self._steps >= self.ready_steps) & (np.arange(self.num_layers) >= self._frozen))))

    @property
    def variance(self) -> FloatArray:
        """V for :func:`frozen_penalty`, shape (L,); layers never seen are 0."""
        return np.asarray(self._values()[0])

    @property
    def sqr_norm(self) -> FloatArray:
        """|G|^2 by layer, shape (L,), clamped at 0."""
        return np.asarray(self._values()[1])

    @property
    def fresh(self) -> tuple[bool, ...]:
        """Whether each layer's value comes from its own recent steps; False: stored when it last trained, or unknown."""
        return tuple((self._trusted() & (self._steps > 0)).tolist())

    @property
    def standard_error(self) -> FloatArray:
        """Of S and of |G|^2 by layer, shape (2, L), from the scatter of the estimates; NaN where a value is not fresh.

        The estimates count as independent of each other. Those of successive steps, where *each* step is measured, share
        a gradient: their correlation is up to 1/4, the error of their mean up to 1.22 times this.
        """
        total = 1.0 - self._missing
        known = self._trusted() & (self._steps > 1)
        total = np.where(known, total, 1.0)
        effective = total**2 / np.where(known, self._sqr_weight, 1.0)
        scatter = np.maximum(self._squares / total - (self._ema / total) ** 2, 0.0)
        return np.where(known, np.sqrt(scatter / np.where(known, effective - 1.0, 1.0)), np.nan)

    def noise_scale(self) -> float | None:
        """phi = sum S / sum |G|^2, samples; None while not ready or where no signal is left to divide by."""
        signal = float(self.sqr_norm.sum())
        return float(self.variance.sum()) / signal if self.ready and signal > 0 else None

    def stats(self) -> GradientStats | None:
        """What the job reports; None while not ready (then l stays 0)."""
        if not self.ready:
            return None
        return GradientStats(tuple(self.variance.tolist()), tuple(self.sqr_norm.tolist()))

    def state_dict(self) -> dict[str, Any]:
        """All of the state as JSON values (NaN as null); part of the job's checkpoint."""
        stored = [[None if np.isnan(value) else float(value) for value in row] for row in self._stored]
        return {
            "schema": 1,
            "decay": self.decay,
            "ready_steps": self.ready_steps,
            "skipped_steps": self.skipped_steps,
            "frozen_layers": self._frozen,
            "ema": self._ema.tolist(),
            "squares": self._squares.tolist(),
            "sqr_weight": self._sqr_weight.tolist(),
            "steps": self._steps.tolist(),
            "missing": self._missing.tolist(),
            "stored": stored,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what :meth:`state_dict` gave.

        Raises:
            ValueError: the state is of a model with another number of layers, or of an unknown schema.
        """
        steps = np.array(state["steps"], dtype=np.int64)
        if state.get("schema") != 1 or steps.shape != (self.num_layers,):
            raise ValueError(f"state of {steps.size} layers (schema {state.get('schema')}), expected {self.num_layers}")
        self.decay = float(state["decay"])
        self.ready_steps = int(state["ready_steps"])
        self.skipped_steps = int(state["skipped_steps"])
        self._frozen = int(state["frozen_layers"])
        self._steps = steps
        self._missing = np.array(state.get("missing", (self.decay**steps).tolist()), dtype=np.float64)
        self._ema = np.array(state["ema"], dtype=np.float64)
        total = np.maximum(1.0 - self._missing, 1e-12)
        # Older checkpoints do not have these two: no scatter was seen yet, in as many equal weights as there were steps.
        self._squares = np.array(state.get("squares", self._ema**2 / total), dtype=np.float64)
        self._sqr_weight = np.array(state.get("sqr_weight", total**2 / np.maximum(steps, 1)), dtype=np.float64)
        self._stored = np.array(
            [[np.nan if value is None else value for value in row] for row in state["stored"]],
            dtype=np.float64,
        )

    def _current(self) -> FloatArray:
        """(2, L): the value in force for each layer, unclamped; NaN where nothing is known."""
        seen = self._steps > 0
        fresh = np.where(seen, self._ema / np.where(seen, 1.0 - self._missing, 1.0), np.nan)
        return np.where(self._trusted(), fresh, self._stored)

    def _trusted(self) -> npt.NDArray[np.bool_]:
        """(L,): whether the layer's own EMA is believed, rather than the stored value."""
        old_enough = (self._steps >= self.ready_steps) | np.isnan(self._stored[0])
        return np.asarray(old_enough & (np.arange(self.num_layers) >= self._frozen))

    def _values(self) -> FloatArray:
        return np.maximum(np.nan_to_num(self._current(), nan=0.0), 0.0)
