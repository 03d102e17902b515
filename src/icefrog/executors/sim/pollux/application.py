"""The truth of one application: how long a step takes where, what a batch is worth, when an epoch is over."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from icefrog.errors import UserError
from icefrog.executors.sim.pollux.goodput import BatchGrid
from icefrog.executors.sim.pollux.measurements import Measurements, Times, read_application

MAX_NODES = 16
"""The measurements end there: more nodes count as so many."""
MAX_GPUS = 64
_ROUNDING = 1e-8


class NotMeasuredError(UserError):
    """A configuration outside what was measured: its step time, or the noise of its gradient, is unknown."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message, "give the complete data of the Pollux artifact, or jobs and nodes that it was measured on"
        )


@dataclass(frozen=True, slots=True)
class Rules:
    """What the artifact fixes of an application besides its measurements."""

    epochs: int
    max_local_batch: int | None = None  # None: the largest measured
    rigid: tuple[int, int] | None = None  # (GPUs, global batch) of one that is never scaled


RULES: Mapping[str, Rules] = {
    "bert": Rules(2),
    "cifar10": Rules(100),
    "ncf": Rules(10, rigid=(1, 32768)),
    "imagenet": Rules(90),
    "deepspeech2": Rules(80),
    "yolov3": Rules(50, max_local_batch=8),
}


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """How a global batch runs on some GPUs."""

    batch_per_gpu: int
    accum_steps: int  # micro-steps before the one that synchronises


class Application:
    """Look-ups in the measurements, each answered once and remembered.

    Args:
        name: of the application.
        measured: its files.
        rules: epochs and limits.
    """

    def __init__(self, name: str, measured: Measurements, rules: Rules) -> None:
        self.name = name
        self.rules = rules
        self.batches = tuple(measured.validation)
        self.init_batch = self.batches[0]
        self.max_batch = self.batches[-1]
        local = sorted({batch for table in measured.placements.values() for batch in table})
        self.min_local = local[0]
        self.max_local = rules.max_local_batch if rules.max_local_batch is not None else local[-1]
        if rules.rigid is not None and rules.rigid[1] not in self.batches:
            raise UserError(f"{name}: batch {rules.rigid[1]} was not measured", "give the data of the Pollux artifact")
        self._measured = measured
        self._sorted = {name: sorted(table.items()) for name, table in measured.placements.items()}
        self._times: dict[tuple[tuple[int, ...], int], Times] = {}
        self._stats: dict[tuple[int, int], tuple[float, float]] = {}
        self._volume: _Volume | None = None
        self._grids: dict[tuple[int, ...], BatchGrid] = {}
        self.thresholds = tuple(
            min(rows[epoch].progress for rows in measured.validation.values()) for epoch in range(self.epochs)
        )
        """Scale-invariant iterations at which each epoch ends."""
        self.sample_thresholds = tuple(progress * self.init_batch for progress in self.thresholds)
        """The same in effective samples, as jobs report them."""

    @classmethod
    def read(cls, data_dir: Path, name: str) -> Application:
        """Read the application's files. Raises :class:`UserError`."""
        if name not in RULES:
            raise UserError(f"the Pollux world has no application {name!r}", f"applications: {', '.join(RULES)}")
        measured = read_application(data_dir, name)
        short = [batch for batch, rows in measured.validation.items() if len(rows) < RULES[name].epochs]
        if short:
            raise UserError(
                f"{data_dir / 'pollux' / name}: validation-{short[0]}.csv has fewer than {RULES[name].epochs} epochs",
                "give the complete data of the Pollux artifact",
            )
        return cls(name, measured, RULES[name])

    @property
    def epochs(self) -> int:
        """E: a job is complete when its epoch counter, which starts at 0, gets here."""
        return self.rules.epochs

    def epochs_done(self, effective_samples: float) -> int:
        """The epoch counter c of a job that has reported so many: the epochs that are over."""
        return bisect_right(self.sample_thresholds, effective_samples)

    def max_gpus(self, batch: int) -> int:
        """Largest allocation for a global batch: beyond it local batches would fall below the smallest measured."""
        return self.rules.rigid[0] if self.rules.rigid is not None else max(batch // self.min_local, 1)

    # -- a step ------------------------------------------------------------------------------------------------------------

    def times(self, placement: tuple[int, ...], batch_per_gpu: int) -> Times:
        """(step_time, sync_time), s, of a step without accumulation.

        Args:
            placement: GPUs on each node, in any rotation.
            batch_per_gpu: local batch.

        Raises:
            NotMeasuredError: outside the measurements.
        """
        key = (placement, batch_per_gpu)
        found = self._times.get(key)
        if found is None:
            rotated = min(placement[i:] + placement[:i] for i in range(len(placement)))
            found = self._look_up(rotated, batch_per_gpu)
            if not (math.isfinite(found[0]) and found[0] > 0.0):
                where = f"{sum(placement)} GPUs on {len(placement)} nodes with {batch_per_gpu} samples a GPU"
                raise NotMeasuredError(f"{self.name} was not measured on {where}")
            self._times[key] = found
        return found

    def _look_up(self, placement: tuple[int, ...], batch_per_gpu: int) -> Times:
        table = self._sorted.get("".join(map(str, placement))) if max(placement) < 10 else None
        if table is not None:
            return _interpolate(table, batch_per_gpu)
        if self._volume is None:
            self._volume = _Volume(self._measured)
        return self._volume(min(len(placement), MAX_NODES), sum(placement), batch_per_gpu)

    def step_s(self, placement: tuple[int, ...], batch: LocalBatch) -> float:
        """Time of a whole step, accumulation included, s."""
        step_s, sync_s = self.times(placement, batch.batch_per_gpu)
        return step_s + batch.accum_steps * (step_s - sync_s)

    def local_batch(self, batch: int, num_gpus: int, *, always_accumulate: bool = False) -> LocalBatch:
        """How a target batch is divided: at least one accumulation where one GPU runs more than the initial batch.

        ``always_accumulate``: on one GPU whatever the batch, as the artifact's Optimus estimates it.
        """
        per_gpu = math.ceil(batch / num_gpus - _ROUNDING)
        accum_steps = math.ceil(per_gpu / self.max_local - _ROUNDING) - 1
        if num_gpus == 1 and (always_accumulate or batch > self.init_batch):
            accum_steps = max(accum_steps, 1)
        local = math.ceil(per_gpu / (accum_steps + 1) - _ROUNDING)
        return self.capped(LocalBatch(local, accum_steps), num_gpus)

    def capped(self, batch: LocalBatch, num_gpus: int) -> LocalBatch:
        """Never more samples a step than the largest measured batch."""
        most = int(self.max_batch / (num_gpus * (batch.accum_steps + 1)))
        return batch if batch.batch_per_gpu <= most else LocalBatch(most, batch.accum_steps)

    def grid(self, num_gpus: tuple[int, ...]) -> BatchGrid:
        """The batches that may be run on these GPU counts."""
        if num_gpus not in self._grids:
            self._grids[num_gpus] = BatchGrid.of(self, num_gpus)
        return self._grids[num_gpus]

    # -- a batch -----------------------------------------------------------------------------------------------------------

    def grad_stats(self, batch: int, epoch: int) -> tuple[float, float]:
        """(|G|^2, variance) of the gradient at a global batch in an epoch. Raises :class:`NotMeasuredError`."""
        key = (batch, epoch)
        found = self._stats.get(key)
        if found is None:
            low, high, part = self._neighbours(batch)
            a, b = self._measured.validation[low][epoch], self._measured.validation[high][epoch]
            found = (
                a.grad_sqr + (b.grad_sqr - a.grad_sqr) * part,
                a.grad_var + (b.grad_var - a.grad_var) * part,
            )
            self._stats[key] = found
        return found

    def iterations(self, batch: int, epoch: int) -> float:
        """Steps from the start to the end of an epoch (from 0) with a fixed batch. Raises :class:`NotMeasuredError`."""
        low, high, part = self._neighbours(batch)
        first, second = (
            self._measured.validation[low][epoch].iteration,
            self._measured.validation[high][epoch].iteration,
        )
        return first + (second - first) * part

    def remaining_iterations(self, batch: int, epochs_done: int) -> float:
        """What the artifact's oracle tells Optimus: steps left with a fixed batch, the epoch in progress not counted."""
        last = self.epochs - 1
        if epochs_done >= last:
            return 1.0
        return self.iterations(batch, last) - self.iterations(batch, epochs_done)

    def _neighbours(self, batch: int) -> tuple[int, int, float]:
        """The measured batches around one, and how far it lies from the lower (0) to the upper (1)."""
        index = bisect_right(self.batches, batch) - 1
        if index < 0 or batch > self.max_batch:
            raise NotMeasuredError(
                f"{self.name} was not measured with a batch of {batch}: {self.init_batch} to {self.max_batch}"
            )
        low = self.batches[index]
        if low == batch:
            return low, low, 0.0
        high = self.batches[index + 1]
        return low, high, (batch - low) / (high - low)


def _interpolate(table: Sequence[tuple[int, Times]], batch: int) -> Times:
    """Straight lines between measured local batches; NaN outside."""
    if not table[0][0] <= batch <= table[-1][0]:
        return math.nan, math.nan
    if len(table) == 1:
        return table[0][1]
    upper = min(max(next(i for i, (x, _) in enumerate(table) if x >= batch), 1), len(table) - 1)
    (x0, low), (x1, high) = table[upper - 1], table[upper]
    part = batch - x0
    return (
        (high[0] - low[0]) / (x1 - x0) * part + low[0],
        (high[1] - low[1]) / (x1 - x0) * part + low[1],
    )


class _Volume:
    """Placements that were not measured: piecewise linear over (nodes, GPUs, local batch), SciPy's triangulation.

    The points form a lattice, whose triangulation is not unique: their order, and one query at a time, are part of the
    definition.
    """

    def __init__(self, measured: Measurements) -> None:
        from scipy.interpolate import LinearNDInterpolator

        groups: dict[tuple[int, int, int], list[Times]] = {}
        for placement, table in measured.placements.items():
            for batch, times in table.items():
                groups.setdefault((len(placement), sum(map(int, placement)), batch), []).append(times)
        points = sorted(groups)
        values = [_mean(groups[point]) for point in points]
        points += [row[:3] for row in measured.scalability]
        values += [row[3] for row in measured.scalability]
        self._interpolator = LinearNDInterpolator(np.array(points, dtype=np.float64), np.array(values))

    def __call__(self, num_nodes: int, num_gpus: int, batch_per_gpu: int) -> Times:
        step_s, sync_s = self._interpolator([num_nodes, num_gpus, batch_per_gpu])[0].tolist()
        return step_s, sync_s


def _mean(times: Sequence[Times]) -> Times:
    return math.fsum(t[0] for t in times) / len(times), math.fsum(t[1] for t in times) / len(times)
