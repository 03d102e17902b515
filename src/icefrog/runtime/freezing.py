"""Puts a boundary in force on one process (section 4 of the model): the prefix becomes a fixed function.

Prefix parameters: requires_grad False, grad None, so that backward stops, nothing is synchronised and every optimizer
leaves values and state alone. Prefix modules: eval mode (stored statistics, no dropout), kept so through ``model.train()``
by a forward pre-hook on each of them. Parameter groups are never touched.

Frozen parameters alone make backward stop, unless a tied weight that trains with a later layer is used in the prefix. Only
for that the outputs of the prefix are detached, by one rule that keeps every gradient of a trainable layer: *a call is cut,
or a parameterless module is held in eval mode, only while no trainable layer has run in the same forward pass.* Nothing is
cut where the input wants a gradient: for itself (a gradient penalty, an adversarial example), or for what it was computed
from (a generator before a discriminator).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from icefrog.errors import UserError
from icefrog.runtime.checksum import checksum
from icefrog.runtime.hook_owner import HookOwner
from icefrog.runtime.layers import Layer
from icefrog.runtime.reentrant import FIX, PROBLEM, in_reentrant_checkpoint
from icefrog.runtime.tensors import wants_gradient
from icefrog.runtime.trained import last_trained


class Freezer(HookOwner):
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
        self._handles: list[RemovableHandle] = []
        self._own_mode: dict[nn.Module, bool | None] = {}  # of the modules held in eval mode; None: the model's
        self._unsure: set[nn.Module] = set()  # of those: put to sleep while the whole model slept
        self._released: set[nn.Module] = set()  # opened while the whole model slept, and to wake with it
        self._nesting: list[nn.TransformerEncoder] = []  # kept from it, see :meth:`_hook`
        self._reach: dict[nn.Module, int] = {}  # the last layer that ever ran before a call of the module
        self._passed: dict[nn.Module, int] = {}  # the same at the end of a call
        self._running = -1  # the last layer that has run in the forward pass in progress
        self._inside = False  # a forward pass of the whole model is in progress
        self._recorded = False  # and gradients are wanted
        self._asked = False  # in the last forward pass, for a gradient of the model's input
        self.reentrant = False  # the model checkpoints activations in the way that freezing does not work with
        self._index()

    def _index(self) -> None:
        """Who uses each module, and which modules hold parameters of a layer."""
        self._last_user = {module: i for i, layer in enumerate(self.layers) for module in layer.submodules()}
        self._holds: dict[nn.Module, int] = {}
        for index, layer in enumerate(self.layers):
            own = {id(param) for param in layer.params.values()}
            holders = [m for m in layer.submodules() if any(id(param) in own for param in m.parameters())]
            self._holds.update(dict.fromkeys(holders or layer.modules[-1:], index))
        self._outside = [
            (name, param) for name, param in self.model.named_parameters() if id(param) not in self._layer_param_ids()
        ]

    def _layer_param_ids(self) -> set[int]:
        return {id(param) for layer in self.layers for param in layer.params.values()}

    def check(self, frozen_layers: int) -> int:
        """The boundary itself if it is possible.

        Raises:
            UserError: not an integer in 0..L-1, an optimizer that cannot leave parameters alone, or reentrant activation
                checkpointing.
        """
        total = len(self.layers)
        try:
            frozen_layers = operator.index(None if isinstance(frozen_layers, bool) else frozen_layers)  # type: ignore[arg-type]
        except TypeError as error:
            problem = f"cannot freeze {frozen_layers!r} layers"
            raise UserError(problem, f"give a whole number, 0 to {total - 1}") from error
        if frozen_layers == total:
            raise UserError(
                f"cannot freeze all {total} layers: nothing would be left to train",
                f"freeze at most {total - 1}; to stop training, leave the loop",
            )
        if not 0 <= frozen_layers < total:
            raise UserError(f"cannot freeze {frozen_layers} layers of {total}", f"choose 0 to {total - 1}")
        if frozen_layers > (most := last_trained(self.layers, self.optimizer)):
            raise UserError(
                f"cannot freeze {frozen_layers} layers: the optimizer has no parameter of the layers behind them",
                f"freeze at most {most}, or give the optimizer what should be trained",
            )
        if frozen_layers and isinstance(self.optimizer, torch.optim.LBFGS):
            raise UserError(
                "LBFGS moves all parameters along one common direction, so a frozen prefix would not stay fixed",
                "use a per-parameter optimizer (SGD, Adam, ...) or do not freeze",
            )
        if frozen_layers and self.reentrant:
            raise UserError(PROBLEM, FIX)
        return frozen_layers

    def set_boundary(self, frozen_layers: int) -> None:
        """Freeze exactly the first ``frozen_layers`` layers. Idempotent. Raises like :meth:`check`."""
        self.check(frozen_layers)
        for index, layer in enumerate(self.layers):
            if (index < frozen_layers) != (index < self.frozen_layers):
                for param in layer.params.values():
                    param.requires_grad_(index >= frozen_layers)
                    if index < frozen_layers:
                        param.grad = None
        self.frozen_layers = frozen_layers
        self._see_modes()
        for module in self._last_user:
            self._set_mode(module)
        self._hook()

    def _hook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        depth = self.frozen_layers
        for encoder in self._nesting:
            encoder.use_nested_tensor = True
        # With its first layer in eval mode it would hand nested tensors on to those that train, which take none.
        encoders = [
            module for module in self.model.modules() if depth > 0 and isinstance(module, nn.TransformerEncoder)
        ]
        self._nesting = [encoder for encoder in encoders if getattr(encoder, "use_nested_tensor", False)]
        for encoder in self._nesting:
            encoder.use_nested_tensor = False
        if depth > 0 or self._released:
            self._handles = [
                self.model.register_forward_pre_hook(self._start, with_kwargs=True),
                self.model.register_forward_hook(self._end, always_call=True),
            ]
        if depth == 0:
            return
        prefix = [module for module, last in self._last_user.items() if last < depth]
        for module in dict.fromkeys([*prefix, *self._holds]):
            self._handles.append(module.register_forward_pre_hook(self._enter))
        for root in self.prefix_roots():
            if any(True for _ in root.parameters()):
                self._handles.append(root.register_forward_hook(self._detach_output))

    def close(self) -> None:
        """Nothing is frozen, and no hooks are left."""
        self.set_boundary(0)
        self._released.clear()
        self._hook()

    # --- while the model runs

    def _start(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if model is self.model:
            self._running, self._inside, self._recorded = -1, True, torch.is_grad_enabled()
            self._asked = wants_gradient((args, kwargs))
            self._see_modes()
            for module in self._own_mode:  # ``model.train()`` woke them; some forwards read the flags of others
                module.training = False

    def _end(self, model: nn.Module, _args: Any, _output: Any) -> None:
        if model is self.model:
            self._inside = False

    def _enter(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling() or module not in self._last_user:
            return  # modes were set by :meth:`_start`, which is not compiled; or a module of a copy
        if self._inside:
            layer = self._holds.get(module, -1)
            if (
                layer >= self.frozen_layers
                and self._recorded
                and not torch.is_grad_enabled()
                and in_reentrant_checkpoint()
            ):
                raise UserError(f"{PROBLEM} (layer {self.layers[layer].name!r})", FIX)
            self._reach[module] = max(self._reach.get(module, -1), self._running)
            self._running = max(self._running, layer)
        self._set_mode(module)

    def _detach_output(self, root: nn.Module, _args: Any, output: Any) -> Any:
        """Backward stops here even if a tied parameter, which trains with a later layer, was used in the prefix."""
        if root not in self._last_user or self._asked:
            return output
        if self._inside and not torch.compiler.is_compiling():
            self._passed[root] = max(self._passed.get(root, -1), self._running)
        # Outside of a forward pass (recomputed activations) as in the last one.
        cut = self._passed.get(root, self.frozen_layers) < self.frozen_layers
        return _detached(output) if cut else output

    def _see_modes(self) -> None:
        """The model trains again: what its ``train()``, and the user behind it, made of the modules' modes.

        Of a module that fell asleep with the whole model it shows now whether the user holds it in eval mode
        (``bn.eval()`` in each epoch). One that was opened meanwhile must be awake, also where other code has put back the
        modes that it found while it was frozen, one by one (Lightning, after validation).
        """
        if self.model.training:
            for module in self._unsure:
                self._own_mode[module] = None if module.training else False
            for module in self._released:
                module.training = True
            self._unsure.clear()
            self._released.clear()

    def _fixed(self, module: nn.Module) -> bool:
        depth = self.frozen_layers
        if self._last_user[module] >= depth:
            return False
        return module in self._holds or self._reach.get(module, -1) < depth

    def _set_mode(self, module: nn.Module) -> None:
        if self._fixed(module):
            if module not in self._own_mode:
                follows = module.training == self.model.training
                self._own_mode[module] = None if follows else module.training
                if follows and not self.model.training:
                    self._unsure.add(module)
            self._released.discard(module)
            module.training = False
        elif module in self._own_mode:
            mode = self._own_mode.pop(module)
            if mode is not None or not module.training:  # else it was woken since, maybe alone (``dropout.train()``)
                module.training = self.model.training if mode is None else mode
            if mode is None and module not in self._unsure and not self.model.training:
                self._released.add(module)
            self._unsure.discard(module)

    # --- what other code may undo

    def drop_prefix_grads(self) -> None:
        """Forget any gradient of what must not move, whoever made it; called right before each optimizer step.

        That is the prefix, and parameters that were frozen when the layers were made: gradients of the latter are not
        synchronised until :meth:`put_right` has adopted them.
        """
        for layer in self.layers[: self.frozen_layers]:
            for param in layer.params.values():
                param.grad = None
        for _, param in self._outside:
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

        Parameters outside all layers that want a gradient now (frozen by the user at first, or new) are adopted too: by
        the layer of their module, else by the last one.

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
        known = self._layer_param_ids()
        for name, param in current.items():
            if param.requires_grad and id(param) not in known:
                names.append(name)
                owner = self.model.get_submodule(name.rpartition(".")[0])
                index = self._last_user.get(owner, len(self.layers) - 1)
                self.layers[index].params[name] = param
                param.requires_grad_(index >= self.frozen_layers)
                param.grad = None  # of this rank alone
        if names:
            self._index()
            self._hook()
        return names

    def prefix_roots(self) -> list[nn.Module]:
        """The modules that only the prefix uses, in the layers' order; each is the root of a subtree."""
        roots = dict.fromkeys(root for layer in self.layers[: self.frozen_layers] for root in layer.modules)
        return [root for root in roots if self._last_user[root] < self.frozen_layers]

    def prefix_tensors(self) -> list[torch.Tensor]:
        """Parameters and buffers of :meth:`prefix_roots`."""
        return [tensor for root in self.prefix_roots() for tensor in (*root.parameters(), *root.buffers())]

    def prefix_digest(self) -> str:
        """Of the prefix as a function: its depth, names, and the bits of its parameters and buffers."""
        names = [layer.name for layer in self.layers[: self.frozen_layers]]
        sums = [int(checksum(tensor)) for tensor in self.prefix_tensors() if tensor.numel()]
        return f"{names}{sums}"

    def prefix_buffers(self) -> list[str]:
        """Names of the buffers of frozen layers: they do not move, so ranks need not exchange them."""
        return [
            f"{name}.{key}" if name else key
            for name, module in self.model.named_modules()
            if self._last_user.get(module, self.frozen_layers) < self.frozen_layers and module in self._holds
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
