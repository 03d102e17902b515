"""Egeria (Wang, Sun, Chen, Lai and Chowdhury, EuroSys 2023, arXiv:2201.06227): layers freeze as a reference model tells."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from icefrog.errors import UserError
from icefrog.runtime.layers import Layer
from icefrog.runtime.rules.base import FreezingRule, Hands, Proposal, Situation
from icefrog.runtime.tensors import tensors_of
from icefrog.runtime.trained import trained_params


class Egeria(FreezingRule):
    """Freezes the front-most layers whose *plasticity* has stopped changing; a drop of the learning rate opens all of them.

    The plasticity of layer l is the distance between its activations A in the model that trains and in a reference model, a
    snapshot of it, on the same batch of b samples: the similarity-preserving loss (Tung and Mori, ICCV 2019)

        P_l = | G(A_train) - G(A_reference) |_F^2 / b^2,    G(A) = A A^T with rows of length 1, A as a (b, d) matrix.

    Every ``evaluate_every`` steps P_l is measured and averaged over the last W = ``window`` values; a line is fitted to the
    last W averages. A layer is stationary when the slope's size has stayed below ``tolerance`` x the steepest one seen of
    this layer for W evaluations in a row; all stationary layers at the front are frozen at the next decision. When the
    learning rate has fallen to a tenth of what it was when layers were frozen, all are opened, the window is halved (they
    will soon be stationary again) and the reference is renewed. A layer of which the optimizer trains nothing is stationary.

    Deviations from the paper: the reference runs on rank 0, on the same device and in full precision, while training waits
    (theirs is quantised to int8 and runs beside training on the CPU); the plasticity of every open layer is tracked, so that
    each has a steepest slope of its own, not only the front-most one's; the paper's first stage ends with the loss' rate of
    change, ours after ``warmup_share`` of P0; the defaults are ours. It costs one more forward pass in ``evaluate_every``
    steps, and memory of one more model.

    Args:
        evaluate_every: n, steps.
        window: W >= 2, evaluations.
        tolerance: share of the steepest slope, above 0.
        warmup_share: of P0; nothing is measured before.
        renew_every: evaluations after which the reference becomes a snapshot of the model as it is then.

    Raises:
        UserError: a setting out of its range.
    """

    name = "egeria"

    def __init__(
        self,
        evaluate_every: int = 20,
        window: int = 5,
        tolerance: float = 0.2,
        warmup_share: float = 0.1,
        renew_every: int = 40,
    ) -> None:
        if evaluate_every < 1 or window < 2 or tolerance <= 0 or not 0 <= warmup_share <= 1 or renew_every < 3 * window:
            raise UserError(
                f"Egeria({evaluate_every}, {window}, {tolerance}, {warmup_share}, {renew_every}) is not a rule",
                "evaluate_every >= 1, window >= 2, tolerance > 0, warmup_share from 0 to 1, renew_every >= 3 windows",
            )
        self.evaluate_every = evaluate_every
        self.tolerance = tolerance
        self.warmup_share = warmup_share
        self.renew_every = renew_every
        self.window = window
        self._warm = False
        self._frozen_at_lr: float | None = None  # the learning rate when layers were last frozen
        self._evaluations = 0  # since the reference was renewed
        self._tracks: list[Track] = []
        self._idle: list[bool] = []  # by layer: the optimizer trains nothing of it
        self._reference: nn.Module | None = None
        self._saved: dict[str, torch.Tensor] = {}  # of a reference that was restored and is not yet a module
        self._look: Look | None = None

    # --- on the model

    def expect(self, hands: Hands) -> None:
        """Hook the forward pass of a step that is to be evaluated."""
        if self._warm and hands.step % self.evaluate_every == 0:
            self._close_look()
            self._look = Look(hands.model, hands.layers[hands.frozen_layers : -1])

    def observe(self, hands: Hands) -> None:
        """Evaluate the step that was hooked."""
        look = self._close_look()
        if look is None or look.inputs is None:
            return
        if self._reference is None or self._evaluations >= self.renew_every:
            self._renew(hands.model)
        assert self._reference is not None
        self._idle = [not params for params in trained_params(hands.layers, hands.optimizer)]
        self.take(hands.frozen_layers, len(hands.layers), look.plasticity(self._reference))

    def _close_look(self) -> Look | None:
        look, self._look = self._look, None
        if look is not None:
            look.close()
        return look

    def _renew(self, model: nn.Module) -> None:
        """Take a snapshot, or bring back the one that a checkpoint holds; averages start anew with a new reference."""
        self._reference = copy.deepcopy(model).eval().requires_grad_(False)
        if self._saved:
            self._reference.load_state_dict(self._saved)
            self._saved = {}
            return
        self._evaluations = 0
        for track in self._tracks:
            track.restart()

    def close(self) -> None:
        """Remove the hooks of a step that does not come."""
        self._close_look()

    # --- the rule itself

    def take(self, frozen_layers: int, num_layers: int, plasticity: list[float]) -> None:
        """Take in P_l of the layers from the boundary up to the last but one; NaN: not measurable."""
        if len(self._tracks) != num_layers:
            self._tracks = [Track() for _ in range(num_layers)]
        self._evaluations += 1
        for track, value in zip(self._tracks[frozen_layers:], plasticity, strict=False):
            track.take(value, self.window, self.tolerance)

    def propose(self, now: Situation) -> Proposal:
        """Freeze what is stationary at the front; open all after a drop of the learning rate."""
        self._warm = self._warm or now.share_done >= self.warmup_share
        rate = max(now.learning_rates, default=0.0)
        if now.frozen_layers and self._frozen_at_lr is not None and rate <= 0.1 * self._frozen_at_lr * (1 + 1e-9):
            self._frozen_at_lr = None
            self.window = max(self.window // 2, 2)
            self._reference, self._saved, self._tracks = None, {}, []
            return now.at(0, "opened: the learning rate has fallen to a tenth")
        if not self._warm:
            return now.stay(f"nothing is frozen before {self.warmup_share:.0%} of training")
        depth = now.frozen_layers
        tracks = self._tracks if len(self._tracks) == now.num_layers else []
        idle = self._idle if len(self._idle) == len(tracks) else [False] * len(tracks)
        while depth < min(len(tracks) - 1, now.bounds.max_frozen) and (
            idle[depth] or tracks[depth].stale >= self.window
        ):
            depth += 1
        if depth > now.frozen_layers:
            self._frozen_at_lr = rate
            return now.at(depth, f"the plasticity of {depth - now.frozen_layers} more layers is stationary")
        return now.stay("the front-most open layer is still plastic")

    def state_dict(self) -> dict[str, Any]:
        """Averages, slopes and counts."""
        return {
            "window": self.window,
            "warm": self._warm,
            "frozen_at_lr": self._frozen_at_lr,
            "evaluations": self._evaluations,
            "tracks": [track.state() for track in self._tracks],
            "idle": list(self._idle),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`; without :meth:`load_tensors` the next evaluation takes a new reference."""
        self.window = state["window"]
        self._warm = state["warm"]
        self._frozen_at_lr = state["frozen_at_lr"]
        self._evaluations = state["evaluations"]
        self._tracks = [Track(*kept) for kept in state["tracks"]]
        self._idle = list(state["idle"])
        self._reference, self._saved = None, {}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The reference model."""
        return dict(self._saved) if self._reference is None else dict(self._reference.state_dict())

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Inverse of :meth:`tensors`."""
        self._saved = dict(tensors)


class Track:
    """One layer's plasticity over its last evaluations."""

    def __init__(
        self, values: list[float] | None = None, means: list[float] | None = None, steepest: float = 0.0, stale: int = 0
    ) -> None:
        self.values = list(values or ())
        self.means = list(means or ())
        self.steepest = steepest
        self.stale = stale  # evaluations in a row with a flat slope

    def take(self, value: float, window: int, tolerance: float) -> None:
        """One more evaluation; a value that is not finite counts as none."""
        if not math.isfinite(value):
            return
        self.values = [*self.values, value][-window:]
        if len(self.values) < window:
            return
        self.means = [*self.means, sum(self.values) / window][-window:]
        if len(self.means) < window:
            return
        slope = abs(float(np.polyfit(np.arange(window), self.means, 1)[0]))
        self.steepest = max(self.steepest, slope)
        self.stale = self.stale + 1 if slope < tolerance * self.steepest else 0

    def restart(self) -> None:
        """The reference is another one: distances to the old one say nothing any more, but how steep they were does."""
        self.values, self.means, self.stale = [], [], 0

    def state(self) -> list[Any]:
        """JSON values."""
        return [list(self.values), list(self.means), self.steepest, self.stale]


class Look:
    """Hooks of one forward pass: the model's input, and what each layer of a list gives."""

    def __init__(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        names = {module: name for name, module in model.named_modules()}
        self.names = [names[layer.modules[-1]] for layer in layers]
        self.inputs: tuple[Any, Any] | None = None
        self.outputs: dict[str, torch.Tensor] = {}
        self._handles: list[RemovableHandle] = [model.register_forward_pre_hook(self._start, with_kwargs=True)]
        self._handles += _keep_outputs(model, self.names, self.outputs)

    def _start(self, _model: nn.Module, args: Any, kwargs: Any) -> None:
        self.inputs = (args, kwargs)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def plasticity(self, reference: nn.Module) -> list[float]:
        """P of every layer against the reference on the same input; NaN where a layer gives no tensor."""
        assert self.inputs is not None
        args, kwargs = self.inputs
        expected: dict[str, torch.Tensor] = {}
        handles = _keep_outputs(reference, self.names, expected)
        with torch.no_grad():
            reference(*args, **kwargs)
        for handle in handles:
            handle.remove()
        return [
            similarity_loss(self.outputs[name], expected[name])
            if name in self.outputs and name in expected
            else math.nan
            for name in self.names
        ]


def _keep_outputs(model: nn.Module, names: list[str], kept: dict[str, torch.Tensor]) -> list[RemovableHandle]:
    def keep(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            tensor = next(tensors_of(output), None)
            if tensor is not None:
                kept[name] = tensor.detach()

        return hook

    return [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]


def similarity_loss(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """|G(ours) - G(theirs)|_F^2 / b^2 of two activations, first dimension b; NaN where shapes differ."""
    if ours.shape != theirs.shape or ours.ndim == 0:
        return math.nan
    ours, theirs = (
        nn.functional.normalize(flat @ flat.T, dim=1)
        for flat in (tensor.reshape(len(tensor), -1).to(torch.float32) for tensor in (ours, theirs))
    )
    return float((ours - theirs).square().sum() / len(ours) ** 2)
