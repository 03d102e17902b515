"""Layer elasticity for the Hugging Face ``Trainer``: one callback (docs/adapters.md)."""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME

from icefrog.errors import UserError
from icefrog.integrations.ddp import DdpStandIn
from icefrog.integrations.own_state import own_state, read_tensors, restore, write_tensors
from icefrog.integrations.target import find_target
from icefrog.runtime import Decision, LayerElastic
from icefrog.spec import Mode, Target

_KEY = "icefrog"  # of our entry in the TrainerState, which travels in each checkpoint's trainer_state.json
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


class LayerElasticCallback(TrainerCallback):  # type: ignore[misc]
    """Freezes and un-freezes layers of the Trainer's model: ``Trainer(..., callbacks=[LayerElasticCallback()])``.

    The Trainer stays in charge: its schedule, logging, evaluation, clipping, accumulation and checkpoints are as before. The
    boundary is decided after each evaluation and at the end of each epoch, and is part of the checkpoints.

    Args:
        metric: name of the evaluation metric, with or without ``eval_``; default: the grant's, else
            ``metric_for_best_model``, else the loss.
        mode: whether more is better; default: ``greater_is_better`` with ``metric_for_best_model``, else ``min`` for a loss
            and ``max`` otherwise.
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
        self._name = ""
        self._epochs_ended = 0
        self._stop = False
        self._metric_seen = False
        self._wrapped: LayerElastic | None = None

    def attach(self, trainer: Any) -> None:
        """Needed with several processes, before ``trainer.train()``: the Trainer's own wrapping in DDP gives way to ours.

        DDP fixes what it synchronises when it is built, and accelerate builds it before any callback is asked.
        """
        plain = trainer._wrap_model

        def wrap(model: nn.Module, training: bool = True, *args: Any, **kwargs: Any) -> Any:
            if not training or trainer.args.world_size == 1:
                return plain(model, training, *args, **kwargs)
            _refuse(trainer.args, attached=True)
            self._close()
            prepared = trainer.accelerator.prepare_model(
                trainer.model, evaluation_mode=True
            )  # autocast, but no wrapping
            handler, scaler = trainer.accelerator.ddp_handler, trainer.accelerator.scaler
            ddp_options = (
                handler.to_kwargs() if handler is not None else {}
            )  # the Trainer's: unused parameters, buckets
            self._wrapped = self._make(
                trainer.args,
                trainer.state,
                prepared,
                trainer.optimizer,
                scaler,
                parallel="ddp",
                ddp_options=ddp_options | self.options.get("ddp_options", {}),
            )
            return DdpStandIn(self._wrapped)

        trainer._wrap_model = wrap
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)

    # --- the Trainer's events

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the layers of the model as it is now; put back what a resumed checkpoint holds.

        Raises:
            UserError: the Trainer spreads the model in a way that the boundary cannot follow.
        """
        if self._wrapped is not None:
            elastic, self._wrapped = self._wrapped, None
        else:
            _refuse(args)
            self._close()
            elastic = self._build(args, state, kwargs["model"], kwargs["optimizer"])
        self.elastic = elastic
        self.decisions, self._stop, self._metric_seen = [], False, False
        self._epochs_ended = int(_epochs(state))
        saved = state.stateful_callbacks.get(_KEY) if state.global_step > 0 else None
        if saved is not None:
            if saved["step"] != state.global_step:
                warnings.warn(f"the boundary is that of step {saved['step']}, not {state.global_step}", stacklevel=2)
            places = [args.resume_from_checkpoint or "", _folder(args, state), saved.get("folder", "")]
            tensors = read_tensors([Path(place) for place in places if place], saved["state"])
            restore(elastic, saved["state"], tensors)
        elif state.global_step > 0:
            warnings.warn("the checkpoint was written without layer elasticity: no layer is frozen", stacklevel=2)
        elastic.begin(max(math.ceil(state.num_train_epochs), 1))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Save and end where the executor asks for it."""
        if self._stop:
            control.should_save = control.should_training_stop = True
        self._remember(args, state, control.should_save or control.should_evaluate)
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Decide, unless an evaluation follows or has just done so."""
        if self.elastic is not None and not control.should_evaluate and _epochs(state) > self._epochs_ended:
            self._decide(state, None)
        self._remember(args, state, control.should_save)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> Any:
        """Decide; end training at the target."""
        elastic = self.elastic
        if elastic is None or state.global_step == 0:
            return control
        value = metrics.get(self._name, metrics.get(f"eval_{self._name}"))
        if value is None:
            if not self._metric_seen and _epochs(state) > self._epochs_ended:
                warnings.warn(f"no metric {self._name!r} in this evaluation, only {', '.join(metrics)}", stacklevel=2)
                self._decide(state, None)
        else:
            self._metric_seen = True
            self._decide(state, float(value))
            if elastic.target is not None and elastic.target.reached(float(value)):
                control.should_training_stop = True
        self._remember(args, state, True)
        return control

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add what the Trainer's files cannot hold; tell the executor, if there is one."""
        if self.elastic is None:
            return
        folder = _folder(args, state)
        before = state.stateful_callbacks.get(_KEY)
        tensors = self._remember(args, state, True)
        if args.should_save and folder.is_dir():
            if state.stateful_callbacks[_KEY] != before:  # a callback behind this one has moved the boundary since
                half = folder / f"{TRAINER_STATE_NAME}.tmp"
                state.save_to_json(str(half))
                half.replace(folder / TRAINER_STATE_NAME)
            write_tensors(folder, state.stateful_callbacks[_KEY]["state"], tensors)
        self.elastic.saved(folder)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the model and the optimizer back as they were."""
        if self.elastic is not None:
            self.elastic.finish()
        self._close()

    # --- what they are made of

    def _build(self, args: Any, state: Any, model: nn.Module, optimizer: Any) -> LayerElastic:
        plain, scaler = optimizer, getattr(optimizer, "scaler", None)
        while getattr(plain, "optimizer", None) is not None:  # accelerate's wrapper
            plain = plain.optimizer
        elastic = self._make(args, state, model, plain, scaler)
        if scaler is not None:  # the wrapper goes on with the ``step`` that the optimizer has now, not that of before
            optimizer.__setstate__({})
        return elastic

    def _make(
        self, args: Any, state: Any, model: nn.Module, optimizer: Any, scaler: Any, **spread: Any
    ) -> LayerElastic:
        mode, target = self._goal(args)
        return LayerElastic(
            model,
            optimizer,
            target=target,
            mode=mode,
            samples_per_epoch=_samples_per_epoch(args, state),
            grad_scaler=scaler,
            on_stop=self._on_stop,
            **(self.options | spread),
        )

    def _goal(self, args: Any) -> tuple[Mode | None, Target | None]:
        """Settles the metric's name, too; the Trainer's names begin with ``eval_``, its users' need not."""
        mode = self.mode
        if mode is None and args.greater_is_better is not None and self.metric is None:
            mode = "max" if args.greater_is_better else "min"
        own = self.metric.removeprefix("eval_") if self.metric else None
        default = (args.metric_for_best_model or "loss").removeprefix("eval_")
        name, mode, target = find_target(own, self.target, mode, default)
        self._name = (name or default).removeprefix("eval_")
        return mode, target

    def _on_stop(self) -> None:
        self._stop = True

    def _decide(self, state: Any, metric: float | None) -> None:
        assert self.elastic is not None
        if _epochs(state) > self._epochs_ended:
            self._epochs_ended = int(_epochs(state))
            self.decisions.append(self.elastic.end_epoch(metric))
        else:
            self.decisions.append(self.elastic.decide(metric))

    def _remember(self, args: Any, state: Any, needed: bool) -> dict[str, Any]:
        """Put our state where the Trainer saves its own; the rest of it."""
        if self.elastic is None or not needed:
            return {}
        text, tensors = own_state(self.elastic)
        folder = str(_folder(args, state).resolve())
        state.stateful_callbacks[_KEY] = {"step": state.global_step, "state": text, "folder": folder}
        return tensors

    def _close(self) -> None:
        if self.elastic is not None:
            self.elastic.close()
            self.elastic = None


def last_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The newest whole checkpoint of a Trainer, for ``trainer.train(resume_from_checkpoint=...)``; None: there is none.

    A Trainer that is killed while it saves leaves a part of a checkpoint, which ``get_last_checkpoint`` of ``transformers``,
    and so ``resume_from_checkpoint=True``, would take. ``trainer_state.json`` is what it writes last.

    Args:
        output_dir: the Trainer's; need not exist yet.
    """
    found = {
        int(name[1]): path
        for path in Path(output_dir).glob("checkpoint-*")
        if (name := _CHECKPOINT.fullmatch(path.name))
    }
    for step in sorted(found, reverse=True):
        try:
            json.loads((found[step] / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            warnings.warn(f"{found[step]} is only a part of a checkpoint: passed over", stacklevel=2)
        else:
            return str(found[step])
    return None


def _folder(args: Any, state: Any) -> Path:
    """Where the Trainer keeps the checkpoint of this step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _epochs(state: Any) -> int:
    """Whole epochs done."""
    return math.floor(float(state.epoch or 0.0) + 1e-9)


def _samples_per_epoch(args: Any, state: Any) -> int:
    """By the Trainer's own plan, which may end within an epoch (``max_steps``)."""
    batch = int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)
    return max(round(int(state.max_steps) * batch / max(int(state.num_train_epochs), 1)), 1)


def _refuse(args: Any, attached: bool = False) -> None:
    if args.n_gpu > 1:
        raise UserError(
            "the Trainer uses nn.DataParallel, whose replicas the boundary cannot follow",
            "start one process per GPU with torchrun, or show the process one GPU (CUDA_VISIBLE_DEVICES)",
        )
    if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
        raise UserError(
            "the Trainer shards the model itself (FSDP or DeepSpeed), which the boundary cannot follow",
            "train data-parallel (torchrun without these options), or use LayerElastic in a loop of your own",
        )
    if getattr(args, "torch_compile", False):
        raise UserError(
            "torch_compile=True compiles the model with the hooks of LayerElastic in it: it would run uncompiled",
            "leave torch_compile out of the TrainingArguments",
        )
    if args.world_size > 1 and not attached:
        raise UserError(
            "with several processes the callback must see the Trainer before it wraps the model",
            "call callback.attach(trainer) before trainer.train()",
        )
