"""The Layer Tuner (Eq. 15): (m*, l*) = argmax over legal (m, l) of E(a, s, m, l) = psi(l) EFF(M) T(a, s, m, l).

Everything but psi and EFF is fixed for a profile, so T, memory and utilisation are tabulated once
(:class:`TunerTable`) and one decision over all GPU counts is a product and an argmax.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from icefrog.errors import UserError
from icefrog.estimate import occupancy
from icefrog.estimate.penalty import frozen_penalty
from icefrog.estimate.sharing import SHARE_SLOWDOWN
from icefrog.estimate.throughput import step_s
from icefrog.profile import FloatArray, Profile
from icefrog.types import Config, Estimate

MAX_ACCUM_OPTIONS = 4
"""Ways of splitting one global batch into micro-steps that are looked at, the fewest micro-steps first."""


@dataclass(frozen=True, slots=True)
class TunerChoice:
    """What the tuner picked for one GPU count, and why."""

    config: Config
    psi: float
    throughput: float  # T, samples/s, with lambda when shared
    effective_progress: float  # E, full-layer samples/s
    step_s: float
    mem_bytes: float
    util_pct: float
    reason: str = ""  # filled in by :func:`tune`

    def estimate(self, age_s: float, remaining_samples: float) -> Estimate:
        """The Estimate with T_acc = T_age + P / E (Eq. 1, 16)."""
        return Estimate(
            step_s=self.step_s,
            throughput=self.throughput,
            psi=self.psi,
            effective_progress=self.effective_progress,
            mem_bytes=self.mem_bytes,
            util_pct=self.util_pct,
            tta_s=age_s + remaining_samples / self.effective_progress,
            remaining_s=remaining_samples / self.effective_progress,
        )


@dataclass(frozen=True, slots=True)
class TunerRule:
    """All that a table depends on besides the profile; hashable, so that tables are cached by it."""

    placements: tuple[tuple[int, int], ...]  # (num_gpus, num_nodes), one entry for each GPU count
    global_batches: tuple[int, ...]
    initial_batch: int
    max_frozen_layers: int
    gpu_mem_bytes: float = math.inf


def max_frozen_layers(num_layers: int, max_fraction: float) -> int:
    """floor(max_fraction * L), but one layer always trains."""
    return max(min(math.floor(max_fraction * num_layers + 1e-9), num_layers - 1), 0)


def split_batch(profile: Profile, global_batch: int, num_gpus: int) -> tuple[tuple[int, int], ...]:
    """Legal (batch_per_gpu, accum_steps) with a * m * k = M, the fewest micro-steps first; empty: M does not divide.

    m stays within the profile's local batches. More than one way is offered since a smaller m needs less
    memory.
    """
    return _split(global_batch, num_gpus, profile.min_local_batch, profile.max_local_batch)


@lru_cache(maxsize=4096)
def _split(global_batch: int, num_gpus: int, smallest: int, largest: int) -> tuple[tuple[int, int], ...]:
    if global_batch % num_gpus:
        return ()
    per_gpu = global_batch // num_gpus
    fewest = -(-per_gpu // largest)
    most = per_gpu // smallest
    options: list[tuple[int, int]] = []
    for accum_steps in range(fewest, most + 1):
        if per_gpu % accum_steps == 0:
            options.append((per_gpu // accum_steps, accum_steps))
            if len(options) == MAX_ACCUM_OPTIONS:
                break
    return tuple(options)


def efficiency(phi: float, initial_batch: int, global_batch: npt.ArrayLike) -> FloatArray:
    """EFF(M) = (phi + M0) / (phi + M) of Pollux: what a sample in batches of M is worth, in samples of M0.

    Args:
        phi: gradient noise scale S / |G|^2, samples, >= 0.
        initial_batch: M0, samples.
        global_batch: M, samples.
    """
    return np.asarray((phi + initial_batch) / (phi + np.asarray(global_batch)))


class TunerTable:
    """T, memory and utilisation of every legal (a, M, m, k, l) of one profile, as arrays (A, R, l_max + 1).

    A: GPU counts of the rule; R: rows (global batch x split), padded by rows that are not legal. Memory
    beyond the GPU makes a cell illegal. Use :meth:`of`, which caches the table with the (immutable) profile.
    """

    def __init__(self, profile: Profile, rule: TunerRule) -> None:
        self.profile = profile
        self.rule = rule
        self.depths = np.arange(min(rule.max_frozen_layers, profile.num_layers - 1) + 1)
        rows = [
            [(m, k, batch) for batch in rule.global_batches for m, k in split_batch(profile, batch, gpus)]
            for gpus, _ in rule.placements
        ]
        shape = (len(rows), max((len(row) for row in rows), default=0))
        self.batch_per_gpu = np.zeros(shape, dtype=np.intp)  # 0: no such row
        self.accum_steps = np.ones(shape, dtype=np.intp)
        self.global_batch = np.zeros(shape, dtype=np.intp)
        for index, row in enumerate(rows):
            for column, (m, k, batch) in enumerate(row):
                self.batch_per_gpu[index, column] = m
                self.accum_steps[index, column] = k
                self.global_batch[index, column] = batch
        self._tabulate()
        self._positions = {gpus: index for index, (gpus, _) in enumerate(rule.placements)}

    @classmethod
    def of(cls, profile: Profile, rule: TunerRule) -> TunerTable:
        """The table, from the profile's memo if it was built before."""
        table = profile.memo.get(rule)
        if not isinstance(table, cls):
            table = cls(profile, rule)
            profile.memo[rule] = table
        return table

    def _tabulate(self) -> None:
        legal = self.batch_per_gpu > 0
        m = np.where(legal, self.batch_per_gpu, 1)[:, :, None]
        gpus = np.array([a for a, _ in self.rule.placements], dtype=np.intp).reshape(-1, 1, 1)
        nodes = np.array([n for _, n in self.rule.placements], dtype=np.intp).reshape(-1, 1, 1)
        self.step_s = step_s(self.profile, gpus, nodes, m, self.depths, self.accum_steps[:, :, None])
        self.mem_bytes = occupancy.mem_bytes(self.profile, m, self.depths) + np.zeros_like(self.step_s)
        self.util_pct = occupancy.util_pct(self.profile, m, self.depths) + np.zeros_like(self.step_s)
        self.legal = legal[:, :, None] & (self.mem_bytes <= self.rule.gpu_mem_bytes)
        self.throughput = np.where(self.legal, self.global_batch[:, :, None] / self.step_s, 0.0)

    def progress(self, psi: FloatArray, phi: float | None) -> FloatArray:
        """E of every cell alone on its GPUs, shape (A, R, l_max + 1); 0 where not legal or not offered."""
        offered = psi[: len(self.depths)]
        worth = np.where(np.isnan(offered), 0.0, offered)
        if len(self.rule.global_batches) == 1:
            return np.asarray(self.throughput * worth)
        return np.asarray(self.throughput * self._efficiency(phi)[:, :, None] * worth)

    def _efficiency(self, phi: float | None) -> FloatArray:
        """phi unknown counts as 0, so that a larger batch is not believed in."""
        noise = max(phi, 0.0) if phi is not None else 0.0
        return efficiency(noise, self.rule.initial_batch, np.maximum(self.global_batch, 1))

    def position(self, num_gpus: int) -> int | None:
        """Index of a GPU count in the first axis."""
        return self._positions.get(num_gpus)

    def find(self, config: Config) -> tuple[int, int, int] | None:
        """The legal cell of a configuration, if there is one."""
        index = self._positions.get(config.num_gpus)
        if index is None or not 0 <= config.frozen_layers < len(self.depths):
            return None
        same_accum = self.accum_steps[index] == config.accum_steps
        match = same_accum & (self.batch_per_gpu[index] == config.batch_per_gpu)
        row = int(match.argmax()) if match.any() else -1
        if row < 0 or not self.legal[index, row, config.frozen_layers]:
            return None
        return index, row, config.frozen_layers

    def corrected(self, config: Config, measured_s: Mapping[int, float]) -> TunerTable:
        """A copy that agrees with seconds of a step, by depth, measured with ``config``'s batch and GPUs.

        Other batches on as many GPUs are off by the same factor.
        """
        table = copy.copy(self)
        table.step_s, table.throughput = self.step_s.copy(), self.throughput.copy()
        for depth, seconds in measured_s.items():
            cell = self.find(replace(config, frozen_layers=depth))
            if cell is not None:
                factor = seconds / float(self.step_s[cell])
                table.step_s[cell[0], :, depth] *= factor
                table.throughput[cell[0], :, depth] /= factor
        return table

    def choice(
        self,
        cell: tuple[int, int, int],
        psi: FloatArray,
        progress: float,
        *,
        shared: bool = False,
        sharing_speed: float = SHARE_SLOWDOWN,
    ) -> TunerChoice:
        """The cell as a TunerChoice; ``progress`` is E alone on the GPU, ``sharing_speed`` lambda of a sharer."""
        index, row, depth = cell
        speed = sharing_speed if shared else 1.0
        config = Config(
            num_gpus=self.rule.placements[index][0],
            batch_per_gpu=int(self.batch_per_gpu[index, row]),
            accum_steps=int(self.accum_steps[index, row]),
            frozen_layers=depth,
            shared=shared,
        )
        return TunerChoice(
            config=config,
            psi=float(psi[depth]),
            throughput=float(self.throughput[cell]) * speed,
            effective_progress=progress * speed,
            step_s=float(self.step_s[cell]) / speed,
            mem_bytes=float(self.mem_bytes[cell]),
            util_pct=float(self.util_pct[cell]),
        )


def penalties(profile: Profile, variance: npt.ArrayLike | None) -> FloatArray:
    """psi for l = 0..L; not ready (None): only l = 0 is offered, the rest is NaN."""
    if variance is None:
        psi = np.full(profile.num_layers + 1, np.nan)
        psi[0] = 1.0
        return psi
    psi = frozen_penalty(variance)
    if len(psi) != profile.num_layers + 1:
        raise ValueError(f"{len(psi) - 1} variances for the {profile.num_layers} layers of {profile.name}")
    return psi


def best_per_gpu_count(
    table: TunerTable,
    psi: FloatArray,
    *,
    phi: float | None = None,
    current: Config | None = None,
    hysteresis: float = 0.0,
    shared: bool = False,
) -> dict[int, TunerChoice]:
    """Eq. 15 for every GPU count of the table at once.

    Args:
        table: of the profile under the job's rule.
        psi: of every depth, shape (L + 1,), from :func:`penalties`; NaN: not offered.
        phi: gradient noise scale, samples; only used where the batch may move.
        current: what the job runs with. At its GPU count it is kept unless the best gains more than
            ``hysteresis``, and always among equals.
        hysteresis: least relative gain in E of a switch; 0 is the paper's rule.
        shared: price the sharing of the GPU in (lambda); the argmax is the same.

    Returns:
        num_gpus -> choice; a count without any legal configuration is missing. Equal E: the fewest layers
        frozen, then the fewest micro-steps of the smallest batch.
    """
    progress = table.progress(psi, phi)
    return pick(table, psi, progress, current=current, hysteresis=hysteresis, shared=shared)


def pick(
    table: TunerTable,
    psi: FloatArray,
    progress: FloatArray,
    *,
    current: Config | None = None,
    hysteresis: float = 0.0,
    shared: bool = False,
) -> dict[int, TunerChoice]:
    """The argmax of :func:`best_per_gpu_count` over E as :meth:`TunerTable.progress` gives it, (A, R, l_max + 1)."""
    if progress.size == 0:
        return {}
    by_depth = np.swapaxes(progress, 1, 2).reshape(len(progress), -1)  # ties go to the shallowest depth
    depths, rows = np.divmod(by_depth.argmax(axis=1), progress.shape[1])
    held = table.find(current) if current is not None else None
    choices: dict[int, TunerChoice] = {}
    for index, (num_gpus, _) in enumerate(table.rule.placements):
        cell = (index, int(rows[index]), int(depths[index]))
        value = float(progress[cell])
        if value <= 0.0:
            continue
        kept = float(progress[held]) if held is not None and held[0] == index else 0.0
        if held is not None and kept > 0.0 and value <= kept * (1.0 + hysteresis) * (1.0 + 1e-12):
            cell, value = held, kept
        choices[num_gpus] = table.choice(cell, psi, value, shared=shared)
    return choices


def explain(table: TunerTable, psi: FloatArray, progress: FloatArray, choice: TunerChoice) -> str:
    """One line on why the tuner picked this configuration, for people."""
    index = table.position(choice.config.num_gpus)
    cell = table.find(choice.config)
    if index is None or cell is None:
        return "not a legal configuration"
    if np.isnan(psi[1:]).all():
        return "no depth is offered (no gradient statistics yet, or freezing is off)"
    best, chosen = float(progress[index].max()), float(progress[cell])
    if best > chosen:
        return f"kept at {choice.config.frozen_layers} frozen: the best would gain {best / chosen - 1.0:.1%}"
    if choice.config.frozen_layers == 0:
        return "full training makes the most progress"
    unfrozen = float(progress[index, :, 0].max())
    against = f"E {chosen:.4g} against {unfrozen:.4g}" if unfrozen > 0 else "full training does not fit"
    return f"{choice.config.frozen_layers} frozen: psi {choice.psi:.3f}, {against}"


def tune(
    profile: Profile,
    variance: npt.ArrayLike | None,
    *,
    num_gpus: int,
    num_nodes: int = 1,
    shared: bool = False,
    global_batches: Sequence[int],
    max_frozen_layers: int,
    min_frozen_layers: int = 0,
    phi: float | None = None,
    initial_batch: int | None = None,
    gpu_mem_bytes: float = math.inf,
    current: Config | None = None,
    hysteresis: float = 0.0,
    measured_s: Mapping[int, float] | None = None,
) -> TunerChoice:
    """(m*, l*) for the GPUs a job was given (Eq. 15); what a job runs at every re-allocation and epoch start.

    Args:
        profile: of the job.
        variance: V of :class:`~icefrog.estimate.penalty.GradientTracker`, shape (L,); None: not ready,
            nothing is frozen.
        num_gpus: a.
        num_nodes: nodes that they spread over.
        shared: whether the GPU is shared.
        global_batches: allowed M; one entry: fixed.
        max_frozen_layers: largest l; see :func:`max_frozen_layers`. One layer always trains.
        min_frozen_layers: smallest l (a sharer must fit beside its partner); no limit where no deeper one is offered.
        phi: gradient noise scale, samples; None: unknown.
        initial_batch: M0; default: the smallest of ``global_batches``.
        gpu_mem_bytes: configurations that are predicted to need more are not legal.
        current: kept among equals, and unless the gain exceeds ``hysteresis``.
        hysteresis: least relative gain in E of a switch.
        measured_s: seconds of a step by depth, where they were measured with ``current``: they count, not the profile.

    Raises:
        UserError: no global batch can be split over the GPUs within the profile's local batches and the
            memory.
        ValueError: variance of another length, negative or not finite.
    """
    first = initial_batch if initial_batch is not None else min(global_batches)
    rule = TunerRule(((num_gpus, num_nodes),), tuple(global_batches), first, max_frozen_layers, gpu_mem_bytes)
    table = TunerTable.of(profile, rule)
    if current is not None and measured_s:
        table = table.corrected(current, measured_s)
    psi = penalties(profile, variance)
    if np.isfinite(psi[min_frozen_layers : max_frozen_layers + 1]).any():
        psi = np.where(np.arange(len(psi)) < min_frozen_layers, np.nan, psi)
    progress = table.progress(psi, phi)
    choices = pick(table, psi, progress, current=current, hysteresis=hysteresis, shared=shared)
    if num_gpus not in choices:
        raise UserError(
            f"no global batch of {list(global_batches)} can run on {num_gpus} GPUs with local batches of "
            f"{profile.min_local_batch} to {profile.max_local_batch} in {gpu_mem_bytes:.3g} bytes",
            "choose a batch that the GPU count divides, or other GPU counts",
        )
    choice = choices[num_gpus]
    return replace(choice, reason=explain(table, psi, progress, choice))
