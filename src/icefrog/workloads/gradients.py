"""Gradient statistics by training progress: whole-model totals times their split over layers. Pure numpy.

Totals (S and |G|^2 by batch) are fitted to public measurements where they exist. The split over layers, and how freezing a
prefix changes what remains, are measured on small networks and stand for larger ones of the same kind: ``proxy``. Raw
variance is carried over unit by unit: the units of a CNN hold about the same whatever their parameters. Preconditioned
variance is carried over *per parameter*: g^2 / v is about 1 for every element, frequent or rare.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from icefrog.profile import FloatArray

if TYPE_CHECKING:
    from icefrog.workloads.worth import FrozenWorth


@dataclass(frozen=True)
class Totals:
    """ln S and ln |G|^2 of the whole model at ``len(progress)`` points for some batches, per-sample units."""

    batches: FloatArray  # (B,), ascending
    log_variance: FloatArray  # (B, P)
    log_sqr_norm: FloatArray  # (B, P)

    @cached_property
    def _log_batches(self) -> list[float]:
        return [float(value) for value in np.log(self.batches)]

    @cached_property
    def _rows(self) -> tuple[list[list[float]], list[list[float]]]:
        return self.log_variance.tolist(), self.log_sqr_norm.tolist()

    def log_batch(self, batch: float) -> float:
        """Where a batch lies among the measured ones; flat beyond them."""
        return float(np.log(min(max(batch, self.batches[0]), self.batches[-1])))

    def variance(self, progress: float, log_batch: float) -> float:
        """S, linear in progress and in the logarithm of the batch (:meth:`log_batch`)."""
        return self._between(self._rows[0], progress, log_batch)

    def sqr_norm(self, progress: float, log_batch: float) -> float:
        """|G|^2, in the same way."""
        return self._between(self._rows[1], progress, log_batch)

    def _between(self, rows: list[list[float]], progress: float, log_batch: float) -> float:
        grid = _grid(len(rows[0]))
        return float(
            np.exp(interpolated(log_batch, self._log_batches, [interpolated(progress, grid, r) for r in rows]))
        )


@dataclass(frozen=True)
class LayerSplit:
    """Measured on a small network of U units at P points of progress; ``ratio`` at P points from freezing to the end.

    With ``param_share``, S per parameter is carried over to other models; None: the share of each unit.
    """

    variance_share: FloatArray  # (P, U), rows sum to 1
    sqr_share: FloatArray  # (P, U)
    starts: FloatArray  # (S,), progress at which freezing began
    depths: FloatArray  # (D,), share of units frozen
    ratio: FloatArray  # (S, D, P, U): S of a unit relative to the run without freezing; NaN where frozen
    param_share: FloatArray | None = None  # (U,), sums to 1


@dataclass(frozen=True)
class GradientCurves:
    """Statistics of one task for any batch; for any number of layers where ``param_share`` is None.

    ``param_share`` (L,) is how the task's own model spreads its parameters over its layers; used where the split is carried
    over per parameter. ``signal_share`` (P, U) is how G . P G (P: the optimizer's preconditioner) was spread over the units
    of the small network; carried over unit by unit. ``worth``: what a step with a frozen prefix is worth in such trainings.
    """

    totals: Totals
    split: LayerSplit
    provenance: str
    param_share: FloatArray | None = None
    signal_share: FloatArray | None = None
    worth: FrozenWorth | None = None

    @cached_property
    def _bound(self) -> dict[tuple[int, int], LayerCurves]:
        return {}

    def bind(self, num_layers: int, batch: int) -> LayerCurves:
        """The curves of one job; the same object for all that are alike, which look up the same tables.

        Raises:
            ValueError: the model is known to have another number of layers.
        """
        known = self._bound.get((num_layers, batch))
        if known is not None:
            return known
        if self.param_share is not None and num_layers != len(self.param_share):
            raise ValueError(f"the model has {len(self.param_share)} layers, not {num_layers}")
        return self._bound.setdefault((num_layers, batch), LayerCurves(self, num_layers, batch))

    def variance(
        self,
        progress: float,
        num_layers: int,
        batch: int,
        frozen_start: float | None = None,
        frozen_depth: float = 0.0,
    ) -> FloatArray:
        """V = S by layer, shape (num_layers,); see :meth:`LayerCurves.variance`."""
        return self.bind(num_layers, batch).variance(progress, frozen_start, frozen_depth)

    def sqr_norm(self, progress: float, num_layers: int, batch: int) -> FloatArray:
        """|G|^2 by layer, shape (num_layers,)."""
        return self.bind(num_layers, batch).sqr_norm(progress)


@dataclass(frozen=True)
class LayerCurves:
    """Statistics by layer of a model with L layers that trains with one global batch."""

    curves: GradientCurves
    num_layers: int
    batch: int

    @cached_property
    def _log_batch(self) -> float:
        return self.curves.totals.log_batch(self.batch)

    @cached_property
    def _variance_share(self) -> FloatArray:
        return self._spread(self.curves.split.variance_share)

    @cached_property
    def _sqr_share(self) -> FloatArray:
        return self._spread(self.curves.split.sqr_share)

    @cached_property
    def _signal_share(self) -> FloatArray:
        assert self.curves.signal_share is not None
        return _spread(self.curves.signal_share, self.num_layers)

    def _spread(self, share: FloatArray) -> FloatArray:
        measured, own = self.curves.split.param_share, self.curves.param_share
        if measured is None or own is None:
            return _spread(share, self.num_layers)
        weight = _stretch(share / measured, self.num_layers) * own
        return np.asarray(weight / weight.sum(1, keepdims=True))

    @cached_property
    def _ratio(self) -> FloatArray:
        return _stretch(_filled(self.curves.split.ratio), self.num_layers)  # (S, D, P, L)

    def variance(self, progress: float, frozen_start: float | None = None, frozen_depth: float = 0.0) -> FloatArray:
        """V = S by layer, per-sample units, shape (L,).

        Args:
            progress: effective samples over P0; clipped to 0..1.
            frozen_start: progress at which the present prefix froze; None: nothing is frozen.
            frozen_depth: share of the layers that is frozen, 0..1. Frozen layers keep the value of ``frozen_start``; the
                others change against the run without freezing as measured, linear between the measured runs.
        """
        now = min(max(progress, 0.0), 1.0)
        value = self.curves.totals.variance(now, self._log_batch) * _row(self._variance_share, now)
        if frozen_start is None or frozen_depth <= 0.0 or frozen_start >= now:
            return value
        value = value * self._frozen_ratio(now, frozen_start, frozen_depth)
        num_frozen = min(round(frozen_depth * self.num_layers), self.num_layers)
        value[:num_frozen] = self.variance(frozen_start)[:num_frozen]
        return value

    def sqr_norm(self, progress: float) -> FloatArray:
        """|G|^2 by layer, shape (L,)."""
        now = min(max(progress, 0.0), 1.0)
        return self.curves.totals.sqr_norm(now, self._log_batch) * _row(self._sqr_share, now)

    def signal(self, progress: float) -> FloatArray:
        """Shares of G . P G by layer, shape (L,), of the run without freezing."""
        return _row(self._signal_share, min(max(progress, 0.0), 1.0))

    def worth(self, depth: float, start: float) -> float:
        """Of a step with the first ``depth`` (0..1) of the layers frozen since progress ``start``: measured, 0..1."""
        assert self.curves.worth is not None
        return self.curves.worth.worth(depth, start)

    def _frozen_ratio(self, now: float, start: float, depth: float) -> FloatArray:
        split = self.curves.split
        elapsed = (now - start) / max(1.0 - start, 1e-9)
        by_start = _between(split.starts.tolist(), self._ratio, start)  # (D, P, L)
        depths = [0.0, *split.depths.tolist()]
        by_depth = np.concatenate((np.ones((1, *by_start.shape[1:])), by_start))  # depth 0: no change
        return _row(_between(depths, by_depth, depth), elapsed)


def load_totals(table: Mapping[str, Any]) -> Totals:
    """From one application of ``gradient_totals.json``."""
    rows = sorted(table["totals"], key=lambda row: float(row["batch"]))
    return Totals(
        batches=np.array([row["batch"] for row in rows], dtype=np.float64),
        log_variance=np.log([row["variance"] for row in rows]),
        log_sqr_norm=np.log([row["sqr_norm"] for row in rows]),
    )


def own_totals(family: Mapping[str, Any]) -> Totals:
    """The small network's own totals, where no public ones exist (proxy). Its batch stands for every batch."""
    total = np.array(family["total"], dtype=np.float64)
    sqr = total / np.array(family["noise_scale"], dtype=np.float64)
    return Totals(np.array([float(family["batch"])]), np.log(total)[None], np.log(np.maximum(sqr, 1e-30))[None])


def load_split(family: Mapping[str, Any]) -> LayerSplit:
    """From one family of ``layer_split.json``."""
    starts = sorted({run["start"] for run in family["runs"]})
    depths = sorted({run["depth"] for run in family["runs"]})
    runs = {(run["start"], run["depth"]): np.array(run["ratio"], dtype=np.float64) for run in family["runs"]}
    return LayerSplit(
        variance_share=np.array(family["variance_share"], dtype=np.float64),
        sqr_share=np.array(family["sqr_share"], dtype=np.float64),
        starts=np.array(starts),
        depths=np.array(depths),
        ratio=np.array([[runs[start, depth] for depth in depths] for start in starts]),
        param_share=np.array(family["param_share"]) if family.get("gradients") == "preconditioned" else None,
    )


def interpolated(at: float, grid: Sequence[float], values: Sequence[float]) -> float:
    """``numpy.interp`` of one number, to the last bit, in a tenth of the time. The grid ascends; flat beyond its ends."""
    if at <= grid[0]:
        return values[0]
    if at >= grid[-1]:
        return values[-1]
    low = bisect_right(grid, at) - 1
    if grid[low] == at:
        return values[low]
    return (values[low + 1] - values[low]) / (grid[low + 1] - grid[low]) * (at - grid[low]) + values[low]


def _between(grid: Sequence[float], values: FloatArray, at: float) -> FloatArray:
    """Linear interpolation along the first axis, flat beyond its ends."""
    place = interpolated(at, grid, range(len(grid)))
    low = min(int(place), len(grid) - 1)
    high = min(low + 1, len(grid) - 1)
    weight = place - low
    return np.asarray(values[low] * (1.0 - weight) + values[high] * weight)


def _row(table: FloatArray, at: float) -> FloatArray:
    return _between(_grid(len(table)), table, at)


@lru_cache(maxsize=64)
def _grid(points: int) -> tuple[float, ...]:
    """Progress at equal distances."""
    return tuple(np.linspace(0.0, 1.0, points).tolist())


def _filled(ratio: FloatArray) -> FloatArray:
    """Frozen units (NaN, a prefix) take the ratio of the first unit that trains: needed only between two depths."""
    filled = ratio.copy()
    for index in np.ndindex(ratio.shape[:-1]):
        row = filled[index]
        known = np.flatnonzero(np.isfinite(row))
        row[: known[0]] = row[known[0]]
    return filled


def _inner_places(num_layers: int, num_units: int) -> FloatArray:
    """Where the inner layers of a deep model lie among the inner units of the small one."""
    return (np.arange(num_layers - 2) + 0.5) / (num_layers - 2) * (num_units - 2) - 0.5


def _stretch(values: FloatArray, num_layers: int) -> FloatArray:
    """Along the last axis: first to first, last to last, inner ones by relative depth."""
    units = values.shape[-1]
    if num_layers < 3:
        return values[..., [0, units - 1][:num_layers]] if num_layers == 2 else values[..., [units - 1]]
    places = np.clip(_inner_places(num_layers, units), 0, units - 3)
    low = np.minimum(places.astype(np.intp), units - 4)
    weight = places - low
    inner = values[..., 1:-1]
    middle = inner[..., low] * (1.0 - weight) + inner[..., low + 1] * weight
    return np.concatenate((values[..., :1], middle, values[..., -1:]), axis=-1)


def _spread(share: FloatArray, num_layers: int) -> FloatArray:
    """Shares of L layers: stem and head keep theirs, the inner layers divide what the inner units have."""
    spread = _stretch(share, num_layers)
    if num_layers >= 3:
        middle = spread[:, 1:-1]
        room = 1.0 - share[:, :1] - share[:, -1:]
        spread[:, 1:-1] = middle / np.maximum(middle.sum(1, keepdims=True), 1e-300) * room
    return np.asarray(spread / spread.sum(1, keepdims=True))
