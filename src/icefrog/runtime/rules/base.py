"""The interface of freezing rules. No torch is imported here.

A rule is one class with one method: it sees a :class:`Situation` and returns a :class:`Proposal`. It runs on rank 0, at the
end of each epoch (and every ``tune_every_steps`` steps, and once before a fresh run's first step); all ranks obey.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from icefrog.estimate.penalty import frozen_penalty
from icefrog.estimate.throughput import throughput
from icefrog.profile import LayerCost, Profile
from icefrog.runtime.savings import Saving
from icefrog.spec import Mode, Target
from icefrog.types import Config

if TYPE_CHECKING:
    import torch
    from torch import nn

    from icefrog.runtime.layers import Layer


@dataclass(frozen=True, slots=True)
class Bounds:
    """The depths that user and scheduler allow: ``min_frozen <= l <= max_frozen <= L - 1``."""

    min_frozen: int
    max_frozen: int

    def clamp(self, depth: int) -> int:
        """The nearest depth that is allowed."""
        return min(max(depth, self.min_frozen), self.max_frozen)


@dataclass(frozen=True, slots=True)
class Gradients:
    """Per-layer gradient statistics, one value a layer (section 3 of ``docs/model.md``)."""

    variance: tuple[float, ...]
    """S: per-sample variance of the (preconditioned) gradient."""
    sqr_norm: tuple[float, ...]
    """Squared norm of the mean gradient, >= 0."""
    fresh: tuple[bool, ...]
    """Whether the value is of recent steps; otherwise the one stored when the layer froze."""
    variance_error: tuple[float, ...] = ()
    """Standard error of the variance; NaN where the value is not fresh."""


@dataclass(frozen=True, slots=True)
class CacheState:
    """The frozen prefix's cache, where there is one."""

    hits: int
    misses: int
    off_reason: str | None


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything that a rule is told. Values that are not known yet are None (or 0 where that is said)."""

    step: int
    """Optimizer steps so far; 0: nothing has been trained or measured."""
    samples: int
    epoch: int
    """Epochs completed."""
    effective_samples: float
    share_done: float
    """Effective samples / P0; 0 while P0 is unknown. May exceed 1 by a step."""
    steps_since_move: int
    """Since the boundary last moved; very large if it never did."""
    config: Config
    """In force. ``config.frozen_layers`` is the boundary l."""
    num_nodes: int
    bounds: Bounds
    layers: tuple[LayerCost, ...]
    """Names, parameter bytes, training FLOPs of a sample (0 before the first step), in forward order."""
    psi: float
    """Worth of a sample at the boundary in force, (0, 1]."""
    step_s: float
    """Median of recent steps at this configuration; 0 where none was measured."""
    forward_s: float
    """Of step_s, the forward passes; 0 where none was measured."""
    measured_throughput: float
    """T at the configuration in force, samples/s; 0 where none was measured."""
    gradients: Gradients | None = None
    """None until every layer has enough steps."""
    profile: Profile | None = None
    """As measured so far: the speed of every depth."""
    target: Target | None = None
    metrics: tuple[float, ...] = ()
    """Every finite validation metric so far, in order."""
    best_metric: float | None = None
    stalled: int = 0
    """Validation metrics since the best one."""
    mode: Mode = "max"
    """Whether more of the metric is better, as the user said or as it looks."""
    train_loss: float | None = None
    """Mean over the steps since the last decision, where the loop calls ``elastic.note_loss``."""
    learning_rates: tuple[float, ...] = ()
    """Of the optimizer's parameter groups."""
    cache: CacheState | None = None
    steps_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds of a whole step by depth, of the depths that were measured long enough, all else as in ``config``."""
    saving: Saving | None = None
    """What the boundary in force was to save, and what it saves; None until both were measured."""

    @property
    def frozen_layers(self) -> int:
        """l: the boundary in force."""
        return self.config.frozen_layers

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    def throughput(self, depth: int) -> float | None:
        """T with ``depth`` layers frozen, samples/s, all else as now; None before anything was measured."""
        if depth == self.frozen_layers and self.measured_throughput > 0:
            return self.measured_throughput
        now = self.config
        if not now.shared and (step_s := self.steps_s.get(depth, 0.0)) > 0:
            return now.global_batch / step_s
        if self.profile is None:
            return None
        found = throughput(
            self.profile, now.num_gpus, self.num_nodes, now.batch_per_gpu, depth, now.accum_steps, shared=now.shared
        )
        return float(found)

    def worth(self, depth: int) -> float | None:
        """psi with ``depth`` layers frozen (Eq. 3); None where the statistics do not say."""
        if depth == 0:
            return 1.0
        if self.gradients is None:
            return self.psi if depth == self.frozen_layers else None
        psi = float(frozen_penalty(self.gradients.variance)[depth])
        return psi if math.isfinite(psi) else None

    def at(self, depth: int, reason: str, effective_progress: float | None = None) -> Proposal:
        """Propose ``depth``, or the nearest that the bounds allow; then the reason says so."""
        allowed = self.bounds.clamp(depth)
        if allowed != depth:
            reason = f"{reason} (bounds {self.bounds.min_frozen}..{self.bounds.max_frozen})"
        return Proposal(allowed, reason, effective_progress if allowed == depth else None)

    def stay(self, reason: str) -> Proposal:
        """Propose the boundary in force."""
        return self.at(self.frozen_layers, reason)


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a rule wants; plain values."""

    frozen_layers: int
    """l from the next step on, within the bounds."""
    reason: str
    """One line for people; never empty."""
    effective_progress: float | None = None
    """E = psi T expected there, samples/s, where the rule knows better than Eq. 3 and the profile."""
    worth: float | None = None
    """psi there, (0, 1], where the rule knows better than Eq. 3: what a sample adds to the job's progress."""
    forget_momentum: bool = False
    """Layers that this opens begin without the momentum (first moments) of when they froze, with all other state of then."""


@dataclass(frozen=True)
class Hands:
    """What an observing rule may look at. It must leave all of it as it found it."""

    step: int
    """Optimizer steps done before the one that is looked at."""
    model: nn.Module
    """The plain model (no wrapper)."""
    layers: Sequence[Layer]
    """In forward order, with parameters by name. ``param.grad`` is what the optimizer gets: averaged, and clipped."""
    frozen_layers: int
    optimizer: torch.optim.Optimizer | None = None


class FreezingRule(ABC):
    """Decides the boundary. Write :meth:`propose`; the rest is optional.

    A rule may keep memory between decisions; what matters of it is in :meth:`state_dict`, so that a resumed job decides as
    if it had not stopped. It must be deterministic. :class:`icefrog.testing.rules.RuleContract` checks a rule.
    """

    name: ClassVar[str] = ""
    """For reports and checkpoints; default: the class's name."""
    first_looks: ClassVar[Sequence[int]] = ()
    """Steps of the job after which the rule is asked besides: for one that knows what it wants before an epoch is over."""

    reads_statistics: ClassVar[bool] = True
    """Whether the rule needs ``Situation.gradients``. A job on its own does not measure them for one that does not; then
    psi is what the rule says, or the share of the parameters."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = cls.__dict__.get("name") or cls.__name__

    @abstractmethod
    def propose(self, now: Situation) -> Proposal:
        """The boundary from the next step on. Rank 0 only."""

    def expect(self, hands: Hands) -> None:  # noqa: B027 - optional
        """Before a step's forward pass, once it is known: hook the model, if this step is to be looked at. Rank 0 only.

        Called with :meth:`observe`, and only for rules that override that.
        """

    def observe(self, hands: Hands) -> None:
        """Between a step's backward pass and the optimizer. Rank 0 only; called only where overridden."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027 - optional
        """Training is over: take hooks off the model."""

    def signal(self) -> Sequence[float] | None:
        """Of a rule that goes by them, shares of first-order progress by layer (:mod:`icefrog.estimate.progress`). Rank 0.

        Of frozen layers as they froze. The scheduler then prices depths by them, too. None: it does not, or not yet.
        """
        return None

    def lr_factors(self, share_done: float, num_layers: int) -> Sequence[float]:
        """What to multiply each layer's update by at this step, >= 0. On all ranks, each step; only where overridden.

        It may use nothing but its arguments and what :meth:`state_dict` holds: after each decision rank 0's state is given
        to the other ranks. The factor acts on the learning rate; see :mod:`icefrog.runtime.layer_rates`.
        """
        return np.ones(num_layers).tolist()

    def state_dict(self) -> dict[str, Any]:
        """Memory between decisions: JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        if state:
            raise NotImplementedError(f"{type(self).__name__} has a state_dict but no load_state_dict")

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is too large for :meth:`state_dict`, by name: in checkpoints of the whole job only."""
        return {}

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Inverse of :meth:`tensors`. Not called where the checkpoint has none: the rule then starts that part afresh."""
        if tensors:
            raise NotImplementedError(f"{type(self).__name__} has tensors but no load_tensors")

    @property
    def observes(self) -> bool:
        """Whether :meth:`observe` has to be called."""
        return type(self).observe is not FreezingRule.observe

    @property
    def anneals(self) -> bool:
        """Whether :meth:`lr_factors` has to be asked."""
        return type(self).lr_factors is not FreezingRule.lr_factors


class FunctionRule(FreezingRule):
    """A plain function as a rule."""

    def __init__(self, function: Callable[[Situation], Proposal]) -> None:
        self.function = function

    def propose(self, now: Situation) -> Proposal:
        """What the function says."""
        return self.function(now)
