"""Tells when the gradients of each layer are there, with one Python call a layer and backward pass.

A hook on each parameter costs microseconds, and a network has hundreds of small ones. Backward makes a layer's gradients in
the same order each time, since it follows the forward pass: so every parameter is hooked until one step has shown which of
the layer's comes last, and then that one alone. Where another turns out to come later (a graph that changes, or that is
compiled by now), it is hooked at once, in the middle of the pass, and all are from the next step on. Where gradients are
zeroed in place, that only shows behind the pass: they have changed since, which PyTorch counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from icefrog.runtime.layers import Layer

Listener: TypeAlias = Callable[[int, Sequence[nn.Parameter]], None]
_TRIES = 3
"""So often a layer is taken for one with a fixed order; after that all of its parameters stay hooked."""


def on_gradient(param: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Call ``hook(param)`` whenever backward has added to ``param.grad``; also for a parameter that is frozen now."""
    trains = param.requires_grad
    param.requires_grad_(True)
    handle: RemovableHandle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    param.requires_grad_(trains)
    return handle


class GradientWatch:
    """Owned by :class:`~icefrog.runtime.engine.Engine`, which says when a step is over.

    Args:
        layers: all of them, frozen ones included.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._listeners: list[Listener] = []
        self._layers = [
            _Watched(index, list(layer.params.values()), self._listeners) for index, layer in enumerate(layers)
        ]

    def listen(self, listener: Listener) -> None:
        """Call ``listener(layer, params)`` whenever backward has made the gradients of these parameters of a layer.

        While a layer's order is unknown that is one call for each parameter, later one for all of them; the layer's last
        call in a backward pass is the one that counts.
        """
        self._listeners.append(listener)

    def step_over(self) -> bool:
        """All backward passes of an optimizer step are over; whether some gradients came that nobody was told of."""
        missed = [layer.step_over() for layer in self._layers]  # of each layer, whatever others missed
        return any(missed)

    def close(self) -> None:
        """Remove all hooks."""
        for layer in self._layers:
            layer.unhook()


class _Watched:
    def __init__(self, index: int, params: list[nn.Parameter], listeners: list[Listener]) -> None:
        self._index = index
        self._params = params
        self._listeners = listeners
        self._tries = 0
        self._last: nn.Parameter | None = None
        """Of the parameters that have a gradient in this step, the latest."""
        self._seen: set[int] = set()
        """Ids of those, while all are hooked."""
        self._alone: nn.Parameter | None = None
        """The only one that is hooked; None: all are."""
        self._wrong = False
        """It was not the last."""
        self._versions: list[tuple[nn.Parameter, int]] = []
        """Of the gradients that were told of when it came."""
        self._handles: list[RemovableHandle] = []
        self._hook_all()

    def unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook_all(self) -> None:
        self.unhook()
        self._alone, self._wrong = None, False
        self._seen.clear()
        self._handles = [on_gradient(param, self._each) for param in self._params]

    def _each(self, param: torch.Tensor) -> None:
        assert isinstance(param, nn.Parameter)
        self._last = param
        self._seen.add(id(param))
        for listener in self._listeners:
            listener(self._index, (param,))

    def _whole(self, param: torch.Tensor) -> None:
        assert isinstance(param, nn.Parameter)
        self._last = param
        live = [other for other in self._params if other.grad is not None]
        if not self._wrong and len(live) < len(self._params):
            late = [other for other in self._params if other.grad is None and other.requires_grad]
            self._wrong = bool(late)
            self._handles += [on_gradient(other, self._each) for other in late]
        self._versions = [(other, other.grad._version) for other in live if other.grad is not None]
        for listener in self._listeners:
            listener(self._index, live)

    def _missed(self) -> bool:
        """Whether a gradient was made after it was told of. What changes all of them since (clipping) is no such thing."""
        told, self._versions = self._versions, []
        return len({other.grad._version - version for other, version in told if other.grad is not None}) > 1

    def step_over(self) -> bool:
        last, self._last = self._last, None
        missed = self._missed()
        if self._alone is not None:
            self._wrong = self._wrong or missed
            # Another comes later, or this one is not used in each step.
            if self._wrong or (last is None and self._alone.requires_grad):
                self._hook_all()
            return missed
        if last is None or self._tries == _TRIES:
            self._seen.clear()
            return missed
        if all(id(param) in self._seen for param in self._params if param.requires_grad):
            self._tries += 1
            self.unhook()
            self._alone, self._handles = last, [on_gradient(last, self._whole)]
        self._seen.clear()
        return missed
