"""This process among its peers: the control plane of a job, and the check that ranks hold the same parameters."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from icefrog.errors import UserError
from icefrog.runtime.checksum import checksum
from icefrog.runtime.layers import Layer
from icefrog.runtime.meeting import meeting
from icefrog.runtime.peers import peers_needed

OUTSIDE = "(frozen by you)"
"""Stands for the parameters outside all layers."""


class DivergenceError(RuntimeError):
    """Ranks no longer hold the same parameters; training on would average unrelated models."""


class World:
    """This process among its peers. Starts the process group if the environment asks for one and nobody did yet.

    Args:
        device: of the model: NCCL is used on CUDA, gloo on the CPU.
        timeout_s: of every collective.

    Raises:
        UserError: there are to be several ranks, and PyTorch cannot connect them.
    """

    def __init__(self, device: torch.device, timeout_s: float = 600.0) -> None:
        env_size = int(os.environ.get("WORLD_SIZE", "1"))
        if env_size > 1 and not dist.is_available():
            raise UserError(
                f"WORLD_SIZE={env_size}, and this PyTorch was built without torch.distributed: each rank would train alone",
                "install a build with it, or start a single process",
            )
        if dist.is_available() and not dist.is_initialized() and env_size > 1:
            single_node = os.environ.get("MASTER_ADDR", "127.0.0.1") in ("127.0.0.1", "localhost", "::1")
            if single_node:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            meeting().start(backend, timeout_s)
        self._entered: Any = None  # the group, if it was started here: by this object, or for another LayerElastic
        up = dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size() if up else 1
        self.rank = dist.get_rank() if up else 0
        gloo = up and "gloo" in str(dist.get_backend_config()) if self.size > 1 else True
        self.control_device = torch.device("cpu") if gloo else device

    def enter(self) -> None:
        """Use the group from now on, until :meth:`close`. (Until then a failure leaves it to the next one who tries.)"""
        self._entered = meeting().enter()

    @peers_needed()
    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """All-reduce of a small tensor, returned on the control device; the value itself in a single process."""
        if self.size == 1:
            return values
        sent = values.to(self.control_device, copy=True)
        dist.all_reduce(sent)
        return sent

    @peers_needed()
    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise largest over the ranks, on the device of ``values``."""
        if self.size == 1:
            return values
        sent = values.to(self.control_device, copy=True)
        dist.all_reduce(sent, op=dist.ReduceOp.MAX)
        return sent.to(values.device)

    @peers_needed()
    def from_rank0(self, value: Any) -> Any:
        """Rank 0's value on every rank (pickled: plain data only)."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.control_device)
        return box[0]

    @peers_needed()
    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor, shape (world, ...)."""
        if self.size == 1:
            return values.unsqueeze(0)
        sent = values.to(self.control_device)
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(parts, sent)
        return torch.stack(parts)

    @peers_needed()
    def gather_plain(self, value: Any) -> list[Any]:
        """Every rank's value, in their order (pickled: plain data and tensors on the CPU)."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    @peers_needed()
    def share_buffers(self, model: nn.Module) -> None:
        """Give every rank rank 0's buffers (normalisation statistics differ between ranks while a layer trains)."""
        if self.size > 1:
            for buffer in model.buffers():
                if buffer.numel():
                    dist.broadcast(buffer.data, src=0)

    @peers_needed()
    def share_parameters(self, model: nn.Module) -> None:
        """Give every rank rank 0's parameters, trainable or not."""
        if self.size > 1:
            for param in model.parameters():
                dist.broadcast(param.data, src=0)

    def close(self) -> None:
        """Leave the process group if it was started here; the last to leave ends it. One of the user's own stays."""
        group, self._entered = self._entered, None
        if group is not None:
            meeting().leave(group)


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
    parts = [*layers, Layer(OUTSIDE, [], rest)]
    compare_sums(checksums(parts), [layer.name for layer in parts], [range(world.size)], world)


def compare_sums(sums: torch.Tensor, names: Sequence[str], groups: Sequence[Sequence[int]], world: World) -> None:
    """Collective over all ranks. The ranks of each group hold the same: :func:`checksums`, zeros for what a rank lacks.

    Args:
        sums: this rank's, shape (parts,).
        names: of the parts.
        groups: ranks that hold the same.
        world: all ranks.

    Raises:
        DivergenceError: they differ, on every rank; names the first part and the ranks.
    """
    every = world.gather(sums)
    for index, name in enumerate(names):
        for group in groups:
            odd = [rank for rank in group if every[rank, index] != every[group[0], index]]
            if odd:
                raise DivergenceError(
                    f"layer {name!r} differs between rank {group[0]} and ranks {odd}: a step was not synchronised. "
                    "Resume from the last checkpoint; look for parameters changed outside the optimizer on some ranks"
                )
