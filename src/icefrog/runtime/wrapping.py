"""Data parallelism with a boundary that moves: a stable outer module around a DDP wrapper that is rebuilt.

DDP fixes what it synchronises when it is built, so the wrapper is rebuilt whenever the trainable set changes, on freezing
and on un-freezing, without sending the parameters again (2-9 ms). The user's ``model`` is the outer module, which stays.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from icefrog.runtime.checksum import checksum
from icefrog.runtime.freezing import Freezer
from icefrog.runtime.layers import Layer


class DivergenceError(RuntimeError):
    """Ranks no longer hold the same parameters; training on would average unrelated models."""


class World:
    """This process among its peers. Starts the process group if the environment asks for one and nobody did yet.

    Args:
        device: of the model: NCCL is used on CUDA, gloo on the CPU.
        timeout_s: of every collective.
    """

    def __init__(self, device: torch.device, timeout_s: float = 600.0) -> None:
        self.started = False
        env_size = int(os.environ.get("WORLD_SIZE", "1"))
        if dist.is_available() and not dist.is_initialized() and env_size > 1:
            single_node = os.environ.get("MASTER_ADDR", "127.0.0.1") in ("127.0.0.1", "localhost", "::1")
            if single_node:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
            self.started = True
        up = dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size() if up else 1
        self.rank = dist.get_rank() if up else 0
        gloo = up and "gloo" in str(dist.get_backend_config()) if self.size > 1 else True
        self.control_device = torch.device("cpu") if gloo else device

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """All-reduce of a small tensor, returned on the control device; the value itself in a single process."""
        if self.size == 1:
            return values
        sent = values.to(self.control_device, copy=True)
        dist.all_reduce(sent)
        return sent

    def from_rank0(self, value: Any) -> Any:
        """Rank 0's value on every rank (pickled: plain data only)."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.control_device)
        return box[0]

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor, shape (world, ...)."""
        if self.size == 1:
            return values.unsqueeze(0)
        sent = values.to(self.control_device)
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(parts, sent)
        return torch.stack(parts)

    def share_buffers(self, model: nn.Module) -> None:
        """Give every rank rank 0's buffers (normalisation statistics differ between ranks while a layer trains)."""
        if self.size > 1:
            for buffer in model.buffers():
                if buffer.numel():
                    dist.broadcast(buffer.data, src=0)

    def share_parameters(self, model: nn.Module) -> None:
        """Give every rank rank 0's parameters, trainable or not."""
        if self.size > 1:
            for param in model.parameters():
                dist.broadcast(param.data, src=0)

    def close(self) -> None:
        """Leave the process group if this object started it."""
        if self.started and dist.is_initialized():
            dist.destroy_process_group()
            self.started = False


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
        return replica(*args, **kwargs)

    def train(self, mode: bool = True) -> ElasticModule:
        """Training mode of the model and of its wrapper."""
        super().train(mode)
        if self.__dict__["replica"] is not None:
            self.__dict__["replica"].training = mode
        return self

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


class Wrapper:
    """Builds and rebuilds DDP inside an :class:`ElasticModule`, and checks what it must leave alone."""

    def __init__(
        self, outer: ElasticModule, freezer: Freezer, world: World, hook: Any, ddp_options: Mapping[str, Any]
    ) -> None:
        self.outer = outer
        self.freezer = freezer
        self.world = world
        self.hook = hook
        self.ddp_options = dict(ddp_options)
        self.wraps = 0

    def wrap(self) -> None:
        """Collective. Rebuild communication for the present trainable set.

        Raises:
            RuntimeError: wrapping changed which parameters train (it did in some releases of PyTorch).
        """
        old = self.outer.__dict__["replica"]
        if old is not None:
            self.outer.__dict__["replica"] = None
            if hasattr(old, "_remove_autograd_hooks"):
                old._remove_autograd_hooks()
            del old
        self.world.share_buffers(self.outer.module)
        # Fixed buffers need no broadcast before each forward.
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
            self.outer.module, self.freezer.prefix_buffers()
        )
        device = next(self.outer.module.parameters()).device
        replica = DistributedDataParallel(
            self.outer.module,
            device_ids=[device.index] if device.type == "cuda" else None,
            init_sync=False,
            **self.ddp_options,
        )
        replica.training = self.outer.training
        if self.hook is not None:
            hook = self.hook  # DDP checks the annotations of what it is given: a lambda has none
            replica.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
        self.outer.__dict__["replica"] = replica
        self.wraps += 1
        if names := self.freezer.drifted():
            raise RuntimeError(f"wrapping changed requires_grad of {', '.join(names[:5])}")

    def set_sync(self, sync: bool) -> None:
        """Whether the coming backward synchronises (false in all but the last accumulation micro-step)."""
        replica = self.outer.__dict__["replica"]
        if replica is not None:
            replica.require_backward_grad_sync = sync


def checksums(layers: Sequence[Layer]) -> torch.Tensor:
    """One wrapping 64-bit sum of the parameters' bytes per layer, shape (L,), int64; equal bits, equal sums."""
    return torch.stack(
        [
            sum(
                ((index + 1) * checksum(param) for index, param in enumerate(layer.params.values())),
                start=torch.zeros((), dtype=torch.int64),
            )
            for layer in layers
        ]
    )


def check_in_step(model: nn.Module, layers: Sequence[Layer], world: World) -> None:
    """Collective. Compare all ranks' parameters bit by bit, by checksum; those outside all layers included.

    Raises:
        DivergenceError: they differ, on every rank; names the first layer and the ranks.
    """
    if world.size == 1:
        return
    known = {id(param) for layer in layers for param in layer.params.values()}
    rest = {name: param for name, param in model.named_parameters() if id(param) not in known}
    parts = [*layers, Layer("(frozen by you)", [], rest)]
    every = world.gather(checksums(parts))
    for index, layer in enumerate(parts):
        column = every[:, index]
        odd = [rank for rank in range(world.size) if column[rank] != column[0]]
        if odd:
            raise DivergenceError(
                f"layer {layer.name!r} differs between rank 0 and ranks {odd}: a step was not synchronised. "
                "Resume from the last checkpoint; look for parameters changed outside the optimizer on some ranks"
            )
