"""The global batch in force, and when it moves: between epochs, on all ranks together.

Inside an epoch the batch stays, so that the sampler's place in it stays exact. It moves in powers of two of M0, where that
makes more effective progress (:mod:`icefrog.estimate.batch`); samples in batches larger than M0 then count by EFF(M). A
larger batch is dealt in larger micro-batches as far as memory surely allows, and in more of them where the job accumulates.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from icefrog.errors import UserError
from icefrog.estimate.batch import BatchLimits, BatchMove, better_batch
from icefrog.estimate.boundary import Guards
from icefrog.estimate.tuner import efficiency
from icefrog.profile import Pipelined
from icefrog.runtime.agent import Agent
from icefrog.runtime.engine import Engine
from icefrog.runtime.lr_rules import LrScaling
from icefrog.runtime.profiling import process_peak_bytes
from icefrog.runtime.reporting import Counters
from icefrog.runtime.rules.base import Situation

SAFE_SHARE = 0.8
"""Of the free memory, what a larger micro-batch may take."""


class Batching:
    """Owned by :class:`~icefrog.runtime.elastic.LayerElastic`.

    Args:
        engine: whose sampler deals the batch.
        agent: the scheduler's grant; None or not elastic: only the user decides whether the batch moves.
        scaling: knows M0, and what the learning rate does.
        guards: hysteresis, and the least number of steps between two moves.
        asked: by the user.

    Raises:
        UserError: asked for without a learning-rate rule, or for a pipeline.
    """

    def __init__(self, engine: Engine, agent: Agent, scaling: LrScaling, guards: Guards, *, asked: bool) -> None:
        grant = agent.grant
        self._engine, self._agent, self._scaling, self._guards = engine, agent, scaling, guards
        self._asked = asked
        self._accumulates = grant is not None or engine.counting.accum_steps > 1
        self._elastic = asked or (
            grant is not None and grant.moves_batch
        )  # on every rank: a later grant changes nothing
        self.worth = 1.0
        """EFF(M) of the batch in force; 1 while the noise scale is not known."""
        self._moved_step = 0  # at which it last moved
        self._trial = False
        self._largest = 0  # m since the process started
        self._kept: dict[str, Any] | None = None  # by a checkpoint, until there is a sampler
        self._unlike_kept = False  # another batch is in force than the one that ``worth`` was of
        if asked and (problem := self._hindrance()) is not None:
            raise problem

    def _hindrance(self) -> UserError | None:
        """Why the batch cannot move."""
        if isinstance(self._engine.parallel.describe(), Pipelined):
            return UserError("the batch of a pipeline does not move", "leave out elastic_batch=True")
        if self._scaling.rule == "none":
            return UserError(
                "a batch that moves with an unchanged learning rate is another training",
                "say what the rate does with LayerElastic(lr_rule='linear'), 'sqrt' or 'adascale'; or leave out "
                "elastic_batch=True",
            )
        return None

    # --- the start

    def start(self, at: Counters) -> str | None:
        """Collective, once checkpoint and sampler are there. What the user should know.

        Raises:
            UserError: asked for, and the loop does not use the elastic sampler.
        """
        if not self._elastic:
            return None
        problem = self._hindrance()
        if self._engine.counting.sampler is None:
            problem = UserError(
                "the batch can only move where the elastic sampler deals it",
                "use DataLoader(data, batch_sampler=elastic.sampler(len(data))), or leave out elastic_batch=True",
            )
            if self._asked:
                raise problem
        if problem is not None:
            self._elastic = False
            return f"the scheduler lets the batch move, and it stays: {problem.message}; {problem.hint}"
        if self._unlike_kept:
            self._unlike_kept = False
            self._weigh(at)
        return None

    def deal(self) -> None:
        """There is a sampler now: a batch that a checkpoint kept comes back."""
        kept, sampler = self._kept, self._engine.counting.sampler
        if kept is None or sampler is None:
            return
        self._kept = None
        batch, largest = int(kept["global_batch"]), int(kept["batch_per_gpu"])
        self._unlike_kept = batch != sampler.global_batch
        if self._shares or batch > self._most(sampler.num_samples):
            return
        self._unlike_kept = False
        replicas, accum_steps = sampler.world_size, sampler.accum_steps
        if _largest_part(batch, replicas, kept["accum_steps"]) == largest:  # as many ranks as then
            accum_steps = kept["accum_steps"]
        elif self._accumulates:  # what the kept micro-batch or the present one needs of memory is known to be there
            accum_steps = -(
                -batch // (replicas * max(largest, _largest_part(sampler.global_batch, replicas, accum_steps)))
            )
        self._put(batch, accum_steps)

    @property
    def brought_back(self) -> tuple[int, int] | None:
        """(samples a GPU, micro-steps) that the checkpoint brought back; None: as granted, or as the loop has it."""
        counting = self._engine.counting
        dealt = self._elastic and counting.sampler is not None and counting.batch_per_gpu > 0
        return (counting.samples_per_gpu, counting.accum_steps) if dealt else None

    @property
    def _shares(self) -> bool:
        """A sharer fits beside its partner with the batch that was priced, and keeps to it."""
        return self._agent.grant is not None and self._agent.grant.shared

    def _most(self, num_samples: int) -> int:
        grant = self._agent.grant
        most = grant.max_global_batch if grant is not None else None
        return num_samples if most is None else min(most, num_samples)

    # --- decisions

    def decide(self, now: Situation, frozen_layers: int, at: Counters) -> str | None:
        """Collective, between two epochs. Move the batch if that pays at the depth that comes; why, if it does.

        Args:
            now: what the freezing rule was told.
            frozen_layers: from the next step on.
            at: the job's place.
        """
        if not self._elastic:
            return None
        engine, world = self._engine, self._engine.world
        fits = world.gather(torch.tensor([float(self._most_per_gpu())], dtype=torch.float64))
        move = world.from_rank0(self._better(now, frozen_layers, at, int(fits.min())) if world.rank == 0 else None)
        if move is None:
            return None
        self._trial, self._moved_step = move.trial, at.step
        self._put(move.config.global_batch, move.config.accum_steps)
        engine.profiler.moved()
        self._weigh(at)
        return str(move.reason)

    def weigh(self, at: Counters) -> None:
        """Collective. A decision is due: EFF of the batch in force by what is known now."""
        if self._elastic:
            self._weigh(at)

    def _weigh(self, at: Counters) -> None:
        engine = self._engine
        phi, base = engine.tracker.noise_scale(), self._scaling.base_batch(at)
        if phi is not None:
            self.worth = float(efficiency(phi, base, max(engine.counting.global_batch, base)))
        self.worth = engine.world.from_rank0(self.worth)

    def _better(self, now: Situation, frozen_layers: int, at: Counters, fits: int) -> BatchMove | None:
        """On rank 0."""
        engine, sampler = self._engine, self._engine.counting.sampler
        phi = engine.tracker.noise_scale()
        assert sampler is not None
        if phi is None or now.profile is None or self._shares:
            return None
        config = replace(now.config, frozen_layers=frozen_layers)
        if config.global_batch != sampler.global_batch:  # dealt unevenly
            return None
        measured = engine.profiler.largest_batch(config.num_gpus)
        known = measured >= config.batch_per_gpu
        if (self._trial and not known) or at.step - self._moved_step < self._guards.dwell_steps:
            return None
        move = better_batch(
            now.profile,
            config,
            BatchLimits(self._scaling.base_batch(at), self._most(sampler.num_samples), fits, self._accumulates),
            num_nodes=now.num_nodes,
            phi=phi,
            largest_measured=max(measured, config.batch_per_gpu),
            measured_s=now.steps_s,
            hysteresis=0.0 if self._trial else self._guards.hysteresis,
            may_try=known and now.cache is None,
        )
        self._trial = False
        return move

    def _put(self, global_batch: int, accum_steps: int) -> None:
        """Collective. In force from the next step on; no step is in progress."""
        engine, sampler = self._engine, self._engine.counting.sampler
        assert sampler is not None
        sampler.global_batch, sampler.accum_steps = global_batch, accum_steps
        engine.counting.batch_per_gpu = _largest_part(global_batch, sampler.world_size, accum_steps)
        engine.accumulate(accum_steps)

    def _most_per_gpu(self) -> int:
        """m for which this rank's memory surely suffices: what a process needs grows at most in proportion to it."""
        engine = self._engine
        present = engine.counting.samples_per_gpu
        self._largest = max(self._largest, present)
        local_ranks = -(-engine.world.size // engine.nodes)
        free = SAFE_SHARE * free_bytes(engine.device, local_ranks)
        return max(int(self._largest * (1.0 + free / process_peak_bytes(engine.device.type))), present)

    # --- checkpoints

    def state_dict(self) -> dict[str, Any] | None:
        """JSON values; None: the batch does not move."""
        if not self._elastic:
            return None
        counting = self._engine.counting
        return {
            "global_batch": counting.global_batch,
            "batch_per_gpu": counting.samples_per_gpu,
            "accum_steps": counting.accum_steps,
            "worth": self.worth,
            "moved_step": self._moved_step,
            "trial": self._trial,
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Collective. Inverse of :meth:`state_dict`; before the statistics are loaded, which depend on how it is dealt."""
        if not self._elastic or state is None:
            return
        self.worth, self._moved_step, self._trial = state["worth"], state["moved_step"], state["trial"]
        self._kept = state
        self.deal()


def _largest_part(global_batch: int, replicas: int, accum_steps: int) -> int:
    """m, samples."""
    return -(-global_batch // (replicas * accum_steps))


def free_bytes(device: torch.device, local_ranks: int) -> float:
    """Memory that this process may still take: of its GPU, or its part of the machine's; 0 where that is not known."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(float(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 0.0
    try:  # of a container
        most, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
        free = free if most == "max" else min(free, float(most) - float(used))
    except (OSError, ValueError):
        pass
    return max(free, 0.0) / local_ranks
