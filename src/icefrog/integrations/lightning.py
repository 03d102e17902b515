"""Layer elasticity for Lightning: one callback (docs/adapters.md)."""

from __future__ import annotations

import math
import os
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader

from icefrog.errors import UserError
from icefrog.integrations.ddp import DdpStandIn
from icefrog.integrations.own_state import own_state, restore
from icefrog.integrations.target import find_target
from icefrog.runtime import Decision, LayerElastic
from icefrog.runtime.agent import Agent
from icefrog.runtime.rules import Egeria
from icefrog.spec import Mode


class LayerElasticCallback(Callback):  # type: ignore[misc]
    """Freezes and un-freezes layers of a LightningModule: ``Trainer(callbacks=[LayerElasticCallback("val_acc")])``.

    The Trainer stays in charge: its schedule, logging, validation, clipping, accumulation and checkpoints are as before. The
    boundary is decided after each validation and at the end of each epoch, and is part of the checkpoints.

    Args:
        metric: a logged metric, as ``ModelCheckpoint(monitor=...)`` takes it; None: only the rule's own signals count.
        mode: whether more is better; default: ``min`` if the name ends in ``loss``, else ``max``.
        target: ends training when the metric reaches it; default: the grant's, or none.
        options: of :class:`~icefrog.runtime.LayerElastic` (``layers``, ``rule``, ``tune_every_steps``, ...).

    Attributes:
        elastic: the LayerElastic in use; None outside of training.
        decisions: all of the present or last training.
    """

    def __init__(
        self,
        metric: str | None = None,
        *,
        mode: Mode | None = None,
        target: float | None = None,
        **options: Any,
    ) -> None:
        self.metric = metric
        self.mode = mode
        self.target = target
        self.options = options
        self.elastic: LayerElastic | None = None
        self.decisions: list[Decision] = []
        self._name: str | None = None
        self._loaded: dict[str, Any] = {}
        self._last_state: dict[str, Any] = {}
        self._epoch_closed = False
        self._stop = False
        self._warned = False
        self._last_metric: float | None = None

    # --- Lightning's events

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the layers; put back what a checkpoint holds.

        Raises:
            UserError: several optimizers, a rule that calls the model by itself, or a strategy that spreads the model in a
                way that the boundary cannot follow.
        """
        _refuse(trainer, pl_module)
        strategy = trainer.strategy
        options = self.options
        if isinstance(strategy, DDPStrategy):
            own = strategy.model
            if hasattr(own, "_remove_autograd_hooks"):
                own._remove_autograd_hooks()  # or two reducers would average the same gradient
            options = {"ddp_options": strategy._ddp_kwargs} | options | {"parallel": "ddp"}
        self._name, mode, target = find_target(self.metric, self.target, self.mode, None)
        elastic = LayerElastic(
            pl_module,
            trainer.optimizers[0],
            target=target,
            mode=mode,
            samples_per_epoch=_samples_per_epoch(trainer),
            grad_scaler=getattr(trainer.precision_plugin, "scaler", None),
            on_stop=self._on_stop,
            **options,
        )
        if isinstance(elastic.rule, Egeria):
            elastic.close()
            raise UserError(
                "egeria runs a copy of the model on a step's input, which under Lightning is that of training_step",
                "choose another rule: LayerElasticCallback(..., rule='autofreeze')",
            )
        strategy.model = DdpStandIn(elastic) if isinstance(strategy, DDPStrategy) else _Called(pl_module)
        self.elastic, self.decisions = elastic, []
        self._stop, self._warned, self._last_metric = False, False, None
        if self._loaded:
            restore(elastic, self._loaded["own"], self._loaded.get("tensors"))
            self._loaded = {}
        elif trainer.global_step > 0:
            warnings.warn("the checkpoint was written without layer elasticity: no layer is frozen", stacklevel=2)
        elastic.begin(_epochs(trainer))

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """No decision has closed this epoch yet."""
        self._epoch_closed = False

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Save and end where the executor asks for it."""
        if self._stop and self.elastic is not None:
            self._stop = False
            path = self._executors_file()
            if path is not None:
                trainer.save_checkpoint(path)
                self.elastic.saved(path)
            trainer.should_stop = True

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Decide; end training at the target."""
        if self.elastic is not None and not trainer.sanity_checking:
            self._decide(trainer, closes=trainer.is_last_batch, validated=True)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Decide, unless a validation has just done so."""
        if self.elastic is not None and not self._epoch_closed:
            self._decide(trainer, closes=True, validated=not trainer.enable_validation)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Give the model and the optimizer back as they were; checkpoints written from here on hold the last state."""
        if self.elastic is not None:
            self.elastic.finish()
            self._last_state = self.state_dict()
        self._close(trainer, pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Give the model and the optimizer back."""
        self._close(trainer, pl_module)

    # --- checkpoints

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """What was loaded for something else does not count for this run."""
        self._loaded = {}

    def state_dict(self) -> dict[str, Any]:
        """Part of Lightning's checkpoint."""
        if self.elastic is None:
            return self._last_state
        text, tensors = own_state(self.elastic)
        return {"own": text, "tensors": tensors}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Kept until the optimizer has its own state back."""
        self._loaded = state_dict

    @property
    def resume_from(self) -> str | None:
        """For ``trainer.fit(ckpt_path=...)``: what a request of the executor to stop has saved; None: a fresh start."""
        path = self._executors_file()
        return str(path) if path is not None and path.is_file() else None

    # --- what they are made of

    @staticmethod
    def _executors_file() -> Path | None:
        folder = Agent(os.environ).checkpoint_dir
        return folder / "lightning.ckpt" if folder is not None else None

    def _on_stop(self) -> None:
        self._stop = True

    def _decide(self, trainer: Any, *, closes: bool, validated: bool) -> None:
        """``validated``: what there is of the metric is new, and what is not there now will not come."""
        elastic = self.elastic
        assert elastic is not None
        value = trainer.callback_metrics.get(self._name) if self._name is not None else None
        if value is None and validated and self._name is not None and not self._warned:
            self._warned = True
            known = ", ".join(trainer.callback_metrics) or "none"
            warnings.warn(f"no metric {self._name!r} was logged; there are: {known}", stacklevel=2)
        metric = float(value) if value is not None else None
        if not validated and metric == self._last_metric:
            metric = None  # of an earlier validation, which Lightning still tells
        else:
            self._last_metric = metric
        decision = elastic.end_epoch(metric) if closes else elastic.decide(metric)
        self._epoch_closed = closes
        self.decisions.append(decision)
        if elastic.target is not None and decision.metric is not None and elastic.target.reached(decision.metric):
            trainer.should_stop = True

    def _close(self, trainer: Any, pl_module: Any) -> None:
        if self.elastic is not None:
            trainer.strategy.model = pl_module
            self.elastic.close()
            self.elastic = None


class _Called(nn.Module):
    """Stands before the LightningModule, so that Lightning calls it as a module (its hooks run), not its method."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Of the module, which Lightning redirects to ``training_step``."""
        return self.module(*args, **kwargs)


def _refuse(trainer: Any, pl_module: Any) -> None:
    if len(trainer.optimizers) != 1:
        raise UserError(
            f"the model has {len(trainer.optimizers)} optimizers; the boundary is that of one",
            "return a single optimizer from configure_optimizers (with parameter groups, where they differ)",
        )
    strategy = trainer.strategy
    if not isinstance(strategy, (DDPStrategy, SingleDeviceStrategy)):
        raise UserError(
            f"{type(strategy).__name__} spreads the model in a way that the boundary cannot follow",
            "use Trainer(strategy='ddp'), or devices=1",
        )
    if isinstance(strategy, DDPStrategy) and not pl_module.automatic_optimization:
        raise UserError(
            "manual optimization under DDP drives Lightning's own wrapper",
            "use automatic optimization, or devices=1",
        )


def _samples_per_epoch(trainer: Any) -> int | None:
    """By the data loader, as far as it says; None: the first epoch tells."""
    loader = trainer.train_dataloader
    if not isinstance(loader, DataLoader) or not loader.batch_size or math.isinf(trainer.num_training_batches):
        return None
    return max(int(trainer.num_training_batches) * loader.batch_size * int(trainer.world_size), 1)


def _epochs(trainer: Any) -> int:
    """By Lightning's own plan."""
    steps = float(trainer.estimated_stepping_batches)
    if math.isinf(steps):
        raise UserError(
            "training has no end, so there is no share of it that is done",
            "give Trainer(max_epochs=...) or max_steps",
        )
    if math.isinf(trainer.num_training_batches):
        return max(int(trainer.max_epochs or 1), 1)
    per_epoch = max(math.ceil(int(trainer.num_training_batches) / int(trainer.accumulate_grad_batches)), 1)
    return max(math.ceil(steps / per_epoch), 1)
