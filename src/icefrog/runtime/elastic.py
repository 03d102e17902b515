"""LayerElastic: the training API. It wires the engine, the decisions, checkpoints and the executor together."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from icefrog.errors import UserError
from icefrog.runtime import saving
from icefrog.runtime.agent import Agent
from icefrog.runtime.amp import ScalerGate, refuse_unknown_scaler
from icefrog.runtime.batching import Batching
from icefrog.runtime.deciding import Decider
from icefrog.runtime.decision import Decision
from icefrog.runtime.ending import Ending
from icefrog.runtime.engine import Engine, EngineOptions, Wishes
from icefrog.runtime.epochs import NOT_BEGUN, check_epoch
from icefrog.runtime.goal import Goal
from icefrog.runtime.keeper import Keeper, open_store
from icefrog.runtime.lr_end import hold_at_end
from icefrog.runtime.lr_rules import LrRule, LrScaling
from icefrog.runtime.parallel import Parallel, choose
from icefrog.runtime.preconditioning import Precondition
from icefrog.runtime.prefix_cache import PrefixCache, cache_folder
from icefrog.runtime.probing import Probe
from icefrog.runtime.refusing import refuse_model
from icefrog.runtime.reporting import Counters, Reporter
from icefrog.runtime.rules import FreezingRule, Guards, Rule, make_rule
from icefrog.runtime.sampler import ElasticSampler
from icefrog.runtime.saver import Saver
from icefrog.runtime.saving import Stateful
from icefrog.runtime.statistics import NEVER
from icefrog.runtime.stepping import StepGate, refuse_optimizer, scaler_of, tell_wrapper, unwrapped
from icefrog.runtime.validations import Validations
from icefrog.runtime.view import View
from icefrog.runtime.world import World
from icefrog.spec import Mode, Target


class LayerElastic(View):
    """Makes a training loop layer-elastic.

    Args:
        model: on its device, before any wrapping in DDP: use :attr:`model` afterwards. ``torch.compile(model)`` is opened,
            its ``forward`` stays compiled. With ``WORLD_SIZE`` > 1 in the environment the process group is started here if
            it was not yet.
        optimizer: of the model's parameters. Its parameter groups are never changed.
        layers: freezable units in forward order (modules, names, or lists of modules); default: found by themselves.
        target: validation metric that ends training; default: the grant's.
        mode: without a target, whether more of the metric is better (``max``) or less (``min``); default: as it looks after
            four validations.
        samples_per_epoch: default: the elastic sampler's, or what the first whole epoch turns out to be.
        global_batch: M in samples, for :meth:`sampler`; default: the grant's.
        batch_dim: of the tensors that the model is called with, the one of the samples: 1 where time comes first.
        accum_steps: micro-steps of one optimizer step; default: the grant's, or 1.
        rule: who decides the boundary: a name (``tuner``, ``freezeout``, ...; ``none``: only :meth:`freeze` does), a
            :class:`~icefrog.runtime.rules.FreezingRule`, or a function. Default: the job file's; on its own ``progress``,
            or ``tuner`` where a rank holds a part of the model.
        max_fraction: largest share of layers frozen; default 0.9. The grant can only lower it.
        tune_every_steps: also decide every so many steps, not only at the end of epochs.
        checkpoint_dir: default: the executor's; None there too: no checkpoints.
        checkpoint_every_steps: also save every so many steps.
        guards: of ``tuner`` (:class:`~icefrog.estimate.boundary.Guards`); ``Guards(0, 0, 0, 0)``: the paper's plain argmax.
        stats_every: measure gradient statistics each n-th step; default: each of the first 21, then each tenth; never in a
            job on its own whose rule does not read them (``progress``).
        precondition: ``auto``: g / (sqrt(v) + eps) under Adam-like optimizers; ``raw``: the plain gradient.
        grad_scaler: the ``torch.amp.GradScaler`` in use; its ``step``, ``unscale_`` and ``update`` are replaced on it.
            Default: that of accelerate's wrapper of the optimizer.
        max_grad_norm: clip the averaged gradient before the optimizer step (with accumulation, clip here, not in the loop).
        lr_rule: what a global batch other than ``base_batch`` makes of the learning rate: ``none``, ``linear``, ``sqrt`` or
            ``adascale``; applied for the step alone, so that LR schedulers see their own rates.
        base_batch: M0 in samples, for which the learning rate was chosen; default: that of the job's first step.
        elastic_batch: the global batch may move between epochs, in powers of two of M0, where that makes more progress;
            needs :meth:`sampler` and an ``lr_rule``. Default: only where the grant says so.
        parallel: how the model is spread over the ranks: ``auto`` (``ddp`` where there are several, else ``single``),
            ``fsdp``, or a :class:`~icefrog.runtime.parallel.Parallel`.
        ddp_options: further arguments of DistributedDataParallel.
        name: of the profile; default: the executor's job id.
        env: environment; default: ``os.environ``.
        on_stop: called at the step boundary (on every rank) when the executor asks the job to stop, in place of saving and
            raising :class:`Stopped`: for a loop that saves and ends by itself. No checkpoints are written or read here then.

    Raises:
        UserError: nothing to train, layers that are not of the model, an invalid grant, or options that exclude each other.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        layers: Sequence[nn.Module | str | Sequence[nn.Module | str]] | None = None,
        *,
        target: Target | None = None,
        mode: Mode | None = None,
        samples_per_epoch: int | None = None,
        global_batch: int | None = None,
        batch_dim: int = 0,
        accum_steps: int | None = None,
        rule: Rule | None = None,
        max_fraction: float = 0.9,
        tune_every_steps: int | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every_steps: int | None = None,
        guards: Guards | None = None,
        stats_every: int | None = None,
        precondition: Precondition = "auto",
        grad_scaler: Any = None,
        max_grad_norm: float | None = None,
        lr_rule: LrRule = "none",
        base_batch: int | None = None,
        elastic_batch: bool = False,
        parallel: str | Parallel = "auto",
        ddp_options: Mapping[str, Any] | None = None,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        on_stop: Callable[[], None] | None = None,
    ) -> None:
        wrapper, optimizer = optimizer, unwrapped(optimizer)
        grad_scaler = scaler_of(wrapper) if grad_scaler is None else grad_scaler
        refuse_model(model)
        refuse_optimizer(model, optimizer)
        self.agent = Agent(os.environ if env is None else env)
        grant = self.agent.grant
        probe = grant.probe if grant else None
        accum = accum_steps or (grant.accum_steps if grant else 1)
        self._reporter = Reporter(self.agent)
        self.optimizer = optimizer
        self.target = None if probe else target or (grant.target if grant else None)
        self._given_batch = (None if probe else global_batch) or (grant.global_batch if grant else None)
        self.tune_every_steps = tune_every_steps
        self.checkpoint_every_steps = checkpoint_every_steps
        self._world = World(next(model.parameters()).device)
        self._scaler = ScalerGate(grad_scaler, optimizer, self._world) if grad_scaler is not None else None
        spread = choose(grant.parallel if grant and parallel == "auto" else parallel, self._world, ddp_options or {})
        asked = "none" if probe else rule or (grant.asked_rule if grant else None)
        self.rule: FreezingRule = make_rule(asked, guards, sharded=spread.sharded)
        read = self.rule.reads_statistics or lr_rule == "adascale" or elastic_batch
        read = read or (grant is not None and (grant.statistics or grant.moves_batch))
        if stats_every is None and not read:
            stats_every = NEVER
        options = EngineOptions(
            name=name or self.agent.job_id or type(getattr(model, "_orig_mod", model)).__name__,
            accum_steps=accum,
            stats_every=stats_every,
            precondition=precondition,
            grad_scaler=self._scaler,
            max_grad_norm=max_grad_norm,
            batch_dim=batch_dim,
        )
        self._engine = Engine(model, optimizer, layers, self._world, spread, options)
        self._goal = Goal(self.target, grant.max_epochs if grant else None, endless=probe is not None)
        with contextlib.ExitStack() as refused:  # the model is as it was then
            refused.callback(self._engine.close)
            self._lr_scaling = LrScaling(lr_rule, base_batch or (grant.base_batch if grant else None), self._engine)
            asked_batch = elastic_batch and probe is None
            batching = Batching(self._engine, self.agent, self._lr_scaling, guards or Guards(), asked=asked_batch)
            self._validations = Validations(self.target.mode if self.target else mode)
            self._decider = Decider(
                self.rule,
                self._engine,
                self.agent,
                self._reporter,
                self._goal,
                batching,
                self._validations,
                max_fraction=max_fraction,
            )
            refused.pop_all()
        self._gate = StepGate(
            optimizer,
            self._engine.counting,
            self._on_micro,
            self._on_step,
            self._engine.forget_passes,
            self._engine.has_gradients,
        )
        self._wrapper = wrapper
        tell_wrapper(wrapper)
        self._at = Counters(samples_per_epoch=samples_per_epoch)
        self._registered: dict[str, Stateful] = {}
        if self._scaler is not None:
            self._scaler.attach(self._gate)
            self._registered["grad_scaler"] = self._scaler
        folder = Path(checkpoint_dir) if checkpoint_dir is not None else self.agent.checkpoint_dir
        folder = None if on_stop is not None or probe else folder
        sharded = spread.sharded and self._world.size > 1
        store = open_store(folder, sharded=sharded) if folder is not None else None
        self._keeper = Keeper(store, self._world, self._reporter, self._warn)
        self._ending = Ending(self._goal, self._reporter, self._keeper, self._world, on_stop)
        self._saver = Saver(self._engine, self._decider, self._registered, self._keeper, self._ending)
        self._engine.before_step = lambda: self._saver.step_begins(self._at)
        self._begun, self._trained = False, False
        self._probe = Probe(probe, self._engine, self.agent.write_probed) if probe else None
        self.stepped = False
        """Whether the last ``optimizer.step()`` was a real one, not an accumulation micro-step (for per-step schedulers)."""
        self.agent.listen()
        self._world.enter()

    # --- before the loop

    def sampler(self, num_samples: int, *, global_batch: int | None = None, seed: int = 0) -> ElasticSampler:
        """A batch sampler whose place in the epoch survives resizes: ``DataLoader(data, batch_sampler=...)``.

        Args:
            num_samples: of the data set.
            global_batch: M; default: the grant's, or the constructor's.
            seed: of the order of samples.

        Raises:
            UserError: no global batch is known, or one that cannot be dealt over the ranks.
        """
        batch = (None if self._probe else global_batch) or self.global_batch
        if batch is None:
            raise UserError("no global batch is known", "pass global_batch= to LayerElastic or to sampler()")
        sampler = ElasticSampler(
            num_samples,
            batch,
            rank=self._engine.parallel.replica,
            world_size=self._engine.parallel.num_replicas,
            accum_steps=self._engine.counting.accum_steps,
            seed=seed,
        )
        self._engine.counting.sampler = sampler
        self._decider.batching.deal()
        if self._at.samples_per_epoch is None:
            self._at.samples_per_epoch = num_samples
        sampler.seek(self._at.epoch, self._at.cursor)
        return sampler

    def register(self, name: str, stateful: Stateful) -> None:
        """Keep an LR scheduler, an EMA, ... in the checkpoint. Call before :meth:`epochs`.

        A ``OneCycleLR`` stays at its last rate where more steps are made than it has.
        """
        self._registered[name] = stateful
        hold_at_end(stateful)

    def cache_prefix(self, where: Literal["memory", "disk"] = "memory", *, budget_bytes: float = 2e9) -> PrefixCache:
        """Compute the frozen prefix's output once a sample; call before :meth:`epochs`, where no sample is augmented.

        Returns:
            The cache: ``hits``, ``misses``, ``off_reason``.
        """
        store = self._keeper.store
        folder = self._world.from_rank0(str(cache_folder(where, store.folder if store else None)))
        self._engine.cache_prefix(Path(folder), budget_bytes)
        assert self._engine.cache is not None
        return self._engine.cache

    def train_step(self, x: Any, y: Any, loss_fn: Callable[[Any, Any], torch.Tensor] | None = None) -> torch.Tensor:
        """Collective. Forward and backward of one batch, in place of those of the loop: what a pipeline needs.

        Args:
            x: the batch, shape (n, ...).
            y: what ``loss_fn`` compares the output with.
            loss_fn: of (output, y), a mean over samples; default: the pipeline's.

        Returns:
            The loss, without a graph; of this replica.

        Raises:
            UserError: no loss function is known, there is a GradScaler, or a pipeline cannot take the batch.
        """
        if self._scaler is not None:
            raise UserError(
                "train_step knows nothing of the GradScaler",
                "write scaler.scale(loss).backward(), or use bfloat16 autocast",
            )
        loss = self._engine.train_step(x, y, loss_fn)
        self.note_loss(loss)
        return loss

    @torch.inference_mode(False)  # validation may be around it
    def freeze(self, frozen_layers: int) -> None:
        """Collective. Set the boundary by hand; unless ``rule="none"`` the next decision may move it again.

        Raises:
            UserError: not a whole number in 0..L-1; freezing every layer leaves nothing to train.
        """
        self._decider.move(self._engine.freezer.check(self._world.from_rank0(frozen_layers)), self._at)
        self._warn_of([])

    def note_loss(self, loss: float | torch.Tensor) -> None:
        """Optional, once a step (:meth:`train_step` does it): tell the freezing rule the training loss.

        It is read at the next decision, not now.
        """
        self._decider.note_loss(loss)

    # --- the loop

    def epochs(self, max_epochs: int) -> Iterator[int]:
        """Yield epoch numbers, from the checkpoint on, until the target is reached or effective samples reach P0.

        P0 = ``max_epochs`` x samples per epoch: with layers frozen that takes more than ``max_epochs`` epochs.

        Raises:
            UserError: an epoch ended without a step or without :meth:`end_epoch`, or with two; or ``max_epochs`` < 1.
        """
        self.begin(max_epochs)
        try:
            while self._goal.goes_on(self._at):
                epoch = self._at.epoch
                self._trained = self._at.epoch_samples > 0  # of an epoch that goes on, nothing may be left
                self._enter_epoch()
                yield epoch
                check_epoch(epoch, self._at, trained=self._trained, ran=self._engine.ran)
        finally:
            self._keeper.join()  # left by `break` as well
        self._ending.reached(self._at)

    def begin(self, max_epochs: int) -> None:
        """Collective. What :meth:`epochs` does before its first epoch, for a loop that is not yours; resumes.

        Called again, training goes on from where it is, not from the newest checkpoint.

        Raises:
            UserError: ``max_epochs`` < 1.
        """
        if max_epochs < 1:
            raise UserError(f"max_epochs must be at least 1, got {max_epochs}", "give the largest number of epochs")
        self._goal.max_epochs = max_epochs
        again = self._begun and self._at.epoch_samples > 0  # the last loop was left in mid-epoch
        if again:
            self._drop_accumulated()
        state = None if self._begun else self._saver.newest()
        if state is not None:
            self.load_state_dict(state)
        if (again or state is not None) and self._engine.counting.sampler is None:
            self._at.epoch_samples = 0  # only the elastic sampler can go on in the middle of an epoch
        resumed = state is not None or self._at.step > 0
        self._begun = True
        if message := self._decider.batching.start(self._at):
            self._warn(message)
        self._decider.start(self._at)
        self._enter_epoch()
        names = tuple(layer.name for layer in self.layers)
        batch, profile = self._decider.batching.brought_back, self.profile() if resumed else None
        self._reporter.started(self._at, names, self.frozen_layers, batch, profile, resumed)

    def _drop_accumulated(self) -> None:
        self._gate.restart()
        self._engine.abandon()

    def _enter_epoch(self) -> None:
        if self._engine.counting.sampler is not None:
            self._engine.counting.sampler.seek(self._at.epoch, self._at.cursor)
        self._engine.timer.reset()
        self._engine.counting.prepare(self._at.cursor)

    def _decide(self, *, between_epochs: bool = False) -> Decision:
        decision = self._decider.decide(self._at, self.profile, between_epochs=between_epochs)
        self._warn_of([])
        by_rule = decision.frozen_layers > 0 and self._decider.active.name != "none"
        if message := self._validations.news(self._at.epoch, by_rule):
            self._warn(message)
        return decision

    @torch.inference_mode(False)  # validation may be around it
    def decide(self, metric: float | None = None) -> Decision:
        """Collective. Decide the boundary in mid-epoch, where validation is more frequent than epochs.

        Args:
            metric: as in :meth:`end_epoch`.
        """
        self._at.metric = self._decider.see_metric(metric)
        decision = self._decide()
        self._engine.timer.reset()
        return decision

    @torch.inference_mode(False)  # validation may be around it
    def end_epoch(self, metric: float | None = None) -> Decision:
        """Collective. Close the epoch: decide the boundary, save, report.

        Args:
            metric: validation metric; the mean over the ranks that give one counts. NaN: none; infinite: never the best.

        Raises:
            DivergenceError: the ranks' parameters are not the same any more.
            Stopped: the executor asked the job to stop (a checkpoint was saved).
        """
        if self._engine.counting.sampler is not None and self._engine.counting.micro > 0:
            self._drop_accumulated()  # the sampler deals whole steps: this one was left in its middle
        self._warn_of(self._engine.put_right())
        self._engine.renew_cache()
        self._engine.check_in_step()
        at = self._at
        self._saver.drop()  # what follows saves, and leaves where that was asked for
        if at.samples_per_epoch is None:  # the first whole epoch tells its size
            at.samples_per_epoch = (at.epoch_samples + self._engine.waiting_samples()) or None
        at.metric = self._decider.see_metric(metric)
        at.epoch += 1
        at.cursor = at.epoch_samples = 0
        at.in_epoch = False
        if not self._begun:
            self._begun = True
            self._warn(NOT_BEGUN)
        decision = self._decide(between_epochs=True)
        self._enter_epoch()
        self._saver.save(at)
        if float(self._world.sum(torch.tensor([float(self.agent.stop_requested())]))) > 0 and not decision.done:
            self._ending.leave(at)
        return decision

    def _on_micro(self) -> None:
        self.stepped, self._trained = False, True
        if self._scaler is None and self._at.step == 0:
            refuse_unknown_scaler()
        if message := self._engine.micro_step(self._at.cursor):
            self._warn(message)

    def _on_step(self, real_step: Callable[[], Any] | None) -> Any:
        """The step boundary: everything that must happen on all ranks at the same step happens here.

        Without a ``real_step`` (its gradient is not finite) the samples are gone for this epoch, but count as no progress.
        """
        wishes = Wishes(self.agent.stop_requested(), self._world.rank == 0 and self.agent.refresh_grant())
        at = self._at
        scaled = self._lr_scaling.step
        stepping = None if real_step is None else lambda: self._decider.run_step(lambda: scaled(real_step, at), at)
        result, samples, agreed = self._engine.step(stepping, wishes)
        self.stepped = real_step is not None
        at.count(
            samples,
            self._decider.sample_worth if self.stepped else None,
            dealt=self._engine.counting.sampler is not None,
        )
        self._engine.move_waiting()
        if message := self._engine.settle_order():
            self._warn(message)
        self._warn_of([])
        if agreed.regrant:
            self._decider.enter_bounds(at)
            self._reporter.bounded(self.frozen_layers)
            self._warn_of([])
        if self.stepped and self._decider.is_due(at.step, self.tune_every_steps):
            self._decide()
            self._engine.timer.reset()
        self._engine.counting.prepare(at.cursor)
        self._keeper.tell()
        if self._probe is not None and self._probe.stepped(at.samples_per_epoch):
            self._ending.leave(at)
        every = self.checkpoint_every_steps
        if agreed.stop and self._ending.on_stop is not None:
            self._ending.leave(at)
        elif agreed.stop or (self.stepped and every and at.step % every == 0):
            self._saver.ask(stop=agreed.stop)
        return result

    # --- checkpoints

    def state_dict(self, *, own_only: bool = False) -> dict[str, Any]:
        """Everything needed to go on, at any world size, boundary and parallelism: tensors and plain values.

        Collective where each rank holds a part of the model; every rank gets the whole.

        Args:
            own_only: leave out what other code saves (weights, optimizer, what is registered, generators).
        """
        if own_only:
            return saving.pack_own(self._engine, self._decider, self._at)
        return saving.pack(self._engine, self._decider, self._at, self._registered)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`; collective. The boundary is restored first, then weights, then the optimizer.

        Raises:
            UserError: the state is of a model with other layers, or the optimizer holds other parameters.
        """
        self._gate.restart()
        self._saver.drop()
        self._at = saving.unpack(state, self._engine, self._decider, self._registered)

    # --- reports

    def _warn_of(self, names: list[str]) -> None:
        names, self._engine.noticed = [*self._engine.noticed, *names], []
        if names:
            self._warn(f"requires_grad was changed outside of LayerElastic and is put right: {', '.join(names[:5])}")

    def _warn(self, message: str) -> None:
        if self._world.rank == 0:
            warnings.warn(message, stacklevel=3)
            self._reporter.warned(message)

    def finish(self) -> None:
        """The loop is over by a rule of its own, after :meth:`begin`: report that the job has ended, or left as asked to."""
        self._ending.finish(self._at)

    def saved(self, path: Path) -> None:
        """Report a checkpoint that other code wrote."""
        self._reporter.checkpointed(path, self._at.effective_samples, wait_s=0.0)

    def close(self) -> None:
        """Wait for the last checkpoint, give model and optimizer back as they were, leave a process group started here.

        Raises:
            UserError: the last checkpoint cannot be written.
        """
        with contextlib.ExitStack() as closing:  # from the last to the first, each of them, whatever the others raise
            closing.callback(self._world.close)
            closing.callback(tell_wrapper, self._wrapper)
            closing.callback(self._gate.close)
            if self._scaler is not None:
                closing.callback(self._scaler.close)
            closing.callback(self._engine.close)
            closing.callback(self._decider.close)
            closing.callback(self._keeper.close)
