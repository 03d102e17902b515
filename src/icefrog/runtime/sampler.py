"""A batch sampler with one cursor for all ranks: each sample exactly once an epoch, whatever the world size becomes.

The order of an epoch depends on (seed, epoch) alone and is cut into global batches of M samples; a global batch is dealt
over the micro-steps and ranks. So a job that is resized in mid-epoch sees the same global batches as one that is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch.utils.data import Sampler

from icefrog.errors import UserError


@dataclass(frozen=True, slots=True)
class StepSizes:
    """How one optimizer step is dealt: samples of each (micro-step, rank), shape (accum_steps, world_size)."""

    sizes: tuple[tuple[int, ...], ...]

    @property
    def total(self) -> int:
        """M of this step, samples."""
        return sum(sum(row) for row in self.sizes)

    def of_rank(self, rank: int) -> int:
        """n_r: samples of one rank over all its micro-steps."""
        return sum(row[rank] for row in self.sizes)


class ElasticSampler(Sampler[list[int]]):
    """Use as ``DataLoader(dataset, batch_sampler=elastic.sampler(len(dataset)))``.

    An epoch takes ceil(N / M) steps of M samples; where the last would be smaller than M / 2, it and the one before are of
    equal size. So a job that is resized in mid-epoch, wherever that is, has at least M / 2 samples left to deal, and every
    sample comes exactly once at up to M / 2 ranks x micro-steps. Beyond that (or where M itself changed in mid-epoch) a
    resize can leave fewer samples than ranks x micro-steps: those are left out of that epoch, since no rank can step on
    nothing.

    Args:
        num_samples: N, samples of the dataset.
        global_batch: M, samples of one optimizer step over all ranks and micro-steps.
        rank: of this process.
        world_size: a.
        accum_steps: k, micro-steps of one optimizer step.
        seed: of the order of samples; the same on all ranks.

    Raises:
        UserError: fewer samples, or a smaller batch, than ranks x micro-steps.
    """

    def __init__(
        self,
        num_samples: int,
        global_batch: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        accum_steps: int = 1,
        seed: int = 0,
    ) -> None:
        parts = world_size * accum_steps
        if min(num_samples, global_batch) < parts:
            raise UserError(
                f"{num_samples} samples in global batches of {global_batch} cannot be dealt over {world_size} ranks "
                f"x {accum_steps} micro-steps",
                "use a larger global batch, or fewer ranks",
            )
        self.num_samples = num_samples
        self.global_batch = global_batch
        self.rank = rank
        self.world_size = world_size
        self.accum_steps = accum_steps
        self.seed = seed
        self.epoch = 0
        self.cursor = 0  # samples of the epoch already consumed, over all ranks

    def seek(self, epoch: int, cursor: int = 0) -> None:
        """The next iteration starts at this place."""
        self.epoch, self.cursor = epoch, min(cursor, self.num_samples)

    def next_size(self, cursor: int) -> int:
        """Samples of the optimizer step that starts at ``cursor``; 0 at the end of the epoch."""
        left, batch, parts = self.num_samples - cursor, self.global_batch, self.world_size * self.accum_steps
        if left < parts:
            return 0
        if left <= batch:
            return left
        if 2 * left >= 3 * batch and left - batch >= parts:
            return batch
        return left - left // 2 if left // 2 >= parts else left  # two equal steps; too small for so many parts: one

    def step_sizes(self, cursor: int) -> StepSizes:
        """How the step at ``cursor`` is dealt: near-equal parts."""
        parts = self.world_size * self.accum_steps
        low, more = divmod(self.next_size(cursor), parts)
        flat = [low + (index < more) for index in range(parts)]
        rows = [tuple(flat[row * self.world_size : (row + 1) * self.world_size]) for row in range(self.accum_steps)]
        return StepSizes(tuple(rows))

    def order(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The epoch's permutation of 0..N-1."""
        return np.random.default_rng((self.seed, self.epoch)).permutation(self.num_samples)

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        cursor = self.cursor
        while self.next_size(cursor):
            for row in self.step_sizes(cursor).sizes:
                start = cursor + sum(row[: self.rank])
                yield order[start : start + row[self.rank]].tolist()
                cursor += sum(row)

    def __len__(self) -> int:
        """Micro-batches that this rank still yields in the epoch."""
        cursor, steps = self.cursor, 0
        while size := self.next_size(cursor):
            cursor += size
            steps += 1
        return steps * self.accum_steps
