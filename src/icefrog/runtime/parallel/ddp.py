"""Data parallelism with a boundary that moves: a stable outer module around a DDP wrapper that is rebuilt.

DDP fixes what it synchronises when it is built, so the wrapper is rebuilt whenever the trainable set changes, on freezing
and on un-freezing, without sending the parameters again (2-9 ms). The user's ``model`` is the outer module, which stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from icefrog.runtime.parallel.base import Parallel
from icefrog.runtime.peers import peers_needed
from icefrog.runtime.world import World


class ElasticModule(nn.Module):
    """The user's model under data parallelism. Names of parameters and state are those of the unwrapped model.

    Under ``torch.no_grad()`` the unwrapped model runs, without communication, so that one rank may validate alone.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model
        self.__dict__["replica"] = None  # not a submodule: DDP holds the same model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output; gradients are synchronised in backward."""
        replica = self.__dict__["replica"]
        if replica is None or not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        with peers_needed():
            return replica(*args, **kwargs)

    def train(self, mode: bool = True) -> ElasticModule:
        """Training mode of the model and of its wrapper."""
        super().train(mode)
        if self.__dict__["replica"] is not None:
            self.__dict__["replica"].training = mode
        return self

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As DDP's: backward passes inside only accumulate (for a loop that accumulates by itself)."""
        replica = self.__dict__["replica"]
        before = replica is not None and replica.require_backward_grad_sync
        if replica is not None:
            replica.require_backward_grad_sync = False
        try:
            yield
        finally:
            if replica is not None:
                replica.require_backward_grad_sync = before

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Of the unwrapped model."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Into the unwrapped model."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Of the unwrapped model."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Of the unwrapped model."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class DataParallel(Parallel):
    """Every rank holds the model and a part of the batch; gradients are averaged in DDP's communication hook.

    Args:
        ddp_options: further arguments of DistributedDataParallel.
    """

    name: ClassVar[str] = "ddp"

    def __init__(self, ddp_options: Mapping[str, Any] | None = None) -> None:
        self.ddp_options = dict(ddp_options or {})
        self.wraps = 0  # how often it was built

    def start(self, model: nn.Module, world: World) -> None:
        """Collective. All ranks take rank 0's parameters."""
        super().start(model, world)
        self.outer = ElasticModule(model)

    @property
    def module(self) -> nn.Module:
        """The outer module."""
        return self.outer

    def rewire(self) -> None:
        """Collective. A new wrapper for the present trainable set; all ranks take rank 0's buffers."""
        old = self.outer.__dict__["replica"]
        if old is not None:
            self.outer.__dict__["replica"] = None
            if hasattr(old, "_remove_autograd_hooks"):
                old._remove_autograd_hooks()
            del old
        self.world.share_buffers(self.model)
        # Fixed buffers need no broadcast before each forward.
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
            self.model, self.freezer.prefix_buffers()
        )
        device = next(self.model.parameters()).device
        replica = DistributedDataParallel(
            self.model,
            device_ids=[device.index] if device.type == "cuda" else None,
            init_sync=False,
            **self.ddp_options,
        )
        replica.training = self.outer.training
        hook = self.statistics.comm_hook  # DDP checks the annotations of what it is given: a lambda has none
        replica.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
        self.outer.__dict__["replica"] = replica
        self.wraps += 1
        self.verify()

    def set_sync(self, sync: bool) -> None:
        """Whether the coming backward runs the all-reduce."""
        self.outer.__dict__["replica"].require_backward_grad_sync = sync

    def close(self) -> None:
        """The outer module goes on as the plain model."""
        self.outer.__dict__["replica"] = None
