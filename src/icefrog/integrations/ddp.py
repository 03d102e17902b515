"""What a framework takes for its own DistributedDataParallel: the module whose wrapper follows the boundary."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from icefrog.runtime import LayerElastic


class DdpStandIn(DistributedDataParallel):
    """``elastic.model`` in the place of a framework's wrapper.

    Frameworks ask ``isinstance(model, DistributedDataParallel)`` to find the plain model (``.module``) and ``no_sync``. The
    communication is in the wrapper inside ``elastic.model``, which is rebuilt when the boundary moves; this object, of which
    frameworks keep references, stays.
    """

    def __init__(self, elastic: LayerElastic) -> None:
        nn.Module.__init__(self)  # not DDP's: it would build a second reducer
        self.module = elastic.model.module
        self.__dict__["_outer"] = elastic.model  # not a submodule: it holds the same model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Of the elastic module."""
        return self.__dict__["_outer"](*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Backward passes inside only accumulate."""
        context: AbstractContextManager[None] = self.__dict__["_outer"].no_sync()
        return context

    def train(self, mode: bool = True) -> DdpStandIn:
        """Training mode of the model and of the wrapper inside."""
        self.training = mode
        self.__dict__["_outer"].train(mode)
        return self
