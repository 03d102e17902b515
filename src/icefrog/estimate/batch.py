"""Whether another global batch makes more effective progress, E = psi(l) EFF(M) T(m, k, l), at the depth in force. Pure.

The Layer Tuner's table (:mod:`icefrog.estimate.tuner`) says what each batch is worth. Here is what a training that runs
adds: one doubling at a time, since the speed of a batch that was never run is a guess; and a batch that needs more samples
on a GPU than were ever measured is *tried* where that can cost little, since the guess is a cautious one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from icefrog.estimate.tuner import TunerRule, TunerTable, efficiency, pick
from icefrog.profile import FloatArray, Profile
from icefrog.types import Config

Cells: TypeAlias = np.ndarray[tuple[int, int, int], np.dtype[np.bool_]]
"""Of a table, shape (A, R, l + 1)."""
TRIAL_COST = 0.05
"""Largest part of EFF that a batch may cost that is tried, in case that it is no faster at all."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What a job's batch may become."""

    base_batch: int
    """M0, samples: the learning rate is of this one. Batches are powers of two of it, and not smaller."""
    most_samples: int
    """Largest M."""
    batch_per_gpu: int
    """Largest m that surely fits into memory, samples."""
    accumulates: bool
    """Whether the number of micro-steps may grow."""


@dataclass(frozen=True, slots=True)
class BatchMove:
    """Another batch, and why."""

    config: Config
    trial: bool
    """It is tried: to be kept only if its speed, once measured, is worth it."""
    reason: str


def batch_options(batch: int, limits: BatchLimits) -> tuple[int, ...]:
    """Global batches to choose from, ascending: the present one, and powers of two of M0 up to twice that."""
    most = min(limits.most_samples, 2 * batch)
    powers = {limits.base_batch << power for power in range(most.bit_length())}
    return tuple(sorted({batch} | {option for option in powers if option <= most}))


def better_batch(
    profile: Profile,
    config: Config,
    limits: BatchLimits,
    *,
    num_nodes: int,
    phi: float,
    largest_measured: int,
    measured_s: Mapping[int, float],
    hysteresis: float,
    may_try: bool = True,
) -> BatchMove | None:
    """The batch with the largest E at ``config``'s depth; None: the present one stays.

    Args:
        profile: as measured so far.
        config: what the job runs with.
        limits: what its batch may become.
        num_nodes: nodes that its GPUs spread over.
        phi: gradient noise scale S / |G|^2, samples.
        largest_measured: the most samples a GPU whose speed is in the profile.
        measured_s: seconds of a step by depth, measured with ``config``'s batch.
        hysteresis: least relative gain in E of a move.
        may_try: whether a larger batch may be tried whose speed is not known.
    """
    batch, depth = config.global_batch, config.frozen_layers
    options = batch_options(batch, limits)
    rule = TunerRule(((config.num_gpus, num_nodes),), options, limits.base_batch, depth)
    fitting = profile.model_copy(update={"max_local_batch": max(limits.batch_per_gpu, config.batch_per_gpu)})
    table = TunerTable.of(fitting, rule)
    if len(options) == 1 or table.find(config) is None:  # ranks that do not divide it: it is dealt unevenly, and stays
        return None
    table = table.corrected(config, measured_s)
    psi = np.where(np.arange(profile.num_layers + 1) == depth, 1.0, np.nan)  # the same for all: it decides nothing
    offered = _offered(table, config, limits)
    progress = np.where(offered, table.progress(psi, phi), 0.0)
    best = pick(table, psi, progress, current=config, hysteresis=hysteresis)[config.num_gpus].config
    held = float(progress[table.find(config) or (0, 0, 0)])
    if best.global_batch != batch:
        gain = float(progress[table.find(best) or (0, 0, 0)]) / held - 1.0
        return BatchMove(best, False, f"batch {batch} -> {best.global_batch}: {gain:+.1%} progress, phi {phi:.3g}")
    if may_try:
        return _trial(table, offered & (table.batch_per_gpu[:, :, None] > largest_measured), config, limits, phi)
    return None


def _offered(table: TunerTable, config: Config, limits: BatchLimits) -> Cells:
    """Cells that may be moved to: the present batch as it is dealt, others in micro-steps where there may be more."""
    same = (table.batch_per_gpu == config.batch_per_gpu) & (table.accum_steps == config.accum_steps)
    other = table.global_batch != config.global_batch
    if not limits.accumulates:
        other &= table.accum_steps <= config.accum_steps
    return np.asarray((same | other)[:, :, None] & table.legal)


def _trial(
    table: TunerTable,
    unknown: Cells,
    config: Config,
    limits: BatchLimits,
    phi: float,
) -> BatchMove | None:
    """The next larger batch in the fewest passes, where it costs little even if it is no faster."""
    depth, batch = config.frozen_layers, config.global_batch
    rows = np.flatnonzero(unknown[0, :, depth] & (table.global_batch[0] > batch))
    if not len(rows):
        return None
    row = int(rows[0])
    larger = int(table.global_batch[0, row])
    worth: FloatArray = efficiency(phi, limits.base_batch, np.array([batch, larger]))
    cost = 1.0 - float(worth[1] / worth[0])
    if cost > TRIAL_COST:
        return None
    tried = replace(config, batch_per_gpu=int(table.batch_per_gpu[0, row]), accum_steps=int(table.accum_steps[0, row]))
    return BatchMove(tried, True, f"batch {batch} -> {larger}: tried, it costs at most {cost:.1%}, phi {phi:.3g}")
