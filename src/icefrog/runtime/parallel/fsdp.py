"""Sharded data parallelism (FSDP2, ``fully_shard``): parameters, gradients and optimizer state are split over the ranks.

Each freezable layer is a unit of its own, so that no unit holds frozen and trainable parameters; what belongs to no unit
alone (loose parameters, tied ones, which must be in one unit with all their users) stays with the whole model's unit. A unit
gathers its parameters before its forward and its backward pass and frees them behind each. A frozen unit takes part in no
backward pass: its parameters are not gathered again, and no gradient is made or sent. Moving the boundary needs no
rebuilding: FSDP2 looks at ``requires_grad`` in each pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from icefrog.errors import UserError
from icefrog.profile import Sharded
from icefrog.runtime import named_state
from icefrog.runtime.checksum import checksum
from icefrog.runtime.layers import Layer
from icefrog.runtime.parallel.base import Parallel
from icefrog.runtime.peers import peers_needed
from icefrog.runtime.statistics import Source
from icefrog.runtime.world import DivergenceError, World

# Of PyTorch 2.13 and later; before, each had the second name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class FullyShardedDataParallel(Parallel):
    """Every rank holds a slice of each parameter and a part of the batch."""

    name: ClassVar[str] = "fsdp"
    sharded: ClassVar[bool] = True
    caches: ClassVar[bool] = False

    def start(self, model: nn.Module, world: World) -> None:
        """Collective. All ranks take rank 0's parameters; they are split in :meth:`place`.

        Raises:
            UserError: a parameter without dimensions, which cannot be split.
        """
        super().start(model, world)
        scalars = [name for name, param in model.named_parameters() if param.ndim == 0]
        if scalars:
            raise UserError(
                f"parameters without dimensions cannot be sharded: {', '.join(scalars[:5])}",
                "give them the shape (1,), or use parallel='ddp'",
            )
        self._sync = True
        self._share_due = True
        self._moving_buffers: list[torch.Tensor] = []
        self._units: list[list[nn.Module]] = []  # modules of each layer's unit; the model itself is one more
        self._gathered: list[nn.Parameter] = []  # the parameters that autograd sees; without data between passes

    def place(self, layers: Sequence[Layer], optimizer: torch.optim.Optimizer) -> None:
        """Collective. Split all parameters; ``optimizer`` and ``layers`` hold the slices from now on.

        Raises:
            UserError: the optimizer has state, which would not fit, or holds another one.
        """
        named_state.refuse_inner(optimizer)
        if optimizer.state:
            raise UserError(
                "the optimizer already has state, of whole parameters",
                "create LayerElastic before the first step; elastic.epochs() or load_state_dict() restores the state",
            )
        model = self.model
        self._handle = model.register_forward_pre_hook(self._share_buffers)
        names = {id(param): name for name, param in model.named_parameters()}
        trains = {name: param.requires_grad for name, param in model.named_parameters()}
        mesh = init_device_mesh(next(model.parameters()).device.type, (self.world.size,))
        self._units = _own_modules(model, layers)
        for modules in self._units:
            fully_shard(modules, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        for unit in self._all_units():
            unit.set_custom_all_gather(_AllGather())  # type: ignore[arg-type]  # not a subclass, here and below
            # The reduction applies the weight itself, as samples may be dealt unevenly.
            unit.set_custom_reduce_scatter(_WeightedReduceScatter(self))  # type: ignore[arg-type]
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        for unit in self._all_units():
            # Now, while everything trains as it will: FSDP2 settles data types of a unit with its first gathering.
            unit.unshard()
            self._gathered += [param for param in model.parameters() if not isinstance(param, DTensor)]
            unit.reshard()
        slices = dict(model.named_parameters())
        odd = [name for name, param in slices.items() if param.requires_grad != trains[name]]
        if odd:
            raise RuntimeError(f"wrapping changed requires_grad of {', '.join(odd[:5])}")
        for layer in layers:
            layer.params.update({name: slices[name] for name in layer.params})
        for group in optimizer.param_groups:
            group["params"] = [slices[names[id(p)]] if id(p) in names else p for p in group["params"]]

    def _all_units(self) -> Iterator[FSDPModule]:
        """The model's own unit first: the first one used becomes the root of all."""
        for module in (self.model, *(modules[0] for modules in self._units)):
            unit: Any = module
            assert isinstance(unit, FSDPModule)
            yield unit

    def rewire(self) -> None:
        """Collective. All ranks take rank 0's buffers; frozen ones are not sent again."""
        self.world.share_buffers(self.model)
        fixed = set(self.freezer.prefix_buffers())
        self._moving_buffers = [b for name, b in self.model.named_buffers() if name not in fixed and b.numel()]
        below = False  # whether the unit before is frozen
        for modules in self._units:
            unit: Any = modules[0]
            trains = any(param.requires_grad for module in modules for param in module.parameters())
            # By itself a unit fetches the one before it, while its backward pass runs: here itself instead, which is there.
            unit.set_modules_to_backward_prefetch([unit] if trains and below else [])
            below = not trains
        self.verify()

    def _share_buffers(self, model: nn.Module, _args: Any) -> None:
        """As DDP does: before the first forward pass of each step all ranks take rank 0's normalisation statistics."""
        if model is not self.model or not torch.is_grad_enabled():
            return
        if self._share_due:
            by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
            for buffer in self._moving_buffers:
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
            for buffers in by_dtype.values():
                flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
                with peers_needed():
                    dist.broadcast(flat, src=0)
                sizes = [buffer.numel() for buffer in buffers]
                for buffer, part in zip(buffers, torch.split(flat, sizes), strict=True):
                    buffer.copy_(part.view_as(buffer))
        self._share_due = self._sync

    def source(self, accum_steps: int) -> Source:
        """Successive steps: |g_r|^2 of one rank would need second moments that are on other ranks."""
        return "steps"

    # --- one optimizer step

    def describe(self) -> Sharded:
        """What gathering costs is for whoever measures several world sizes."""
        return Sharded()

    def set_sync(self, sync: bool) -> None:
        """Whether the coming backward runs the reduce-scatter."""
        self._sync = sync
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(sync)

    def scale_gradients(self, factor: float) -> None:
        """On this rank alone. What was accumulated without a reduction is in the gradients of the gathered parameters."""
        for param in self._gathered:
            if param.grad is not None:
                param.grad.mul_(factor)

    def drop_gradients(self) -> None:
        """On this rank alone. Those that were reduced, and those that were not yet."""
        super().drop_gradients()
        for param in self._gathered:
            param.grad = None

    # --- trust

    def check_in_step(self, layers: Sequence[Layer]) -> None:
        """Collective. No parameter is on two ranks, so there is nothing that could drift apart but this: which parameters
        train, and the buffers of the frozen prefix.

        Raises:
            DivergenceError: they differ; on every rank.
        """
        trains = [sum((i + 1) * p.requires_grad for i, p in enumerate(layer.params.values())) for layer in layers]
        fixed = set(self.freezer.prefix_buffers())
        buffers = [checksum(b) for name, b in self.model.named_buffers() if name in fixed and b.numel()]
        every = self.world.gather(torch.tensor([*trains, *(int(value) for value in buffers)], dtype=torch.int64))
        odd = [rank for rank in range(self.world.size) if not torch.equal(every[rank], every[0])]
        if odd:
            raise DivergenceError(
                f"rank 0 and ranks {odd} differ in which parameters train, or in the buffers of frozen layers. "
                "Resume from the last checkpoint; look for what was changed outside LayerElastic on some ranks"
            )

    # --- states

    @peers_needed()
    def model_state(self) -> dict[str, Any]:
        """Collective. Whole, on the CPU of every rank; gathered one tensor at a time."""
        return {name: _whole(value) for name, value in self.model.state_dict().items()}

    def load_model_state(self, state: Mapping[str, Any]) -> None:
        """Collective. Each rank takes its slices; only buffers are sent."""
        like = self.model.state_dict()
        super().load_model_state({name: _sliced(value, like.get(name)) for name, value in state.items()})

    @peers_needed()
    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Collective. Whole, on the CPU of every rank."""
        packed = super().optimizer_state(optimizer)
        state = {name: {key: _whole(value) for key, value in entry.items()} for name, entry in packed["state"].items()}
        return {**packed, "state": state}

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Each rank takes its slices of what has the shape of its parameter; nothing is sent."""
        params = dict(self.model.named_parameters())
        sliced = {
            name: {key: _sliced(value, params.get(name)) for key, value in entry.items()}
            for name, entry in state["state"].items()
        }
        named_state.load_optimizer_state(self.model, optimizer, {**state, "state": sliced})

    def close(self) -> None:
        """The model stays split over the ranks, and trains on as FSDP trains it."""
        self._handle.remove()


class _Collective:
    """What FSDP2 takes in place of a collective of its own. It waits for the result where it is called, unless asked not to:
    so a peer that is gone is noticed here, in forward and backward passes alike.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer for the communication."""
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Collective):
    """FSDP2's own, but for the error."""

    @peers_needed()
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        work: dist.Work | None = _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class _WeightedReduceScatter(_Collective):
    """Sums n_r / M of each rank's gradient over the ranks."""

    def __init__(self, parallel: FullyShardedDataParallel) -> None:
        self.parallel = parallel

    @peers_needed()
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """``op`` is a sum: so it was set in :meth:`FullyShardedDataParallel.place`."""
        statistics = self.parallel.statistics
        input_tensor.mul_(statistics.weight[0])
        statistics.bytes_reduced += input_tensor.numel() * input_tensor.element_size()
        work: dist.Work | None = _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return work


def _own_modules(model: nn.Module, layers: Sequence[Layer]) -> list[list[nn.Module]]:
    """By layer, its modules that make a unit: those with parameters, none of which any other root module holds."""
    holders: Counter[int] = Counter()
    for root in {module for layer in layers for module in layer.modules}:
        holders.update(id(param) for param in root.parameters())
    seen: set[nn.Module] = {model}
    units = []
    for layer in layers:
        own = [
            module
            for module in dict.fromkeys(layer.modules)
            if module not in seen
            and any(True for _ in module.parameters())
            and all(holders[id(param)] == 1 for param in module.parameters())
        ]
        seen.update(own)
        units.append(own)
    return [own for own in units if own]


def _whole(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().cpu()


def _sliced(value: Any, like: Any) -> Any:
    """This rank's slice of a whole tensor, as ``like`` is sliced. From a sharded checkpoint it is sliced already."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or not isinstance(like, DTensor):
        return value
    if value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
