"""``torch.compile`` and a boundary that moves.

``torch.compile(model)`` compiles the call of the model with all hooks on it, and gives up where a hook does what it cannot
trace (reads a clock, changes the mode of a module): training then goes on uncompiled, without a word. So a compiled model is
opened: hooks stay on the plain model, outside of what is compiled, and its ``forward`` alone is compiled. Names of
parameters are those of the plain model, and DDP wraps it as any other.

One forward pass runs uncompiled at the start and after each move of the boundary, from which the hooks learn what they need
(FLOPs, the order of layers, which modules are shared).
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import nn

from icefrog.errors import UserError
from icefrog.runtime.callers import callers


class CompiledForward:
    """Takes the place of ``model.forward`` until :meth:`close`.

    Args:
        model: the plain one.
        compiled: its forward, compiled.
    """

    def __init__(self, model: nn.Module, compiled: Callable[..., Any]) -> None:
        self.model = model
        self._plain = model.forward
        self._compiled = compiled
        self._learning = True
        model.forward = self

    def learn(self) -> None:
        """The next training forward runs uncompiled."""
        self._learning = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        if self._learning and self.model.training:
            self._learning = False
            return self._plain(*args, **kwargs)
        return self._compiled(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copied model runs uncompiled: what is compiled holds the parameters of the original."""
        twin = memo.get(id(self.model))
        return types.MethodType(type(self.model).forward, twin)

    def close(self) -> None:
        """Give the model its own forward back."""
        if self.model.__dict__.get("forward") is self:
            del self.model.forward


def open_compiled(model: nn.Module) -> tuple[nn.Module, CompiledForward | None]:
    """The plain model, with its forward compiled as it was asked for; a model that is not compiled as it is.

    Raises:
        UserError: compiled in place by ``model.compile()``, hooks and all.
    """
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise UserError(
            "model.compile() compiles the hooks of LayerElastic, too, and training would go on uncompiled",
            "give LayerElastic torch.compile(model) instead",
        )
    plain, context = getattr(model, "_orig_mod", None), getattr(model, "dynamo_ctx", None)
    if not isinstance(plain, nn.Module) or context is None:
        return model, None
    return plain, CompiledForward(plain, context(plain.forward))


def refuse_outer_compile() -> None:
    """Called in a hook on the model.

    Raises:
        UserError: the model is called from compiled code, so its hooks are compiled with it.
    """
    for frame in callers():
        if frame.f_code.co_name == "compile_wrapper" and "torch" in frame.f_globals.get("__name__", ""):
            raise UserError(
                "the model is called from compiled code, with the hooks of LayerElastic in it: it would run uncompiled",
                "give LayerElastic torch.compile(model), and do not compile what calls elastic.model",
            )
