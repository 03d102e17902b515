"""Puts a boundary in force on one process (section 4 of the model): the prefix becomes a fixed function.

Prefix parameters: requires_grad False, grad None, so that backward stops, nothing is synchronised and every optimizer
leaves values and state alone. Prefix modules: eval mode (stored statistics, no dropout), kept so through ``model.train()``
by a forward pre-hook, and their outputs are detached. Parameter groups are never touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from icefrog.errors import UserError
from icefrog.runtime.layers import Layer


class Freezer:
    """The boundary of one model in one process.

    Args:
        model: the unwrapped model.
        optimizer: its optimizer; only looked at.
        layers: in forward order, a partition of the trainable parameters.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, layers: Sequence[Layer]) -> None:
        self.model = model
        self.optimizer = optimizer
        self.layers = list(layers)
        self.frozen_layers = 0
        self._handles: list[list[RemovableHandle]] = [[] for _ in layers]
        self._own_mode: list[dict[nn.Module, bool]] = [{} for _ in layers]

    def check(self, frozen_layers: int) -> int:
        """The boundary itself if it is possible.

        Raises:
            UserError: not an integer in 0..L-1, or an optimizer that cannot leave parameters alone.
        """
        total = len(self.layers)
        if frozen_layers == total:
            raise UserError(
                f"cannot freeze all {total} layers: nothing would be left to train",
                f"freeze at most {total - 1}; to stop training, leave the loop",
            )
        if not 0 <= frozen_layers < total:
            raise UserError(f"cannot freeze {frozen_layers} layers of {total}", f"choose 0 to {total - 1}")
        if frozen_layers and isinstance(self.optimizer, torch.optim.LBFGS):
            raise UserError(
                "LBFGS moves all parameters along one common direction, so a frozen prefix would not stay fixed",
                "use a per-parameter optimizer (SGD, Adam, ...) or do not freeze",
            )
        return frozen_layers

    def set_boundary(self, frozen_layers: int) -> None:
        """Freeze exactly the first ``frozen_layers`` layers. Idempotent. Raises like :meth:`check`."""
        self.check(frozen_layers)
        for index, layer in enumerate(self.layers):
            if index < frozen_layers and index >= self.frozen_layers:
                self._freeze(index, layer)
            elif index >= frozen_layers and index < self.frozen_layers:
                self._unfreeze(index, layer)
        self.frozen_layers = frozen_layers

    def _freeze(self, index: int, layer: Layer) -> None:
        for param in layer.params.values():
            param.requires_grad_(False)
            param.grad = None
        self._own_mode[index] = {
            module: module.training for module in layer.submodules() if module.training != self.model.training
        }
        for module in layer.submodules():
            module.training = False
        for root in layer.modules:
            self._handles[index] += [
                root.register_forward_pre_hook(self._hold_eval),
                root.register_forward_hook(self._detach_output),
            ]

    def _unfreeze(self, index: int, layer: Layer) -> None:
        for handle in self._handles[index]:
            handle.remove()
        self._handles[index] = []
        for param in layer.params.values():
            param.requires_grad_(True)
        for module in layer.submodules():
            module.training = self._own_mode[index].get(module, self.model.training)
        self._own_mode[index] = {}

    def __deepcopy__(self, _memo: Any) -> Freezer:
        """A copied model carries the hooks; they must go on meaning the original (and do nothing for the copy)."""
        return self

    def _in_prefix(self, root: nn.Module) -> bool:
        return any(root is mine for layer in self.layers[: self.frozen_layers] for mine in layer.modules)

    def _hold_eval(self, root: nn.Module, _args: Any) -> None:
        if self._in_prefix(root):
            for module in root.modules():
                module.training = False

    def _detach_output(self, root: nn.Module, _args: Any, output: Any) -> Any:
        """Backward stops here even if a tied parameter, which trains with a later layer, was used in the prefix."""
        return _detached(output) if self._in_prefix(root) else output

    def drop_prefix_grads(self) -> None:
        """Forget any gradient of the prefix, whoever made it; called right before each optimizer step."""
        for layer in self.layers[: self.frozen_layers]:
            for param in layer.params.values():
                param.grad = None

    def drifted(self) -> list[str]:
        """Names of parameters whose requires_grad is not what the boundary says, or that were replaced by new objects."""
        current = dict(self.model.named_parameters())
        return [
            name
            for index, layer in enumerate(self.layers)
            for name, param in layer.params.items()
            if current.get(name) is not param or param.requires_grad == (index < self.frozen_layers)
        ]

    def put_right(self) -> list[str]:
        """Enforce the boundary where other code undid it, and adopt replaced parameters; returns what was wrong.

        Raises:
            UserError: a parameter is gone from the model.
        """
        names = self.drifted()
        current = dict(self.model.named_parameters())
        for index, layer in enumerate(self.layers):
            for name in layer.params:
                if name not in current:
                    raise UserError(
                        f"parameter {name!r} of layer {layer.name!r} is gone from the model",
                        "create LayerElastic after the model has its final shape",
                    )
                param = layer.params[name] = current[name]
                frozen = index < self.frozen_layers
                param.requires_grad_(not frozen)
                if frozen:
                    param.grad = None
        return names

    def prefix_buffers(self) -> list[str]:
        """Names of the buffers of frozen layers: they do not move, so ranks need not exchange them."""
        frozen = {id(module) for layer in self.layers[: self.frozen_layers] for module in layer.submodules()}
        return [
            f"{name}.{key}" if name else key
            for name, module in self.model.named_modules()
            if id(module) in frozen
            for key, _ in module.named_buffers(recurse=False)
        ]


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach() if value.requires_grad else value
    if isinstance(value, tuple):
        items = [_detached(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_detached(item) for item in value]
    if isinstance(value, dict) and any(isinstance(item, torch.Tensor) for item in value.values()):
        detached = {key: _detached(item) for key, item in value.items()}
        try:
            return type(value)(**detached) if type(value) is not dict else detached
        except TypeError:
            return value
    return value
