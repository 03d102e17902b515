"""What a training loop can look at: the part of :class:`~icefrog.runtime.elastic.LayerElastic` that changes nothing."""

from __future__ import annotations

from torch import nn

from icefrog.profile import Profile
from icefrog.runtime.engine import Engine
from icefrog.runtime.goal import Goal
from icefrog.runtime.layers import Layer
from icefrog.runtime.protocol import Outcome
from icefrog.runtime.reporting import Counters
from icefrog.runtime.world import World


class View:
    """Read-only. Whoever inherits from it owns what it looks at."""

    _given_batch: int | None
    _engine: Engine
    _goal: Goal
    _world: World
    _at: Counters

    @property
    def model(self) -> nn.Module:
        """The module to call: the model itself in a single process, a wrapper of it under DDP."""
        return self._engine.parallel.module

    @property
    def layers(self) -> list[Layer]:
        """The freezable units in forward order."""
        return self._engine.layers

    @property
    def global_batch(self) -> int | None:
        """M in samples: what the elastic sampler deals, else as given; None where nobody said."""
        sampler = self._engine.counting.sampler
        return self._given_batch if sampler is None else sampler.global_batch

    @property
    def frozen_layers(self) -> int:
        """l: the boundary in force."""
        return self._engine.freezer.frozen_layers

    @property
    def psi(self) -> float:
        """What one sample is worth now, (0, 1]."""
        return self._engine.psi

    @property
    def effective_samples(self) -> float:
        """Progress so far: a step of M samples adds psi * M."""
        return self._at.effective_samples

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self._at.epoch

    @property
    def rank(self) -> int:
        """Of this process."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """a."""
        return self._world.size

    def profile(self) -> Profile | None:
        """As measured so far; None before the first typical step, or before samples per epoch are known."""
        size = self._at.samples_per_epoch or self._at.epoch_samples
        largest = max(self.global_batch or 0, self._engine.counting.nominal_batch)
        return self._engine.profiler.profile(size, largest) if size else None

    @property
    def outcome(self) -> Outcome | None:
        """``completed``, ``target_missed``, or None while training goes on."""
        return self._goal.outcome(self._at)
