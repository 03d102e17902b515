"""What the engine asks of the way in which a model is spread over processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from icefrog.errors import UserError
from icefrog.profile import Pipelined, Replicated, Sharded
from icefrog.runtime import named_state
from icefrog.runtime.freezing import Freezer
from icefrog.runtime.layers import Layer
from icefrog.runtime.peers import peers_needed
from icefrog.runtime.statistics import Source, Statistics
from icefrog.runtime.timing import StepTimer, StepTimes
from icefrog.runtime.world import World, check_in_step


class Parallel:
    """One model over the ranks of a job. The defaults are those of a model that is whole on every rank.

    Life: :meth:`start` once; :meth:`place` once, when the layers are known and nothing is frozen; :meth:`connect` whenever
    layers, freezer or statistics are new; :meth:`rewire` after each move of the boundary. During an optimizer step:
    :meth:`set_sync` before the backward passes, :meth:`scale_gradients` between those of unequal micro-batches,
    :meth:`average` behind the last one, then :meth:`clip`. Methods marked *collective* are called by all ranks together.

    Ranks and replicas: ``world`` has all ranks of the job and is the control plane (sums of a few numbers, rank 0's
    decisions). A *replica* is a copy of the model that sees samples of its own; ranks that share one copy in stages see
    the same samples and have the same ``replica``.
    """

    name: ClassVar[str]
    """As given to ``LayerElastic(parallel=...)``."""
    sharded: ClassVar[bool] = False
    """Whether a rank holds only a part of the parameters: states are then gathered, by all ranks together."""
    caches: ClassVar[bool] = True
    """Whether a frozen prefix's outputs can be kept: a rank runs the whole prefix, and can leave it out alone."""

    world: World
    model: nn.Module
    """The user's model, unwrapped: names of parameters are its names."""
    freezer: Freezer
    statistics: Statistics
    timer: StepTimer
    """To be told of passes that do not go through the model's own forward."""

    def start(self, model: nn.Module, world: World) -> None:
        """Collective, once, before anything else: the user's model on its device. All ranks take rank 0's parameters."""
        self.model, self.world = model, world
        world.share_parameters(model)

    def place(self, layers: Sequence[Layer], optimizer: torch.optim.Optimizer) -> None:
        """Collective, once, when the layers are first known: put every parameter where it belongs.

        Whoever replaces parameters does so in the model, in ``layer.params`` and in the optimizer's groups (same groups,
        same order), so that nobody else notices. ``layers`` stay the whole list on every rank.
        """

    def connect(self, freezer: Freezer, statistics: Statistics) -> None:
        """Collective. Work with these from now on: layers were built anew, or parameters replaced. Rewires, too."""
        self.freezer, self.statistics = freezer, statistics
        self.rewire()

    def rewire(self) -> None:
        """Collective. The trainable set has changed: from now on communicate what trains, and nothing else.

        Raises:
            RuntimeError: ``requires_grad`` is not what the boundary says afterwards.
        """

    def verify(self) -> None:
        """What :meth:`rewire` ends with: wrapping must leave ``requires_grad`` alone (in some releases it did not)."""
        if names := self.freezer.drifted():
            raise RuntimeError(f"wrapping changed requires_grad of {', '.join(names[:5])}")

    # --- who sees which samples

    @property
    def module(self) -> nn.Module:
        """What the user calls in place of the model; one object for the whole run, with the model's names."""
        return self.model

    @property
    def num_replicas(self) -> int:
        """d: copies of the model, over which samples are dealt."""
        return self.world.size

    @property
    def replica(self) -> int:
        """The copy that this rank belongs to, 0..d-1."""
        return self.world.rank

    def source(self, accum_steps: int) -> Source:
        """Where the several gradients come from that a variance needs; see :mod:`icefrog.runtime.statistics`."""
        if self.num_replicas > 1:
            return "replicas"
        return "micro_steps" if accum_steps > 1 else "steps"

    # --- one optimizer step

    def train_step(
        self, x: Any, y: Any, loss_fn: Callable[[Any, Any], torch.Tensor] | None, begin: Callable[[int], None]
    ) -> torch.Tensor:
        """Collective. Forward and backward of one batch; the loss, without a graph.

        Args:
            x: the batch.
            y: what the loss compares the output with.
            loss_fn: of (output, y).
            begin: to be called with this replica's samples before any gradient is made, unless the model's own forward runs.

        Raises:
            UserError: no loss function is known.
        """
        if loss_fn is None:
            raise UserError("no loss function is known", "call train_step(x, y, loss_fn)")
        loss = loss_fn(self.module(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def layer_flops(self) -> Sequence[float] | None:
        """Forward FLOPs of one sample by layer, shape (L,), where :meth:`train_step` counts them; None where not."""
        return None

    def describe(self) -> Replicated | Sharded | Pipelined:
        """For the job's profile."""
        return Replicated()

    @property
    def forward_module(self) -> nn.Module:
        """The module whose forward this rank runs in training."""
        return self.model

    def merge_layers(self, values: torch.Tensor) -> torch.Tensor:
        """Collective. What ranks know of the layers that they hold, shape (..., L), together."""
        return values

    def pack_times(self, times: StepTimes | None) -> torch.Tensor:
        """What this rank adds to the sum from which :meth:`unpack_times` makes a step's times, float64; of one length.

        Empty (the default) where each rank's own times are those of the whole model.
        """
        return torch.zeros(0, dtype=torch.float64)

    def unpack_times(self, sums: torch.Tensor) -> StepTimes | None:
        """The whole model's times, from the sum over all ranks; None: some rank had none."""
        return None

    def set_sync(self, sync: bool) -> None:
        """Whether the coming backward pass synchronises (false in all but the last accumulation micro-step)."""

    def scale_gradients(self, factor: float) -> None:
        """On this rank alone. Multiply what was accumulated so far: the next micro-batch has another number of samples."""
        for layer in self.freezer.layers[self.freezer.frozen_layers :]:
            for param in layer.params.values():
                if param.grad is not None:
                    param.grad.mul_(factor)

    def average(self, weight: float) -> None:
        """Collective. The step's last backward pass is over: make ``param.grad`` the mean over all samples of the step.

        Args:
            weight: n_r / M of this replica (over its last micro-batch's share where it accumulates): what its accumulated
                gradient counts. To be applied here by whoever did not do so while backward synchronised
                (``statistics.weight`` has it then, too).
        """

    @peers_needed()
    def clip(self, params: Sequence[nn.Parameter], max_norm: float) -> None:
        """Collective. Clip by the norm of the whole model's averaged gradient; ``params``: this rank's, with gradients."""
        torch.nn.utils.clip_grad_norm_(params, max_norm)

    def drop_gradients(self) -> None:
        """On this rank alone. Forget whatever was accumulated: training goes on from another state."""
        for param in self.model.parameters():
            param.grad = None

    def close(self) -> None:
        """On this rank alone: stop communicating; no hooks are left, nothing is frozen. Parameters stay where they are."""

    # --- trust

    def check_in_step(self, layers: Sequence[Layer]) -> None:
        """Collective. Make sure that what ought to be equal on several ranks is so, bit by bit.

        Raises:
            DivergenceError: it is not; on every rank.
        """
        check_in_step(self.model, layers, self.world)

    # --- states, by plain parameter names. What one rank holds, for sharded checkpoints; on this rank alone

    def held_model_state(self) -> dict[str, Any]:
        """Slices as DTensors, or this rank's layers; the whole model where nothing is :attr:`sharded`."""
        return self.model.state_dict()

    def held_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The same of the optimizer, keyed by parameter name; groups name all parameters."""
        return named_state.optimizer_state(self.model, optimizer, whole=not self.sharded)

    # --- whole states, on the CPU if they had to be gathered

    def model_state(self) -> dict[str, Any]:
        """Of the whole model, as the unwrapped model's ``state_dict``. Collective where :attr:`sharded`."""
        return self.model.state_dict()

    def load_model_state(self, state: Mapping[str, Any]) -> None:
        """Collective. Inverse of :meth:`model_state` of any kind of parallelism, and of :meth:`held_model_state`.

        Buffers are rank 0's on all ranks: each may have given the state it saved itself, with normalisation statistics of
        its own, which would make a frozen layer another function on each rank.

        Raises:
            UserError: names or shapes are not those of the model.
        """
        try:
            self.model.load_state_dict(state)
        except RuntimeError as error:
            raise UserError(
                f"the checkpoint is of another model: {error}",
                "resume with the model that wrote it, or start in an empty checkpoint folder",
            ) from error
        self.world.share_buffers(self.model)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Whole, keyed by parameter name: :func:`named_state.optimizer_state`. Collective where :attr:`sharded`."""
        return named_state.optimizer_state(self.model, optimizer, whole=not self.sharded)

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Inverse of :meth:`optimizer_state`, whatever kind made it, and of :meth:`held_optimizer_state`."""
        named_state.load_optimizer_state(self.model, optimizer, state)
