"""One rank's machinery between two optimizer steps: gradients, statistics, times, and moving the boundary.

No policy and no disk here: :mod:`icefrog.runtime.elastic` decides when to move and what to save.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from icefrog.errors import UserError
from icefrog.estimate.penalty import GradientTracker
from icefrog.profile import FloatArray
from icefrog.runtime.accumulating import AccumulationWatch
from icefrog.runtime.compiled import open_compiled, refuse_outer_compile
from icefrog.runtime.counting import Counting
from icefrog.runtime.first_pass import FirstPass, training_flops
from icefrog.runtime.freezing import Freezer
from icefrog.runtime.hook_owner import HookOwner
from icefrog.runtime.layers import Layer, Piece, find_pieces, group_pieces, layers_from_user
from icefrog.runtime.momentum import start_late_momentum
from icefrog.runtime.parallel import Parallel
from icefrog.runtime.peers import peers_needed
from icefrog.runtime.preconditioning import Precondition
from icefrog.runtime.prefix_cache import PrefixCache
from icefrog.runtime.profiling import PointKey, Profiler, num_nodes
from icefrog.runtime.psi import psi_in_force
from icefrog.runtime.ready import GradientWatch
from icefrog.runtime.reentrant import FIX, PROBLEM
from icefrog.runtime.samples import SampleCount
from icefrog.runtime.statistics import Statistics
from icefrog.runtime.timing import StepTimer, StepTimes
from icefrog.runtime.trained import trained_by
from icefrog.runtime.world import World


@dataclass(frozen=True)
class EngineOptions:
    """Settings of the machinery; see :class:`~icefrog.runtime.elastic.LayerElastic`."""

    name: str = "job"
    accum_steps: int = 1
    stats_every: int | None = None
    precondition: Precondition = "auto"
    grad_scaler: Any = None
    max_grad_norm: float | None = None
    batch_dim: int = 0


class Wishes(NamedTuple):
    """What the executor wants of the job, as far as one rank has noticed; agreed on with the step's own reduction."""

    stop: bool
    regrant: bool


class Engine(HookOwner):
    """Owns everything that depends on the list of layers."""

    layers: list[Layer]
    freezer: Freezer
    tracker: GradientTracker
    watch: GradientWatch
    statistics: Statistics
    timer: StepTimer
    profiler: Profiler

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        given: Sequence[nn.Module | str | Sequence[nn.Module | str]] | None,
        world: World,
        parallel: Parallel,
        options: EngineOptions,
    ) -> None:
        model, self.compiled = open_compiled(model)
        self.inner = model
        self.optimizer = optimizer
        self.world = world
        self.parallel = parallel
        self.options = options
        self.device = next(model.parameters()).device
        self.nodes = num_nodes(world.size)
        self.cache: PrefixCache | None = None
        self.psi = 1.0
        self.worth: float | None = None  # psi of the boundary as the rule judges it; None: Eq. 3
        self.shared = False  # whether the GPU is shared: steps are then slower than the profile should say
        self.counting = Counting(options.accum_steps, parallel, world.size, lambda: self.statistics)
        self._unmerged: tuple[PointKey, StepTimes] | None = None  # this rank's part of the last step's times
        self._waiting: int | None = None  # a boundary that comes into force with the next optimizer step
        self.noticed: list[str] = []  # what :meth:`put_right` found while the boundary moved
        self.pieces: list[Piece] = [] if given else find_pieces(model)
        self.before_step: Callable[[], None] | None = None
        """Called when the first forward pass of an optimizer step begins."""
        self._first_pass: FirstPass | None = None
        self._sample_count = SampleCount(options.batch_dim)
        self._settled = False
        self._ordered = given is not None
        parallel.start(model, world)
        layers = layers_from_user(model, given) if given else group_pieces(model, self.pieces)
        parallel.place(layers, optimizer)
        self._handles = [  # first of all hooks: a checkpoint may be made there, before sharded parameters are gathered
            model.register_forward_pre_hook(self._forward_start, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._forward_end, always_call=True),
            *start_late_momentum(optimizer),
        ]
        self.build(layers)
        self._accumulating = AccumulationWatch(list(layers[-1].params.values())[-1], options.accum_steps)

    def build(self, layers: list[Layer]) -> None:
        """(Re)make what depends on the layers; nothing may be frozen."""
        self.layers = layers
        self.freezer = Freezer(self.inner, self.optimizer, layers)
        self.tracker = GradientTracker(len(layers))
        self.profiler = Profiler(
            self.options.name,
            [(layer.name, float(layer.param_bytes)) for layer in layers],
            self.device.type,
            self.parallel.describe,
            lambda: self.cache is not None,
        )
        self._attach()

    def _attach(self) -> None:
        """Hooks on the parameters as they are now, and (collective) communication for them."""
        weight: tuple[float, float] | None = None
        if hasattr(self, "statistics"):
            weight = self.statistics.weight
            self.watch.close()
            self.timer.close()
        scaler = self.options.grad_scaler
        layers = self.layers
        self.watch = GradientWatch(layers)
        self.timer = self.parallel.timer = StepTimer(self.inner, len(layers), self.device, self.watch)
        self.statistics = Statistics(
            layers,
            self.optimizer,
            self.world,
            accum_steps=self.counting.accum_steps,
            source=self.parallel.source(self.counting.accum_steps),
            num_replicas=self.parallel.num_replicas,
            precondition=self.options.precondition,
            loss_scale=(lambda: float(scaler.get_scale())) if scaler is not None else (lambda: 1.0),
            every=self.options.stats_every,
            watch=self.watch,
        )
        if weight is not None:
            self.statistics.set_weight(*weight)
        if self.counting.micro > 0:
            self.statistics.skip()
        self._unmerged = None
        self.parallel.connect(self.freezer, self.statistics)
        self._merges_times = len(self.parallel.pack_times(None)) > 0
        self._set_sync()

    def rebuild(self, order: Sequence[str]) -> None:
        """Layers for another forward order of the pieces (by name)."""
        by_name = {piece.name: piece for piece in self.pieces}
        self.pieces = [by_name[name] for name in order]
        current = dict(self.inner.named_parameters(remove_duplicate=False))  # sharding has put others in their place
        for piece in self.pieces:
            piece.params = {name: current[name] for name in piece.params}
        self.freezer.close()
        self.build(group_pieces(self.inner, self.pieces))
        self._ordered = True

    def _rewire(self) -> None:
        self.parallel.rewire()
        self._set_sync()

    def _set_sync(self) -> None:
        self.parallel.set_sync(self.counting.micro == self.counting.accum_steps - 1)

    def close(self) -> None:
        """Give the model back as it was: nothing frozen, no hooks; on this rank alone."""
        self.freezer.close()
        for handle in self._handles:
            handle.remove()
        if self._first_pass is not None:
            self._first_pass.end()
        if self.compiled is not None:
            self.compiled.close()
        self._accumulating.close()
        self.watch.close()
        self.timer.close()
        self.parallel.close()
        if self.cache is not None:
            self.cache.close()

    def accumulate(self, accum_steps: int) -> None:
        """Collective, between two optimizer steps. So many micro-steps a step from now on."""
        if accum_steps != self.counting.accum_steps:
            self.counting.accum_steps = accum_steps
            self._accumulating.restart(accum_steps)
            self._attach()

    # --- the boundary

    @property
    def boundary(self) -> int:
        """Layers frozen from the next step on: in force now, or waiting for the end of an accumulation."""
        return self.freezer.frozen_layers if self._waiting is None else self._waiting

    def abandon(self) -> None:
        """Forget what was accumulated and what waits; training goes on from another state."""
        self.counting.abandon()
        self._accumulating.abandoned()
        self._waiting = None
        self.parallel.drop_gradients()
        self.statistics.reset()
        self._set_sync()

    def move(self, frozen_layers: int) -> bool:
        """Collective. Put another boundary in force; False: it was already.

        In the middle of an accumulation it waits for the optimizer step: a layer opened there would get the gradient of
        a part of the samples only.
        """
        frozen_layers = self.freezer.check(frozen_layers)
        if frozen_layers == self.boundary:
            return False
        if self.counting.micro > 0:
            self._waiting = frozen_layers
            return True
        self._waiting = None
        return self._move(frozen_layers)

    def move_waiting(self) -> None:
        """Collective. After an optimizer step: what :meth:`move` had put off."""
        if self._waiting is not None:
            depth, self._waiting = self._waiting, None
            self._move(depth)

    def _move(self, frozen_layers: int) -> bool:
        if frozen_layers == self.freezer.frozen_layers:
            return False
        if self.parallel.num_replicas > 1 and not self.parallel.sharded:
            self.counting.communication_rebuilt(backward_ran=self.timer.backward_ran)
        self.noticed += self.put_right()
        self.check_in_step()
        self.freezer.set_boundary(frozen_layers)
        if self.compiled is not None:
            self.compiled.learn()
        self.tracker.set_boundary(frozen_layers)
        self.statistics.reset()
        self.profiler.moved()
        self._unmerged = None
        self._rewire()
        self.judge(None)
        return True

    def check_in_step(self) -> None:
        """Collective. See :meth:`Parallel.check_in_step`."""
        self.parallel.check_in_step(self.layers)

    def cache_prefix(self, folder: Path, budget_bytes: float) -> None:
        """Keep the frozen prefix's outputs from now on.

        Raises:
            UserError: no rank runs the whole prefix, or none can leave it out alone.
        """
        if not self.parallel.caches:
            raise UserError(
                f"the prefix cache does not work with parallel={self.parallel.name!r}",
                "leave out elastic.cache_prefix(...)",
            )
        if self.cache is not None:
            self.cache.close()
        self.cache = PrefixCache(self.inner, lambda: self.freezer, folder, budget_bytes)

    def renew_cache(self) -> None:
        """The prefix's values may have changed."""
        if self.cache is not None:
            self.cache.renew()

    def put_right(self) -> list[str]:
        """Collective. Undo what other code did to requires_grad; names of what was wrong on any rank."""
        before = [id(param) for layer in self.layers for param in layer.params.values()]
        names = self.freezer.put_right()
        after = [id(param) for layer in self.layers for param in layer.params.values()]
        renewed = before != after or self.statistics.trained != trained_by(self.optimizer)  # groups may have been added
        counts = self.world.sum(torch.tensor([float(len(names)), float(renewed)]))
        if float(counts[1]) > 0:
            self._attach()
        elif float(counts[0]) > 0:
            self._rewire()
        return names

    def judge(self, worth: float | None) -> None:
        """psi of the boundary in force, as its rule sees it; None: by Eq. 3."""
        self.worth = worth
        self.refresh_psi()

    def refresh_psi(self) -> None:
        """The statistics, or the boundary, are others now."""
        self.psi = psi_in_force(
            self.freezer.frozen_layers, self.worth, self.tracker.variance, self._trained_bytes, self.psi
        )

    def _trained_bytes(self) -> list[float]:
        own = self.statistics.trained
        return [float(sum(p.nbytes for p in layer.params.values() if id(p) in own)) for layer in self.layers]

    # --- forward: samples, FLOPs, order

    def _forward_start(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if model is not self.inner or not torch.is_grad_enabled():
            return
        self._accumulating.pass_begins()
        samples = self._sample_count.of(args, kwargs)
        self._see(samples, self.timer.backward_ran)
        if self._first_pass is None:
            refuse_outer_compile()
            self._first_pass = FirstPass(self.pieces, self.layers, samples)

    def _see(self, samples: int, backward_ran: bool) -> None:
        """A forward pass begins; ``backward_ran``: the one before it has had its backward pass."""
        if self.counting.between_steps and self.before_step is not None:
            self.before_step()
        self.counting.see(samples, backward_ran=backward_ran)

    @property
    def ran(self) -> bool:
        """Whether the model's own forward has run in training."""
        return self._first_pass is not None

    def has_gradients(self) -> bool:
        """Whether the last pass has had its backward, and no step or ``zero_grad`` has followed."""
        return self.counting.pass_is_open and self.timer.backward_ran

    def forget_passes(self) -> None:
        """``zero_grad``: backward passes that no optimizer step followed (a batch left out, a first look) do not count."""
        self.counting.forget_passes(backward_ran=self.timer.backward_ran)

    def train_step(self, x: Any, y: Any, loss_fn: Any) -> torch.Tensor:
        """Collective. Forward and backward as the parallelism does them; the loss."""
        with peers_needed():
            loss = self.parallel.train_step(x, y, loss_fn, lambda samples: self._see(samples, backward_ran=True))
        self.counting.saw_whole()
        forward = self.parallel.layer_flops()
        if forward is not None and not any(self.profiler.flops):
            self.profiler.flops = [training_flops(flops) for flops in forward]
        return loss

    def _forward_end(self, model: nn.Module, _args: Any, _output: Any) -> None:
        if model is self.inner and self._first_pass is not None:
            self._first_pass.end()

    def settle_order(self) -> str | None:
        """Collective, after the first step: adopt the order in which layers really run, once.

        Layers frozen before that in the declared order are opened, and as many frozen in the real one.

        Returns:
            A message if it was another order, or if nothing can be frozen.
        """
        first = self._first_pass
        if self._settled or first is None or first.running:
            return None
        self._settled = True
        message = None
        if not self._ordered:
            self._ordered = True
            names = [piece.name for piece in first.order()]
            before = [layer.name for layer in self.layers]
            if names != [piece.name for piece in self.pieces]:
                depth = self.freezer.frozen_layers
                self._move(0)
                self.rebuild(names)
                self._move(min(depth, len(self.layers) - 1))
                after = [layer.name for layer in self.layers]
                if after != before:
                    message = f"layers run in another order than they are declared: {', '.join(after)}"
        if not any(self.profiler.flops):
            self.profiler.flops = first.training_flops(self.layers)
        if first.reentrant:
            self.freezer.reentrant = True
            message = f"nothing will be frozen: {PROBLEM}; {FIX}"
        return message

    def order_is_known(self) -> None:
        """The order of the layers is that of a run that has made steps."""
        self._ordered = True

    # --- steps

    def micro_step(self, cursor: int) -> str | None:
        """A micro-step's backward is over. Returns what the user should know of the loop.

        Raises:
            UserError: the boundary moved between its forward and its backward pass, so ranks did not average gradients.
        """
        message = self._accumulating.micro_ended(self.counting.micro)
        samples = self.counting.end_micro(cursor)
        self.statistics.micro_step(samples)
        if self.counting.micro > 0:
            self.counting.weigh_next(samples, cursor)
        else:
            self.parallel.average(self.statistics.weight[0])
            self.statistics.mean_is_ready()
        if self.counting.accum_steps > 1:
            self._set_sync()
        self._accumulating.micro_settled()
        return message

    def step(self, real_step: Callable[[], Any] | None, wishes: Wishes) -> tuple[Any, int, Wishes]:
        """Collective. One optimizer step: statistics, then the step itself.

        Args:
            real_step: the optimizer's; None: the gradient is not finite on some rank, so nothing is measured and done.
            wishes: of this rank.

        Returns:
            (what the optimizer returned, M of this step in samples, the wishes of any rank).

        Raises:
            UserError: the batch size cannot be told from the model's input.
        """
        self.timer.step_enter()
        if self.watch.step_over() and self.statistics.source == "steps":
            self.statistics.skip()
        self.freezer.drop_prefix_grads()
        if self.counting.step_samples == 0:
            if not self.ran:
                raise UserError(
                    "optimizer.step() was called, and no forward pass of the model before it",
                    "call elastic.model(...) itself in training, not one of its parts or methods (model.encode(x), "
                    "model.loss(batch)): let its forward() do what they do",
                )
            raise UserError(
                "cannot tell the batch size from the model's input (or the batch is empty)",
                "leave empty batches out; pass tensors whose first dimension is the batch, or use elastic.sampler(...)",
            )
        if real_step is None:
            self.statistics.skip()
        total, agreed = self._observe(wishes)
        if real_step is None:
            self.timer.reset()
            return None, total, agreed
        if self.options.max_grad_norm is not None:
            live = [p for layer in self.layers for p in layer.params.values() if p.grad is not None]
            self.parallel.clip(live, self.options.max_grad_norm)
        result = real_step()
        self.counting.end_step()
        times = self.timer.step_exit()
        cached = self.cache is not None and self.cache.used  # a step like that says nothing of what the prefix costs
        if self.cache is not None:
            self.cache.used = False
        if times is not None and self.counting.full_step and not self.shared and not cached:
            self._learn(self.point(), times)
        return result, total, agreed

    def waiting_samples(self) -> int:
        """Collective. Samples of the micro-steps that wait for their optimizer step, over all ranks."""
        return round(float(self.world.sum(torch.tensor([self.counting.waiting_samples], dtype=torch.float64))))

    def _learn(self, key: PointKey, times: StepTimes) -> None:
        if self._merges_times:
            self._unmerged = (key, times)  # goes round with the next step's sum
        else:
            self.profiler.observe(key, times)

    def _observe(self, wishes: Wishes) -> tuple[int, Wishes]:
        (key, own), self._unmerged = self._unmerged or (self.point(), None), None
        if self.world.size == 1 and not self._merges_times:
            return self._take_in(None, round(self.counting.share)), wishes
        mine = [self.counting.share, float(wishes.stop), float(wishes.regrant)]
        due = self.statistics.due
        local = self.statistics.local(self.counting.step_samples) if due else torch.zeros(0, dtype=torch.float64)
        times = self.parallel.pack_times(own)
        sums = self.world.sum(torch.cat([torch.tensor(mine, dtype=torch.float64), times, local])).cpu()
        if len(times) and (merged := self.parallel.unpack_times(sums[3 : 3 + len(times)])) is not None:
            self.profiler.observe(key, merged)
        packed = np.asarray(sums[3 + len(times) :].numpy()) if due else None
        return self._take_in(packed, round(float(sums[0]))), Wishes(bool(sums[1] > 0), bool(sums[2] > 0))

    def _take_in(self, sums: FloatArray | None, total: int) -> int:
        """M of the step, and its statistics; ``sums``: over ranks, None: this process is alone."""
        found = self.statistics.finish(sums, total, self.counting.passes)
        self.counting.observed(total)
        if found is not None and self.tracker.observe(found.variance, found.sqr_norm, found.every):
            self.refresh_psi()
        return total

    def point(self) -> PointKey:
        """What the present steps are measured at."""
        return PointKey(
            self.world.size,
            self.nodes,
            self.counting.samples_per_gpu,
            self.counting.accum_steps,
            self.freezer.frozen_layers,
        )
