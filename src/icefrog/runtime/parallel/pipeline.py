"""Pipeline parallelism (Eq. 11, 12), and replicas of a pipeline (*hybrid*, Eq. 13) where there are more ranks than stages.

Of a ranks, d = a / p replicas have p stages each. Rank r holds stage r // d of replica r % d: the ranks that synchronise
gradients of one stage are neighbours. A rank keeps parameters, gradients and optimizer state of its stage only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from icefrog.errors import UserError
from icefrog.profile import Pipelined
from icefrog.runtime import named_state
from icefrog.runtime.layers import Layer
from icefrog.runtime.parallel import chain
from icefrog.runtime.parallel.base import Parallel
from icefrog.runtime.parallel.stage import LossFn, StageRunner
from icefrog.runtime.peers import peers_needed
from icefrog.runtime.statistics import Source
from icefrog.runtime.timing import StepTimes
from icefrog.runtime.world import OUTSIDE, World, checksums, compare_sums

T = TypeVar("T")


class PipelinedModule(nn.Module):
    """What the user calls to evaluate. Names of parameters and state are those of the whole model."""

    def __init__(self, parallel: Pipeline) -> None:
        super().__init__()
        self.module = parallel.model
        self.__dict__["parallel"] = parallel

    @peers_needed()
    def forward(self, x: Any) -> torch.Tensor:
        """Collective. The model's output, on every rank of a replica; without gradients.

        Raises:
            UserError: gradients are enabled.
        """
        if torch.is_grad_enabled():
            raise UserError(
                "the forward pass alone cannot be trained on in a pipeline",
                "train with loss = elastic.train_step(x, y); evaluate under torch.no_grad()",
            )
        output: torch.Tensor = self.__dict__["parallel"].runner.evaluate(x)
        return output

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Collective. Of the whole model, on every rank, on the CPU."""
        state: dict[str, Any] = self.__dict__["parallel"].model_state()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Of the whole model; each rank takes what it holds."""
        return self.__dict__["parallel"].load_model_state(state_dict)


class Pipeline(Parallel):
    """Layers in stages over the ranks; ``LayerElastic(parallel=Pipeline(loss_fn))``.

    The model must be a chain (``nn.Sequential``), whole on every rank when it is given. One line of the loop changes:
    ``loss = elastic.train_step(x, y)`` takes the place of forward and backward.

    Args:
        loss_fn: of (output, y): the mean over samples, since the gradients of micro-batches are averaged.
        num_stages: p; default: every rank is a stage. With d x p ranks there are d replicas (hybrid).
        micro_batches: mu: equal parts in which a replica's batch passes the stages; fewer where it cannot be divided so.
        layer_costs: by which stages are balanced, one for each layer, in any unit; default: parameter bytes.
        first_layers: the first layer of each stage but the first, to cut by hand.
        schedule: ``1f1b`` keeps the activations of p micro-batches at most, ``gpipe`` of all.
    """

    name: ClassVar[str] = "pipeline"
    sharded: ClassVar[bool] = True
    caches: ClassVar[bool] = False

    def __init__(
        self,
        loss_fn: LossFn,
        *,
        num_stages: int | None = None,
        micro_batches: int = 4,
        layer_costs: Sequence[float] | None = None,
        first_layers: Sequence[int] | None = None,
        schedule: Literal["1f1b", "gpipe"] = "1f1b",
    ) -> None:
        if micro_batches < 1 or (num_stages is not None and num_stages < 1):
            raise UserError(
                f"a pipeline of {num_stages} stages and {micro_batches} micro-batches", "both must be at least 1"
            )
        if schedule not in ("1f1b", "gpipe"):
            raise UserError(f"unknown schedule {schedule!r}", "choose 1f1b or gpipe")
        self.loss_fn = loss_fn
        self.wanted_stages = num_stages
        self.micro_batches = micro_batches
        self.layer_costs = layer_costs
        self.first_layers = first_layers
        self.schedule: Literal["1f1b", "gpipe"] = schedule
        self._flops: list[float] | None = None
        self._made: (
            list[tuple[torch.Tensor, int]] | None
        ) = []  # this rank's gradients, with versions; None: no more looks
        self._nominal = (0, micro_batches)  # samples and micro-batches of the largest batch so far

    # --- who holds what

    def start(self, model: nn.Module, world: World) -> None:
        """Collective. Groups of ranks; all take rank 0's parameters.

        Raises:
            UserError: ranks that are no multiple of the stages.
        """
        super().start(model, world)
        self.num_stages = self.wanted_stages or world.size
        if world.size % self.num_stages:
            raise UserError(
                f"{world.size} ranks cannot form replicas of {self.num_stages} stages",
                "start a multiple of num_stages ranks, or leave num_stages out",
            )
        self.device = next(model.parameters()).device
        self.stage, self._replica = divmod(world.rank, self.num_replicas)
        self.pipe: dist.ProcessGroup | None = None
        self.replicas: dist.ProcessGroup | None = None
        if world.size > 1:
            shape = (self.num_stages, self.num_replicas)
            mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("pipe", "replicas"))
            self.pipe, self.replicas = mesh.get_group("pipe"), mesh.get_group("replicas")
        self.outer = PipelinedModule(self)

    def place(self, layers: Sequence[Layer], optimizer: torch.optim.Optimizer) -> None:
        """Cut the model; what other stages hold is freed here.

        Raises:
            UserError: the model is no chain, or cannot be cut into so many stages; the optimizer holds another one.
        """
        named_state.refuse_inner(optimizer)
        links = chain.find_links(self.model, layers)
        costs = self.layer_costs if self.layer_costs is not None else [float(layer.param_bytes) for layer in layers]
        if len(costs) != len(layers):
            raise UserError(f"{len(costs)} layer_costs for {len(layers)} layers", "give one for each of elastic.layers")
        self.spans = chain.split(links, len(layers), self.num_stages, costs, self.first_layers)
        self.span = self.spans[self.stage]
        mine = [link.module for link in links[self.span.start : self.span.stop]]
        kept = {id(module) for root in mine for module in root.modules()}
        others = [link.module for link in [*links[: self.span.start], *links[self.span.stop :]]]
        chain.release([module for module in others if id(module) not in kept], optimizer)
        begin, end = self.span.first_layer, self.span.end_layer
        counted = [(i, root) for i in range(begin, end) for root in layers[i].modules]
        self.runner = StageRunner(
            mine, self.pipe, self.device, self.micro_batches, self.schedule, self._chunk_over, counted
        )
        held = {id(tensor) for tensor in (*self.runner.module.parameters(), *self.runner.module.buffers())}
        self._held = {
            name
            for name, tensor in (
                *self.model.named_parameters(remove_duplicate=False),
                *self.model.named_buffers(remove_duplicate=False),
            )
            if id(tensor) in held
        }

    def rewire(self) -> None:
        """Collective. Stages that only hold frozen layers run forward only; replicas take the first one's buffers."""
        self.runner.timer = self.timer
        frozen = self.freezer.frozen_layers
        self.runner.set_frozen_stages(sum(not span.trains(frozen) for span in self.spans))
        self._share_buffers()
        self.verify()

    @peers_needed()
    def _share_buffers(self) -> None:
        if self.num_replicas > 1:
            for buffer in self.runner.module.buffers():
                if buffer.numel():
                    dist.broadcast(buffer.data, group=self.replicas, group_src=0)

    @property
    def module(self) -> nn.Module:
        """To evaluate with."""
        return self.outer

    @property
    def num_replicas(self) -> int:
        """d."""
        return self.world.size // self.num_stages

    @property
    def replica(self) -> int:
        """The pipeline that this rank belongs to."""
        return self._replica

    def source(self, accum_steps: int) -> Source:
        """Halves of a batch, in micro-batches; successive steps where a batch passes whole."""
        return "parts" if self.micro_batches * self.num_replicas * accum_steps > 1 else "steps"

    # --- one optimizer step

    def train_step(self, x: Any, y: Any, loss_fn: LossFn | None, begin: Callable[[int], None]) -> torch.Tensor:
        """Collective. Forward and backward of one batch through all stages."""
        loss = self.runner.train(x, y, loss_fn or self.loss_fn, begin)
        if self._made is not None:
            grads = [param.grad for param in self.runner.module.parameters() if param.grad is not None]
            self._made = [(grad, grad._version) for grad in grads]
        self._nominal = max(self._nominal, (self.runner.samples, self.runner.parts))
        if self._flops is None:
            own = torch.zeros(len(self.freezer.layers), dtype=torch.float64)
            for layer, flops in self.runner.flops.items():
                own[layer] = flops
            self._flops = self.merge_layers(own).tolist()
        return loss

    def layer_flops(self) -> Sequence[float] | None:
        """Counted on the first batch, by each stage for its layers."""
        return self._flops

    def describe(self) -> Pipelined:
        """With the micro-batches that full batches are cut into."""
        layers = tuple(span.end_layer - span.first_layer for span in self.spans)
        return Pipelined(num_stages=self.wanted_stages, micro_batches=self._nominal[1], stage_layers=layers)

    @property
    def forward_module(self) -> nn.Module:
        """The stage."""
        return self.runner.module

    def merge_layers(self, values: torch.Tensor) -> torch.Tensor:
        """Collective. The replicas' mean. An activation may run here that belongs to the next stage's first layer."""
        own = torch.zeros_like(values)
        mine = slice(self.span.first_layer, self.span.end_layer)
        own[..., mine] = values[..., mine]
        return self.world.sum(own) / self.num_replicas

    def pack_times(self, times: StepTimes | None) -> torch.Tensor:
        """Step, ranks that have times; by stage forward, backward, synchronisation, s; by layer when gradients are ready.

        Shape (2 + 3 p + L,); the replicas' mean.
        """
        begin, end, stages = self.span.first_layer, self.span.end_layer, self.num_stages
        packed = torch.zeros(2 + 3 * stages + len(self.freezer.layers), dtype=torch.float64)
        if times is None:
            return packed
        packed[:2] = torch.tensor([times.step_s, 1.0]) / self.world.size
        packed[2 + self.stage : 2 + 3 * stages : stages] = torch.tensor([times.fwd_s, times.bwd_s, times.sync_s])
        packed[2 + 3 * stages + begin : 2 + 3 * stages + end] = torch.tensor(times.ready_s[begin:end])
        packed[2:] /= self.num_replicas
        return packed

    def unpack_times(self, sums: torch.Tensor) -> StepTimes | None:
        """The stages one after the other, as if there were no others: what the profile is fitted to (Eq. 11, 12)."""
        if sums[1] < 1.0 - 1e-9:
            return None
        stages = self.num_stages
        fwd, bwd, sync = sums[2 : 2 + 3 * stages].reshape(3, stages).tolist()
        ready = (sums[2 + 3 * stages :] * self.runner.parts).tolist()  # of one micro-batch, within its stage
        for index, span in enumerate(self.spans):
            for layer in range(span.first_layer, span.end_layer):
                ready[layer] += sum(bwd[index + 1 :])
        return StepTimes(float(sums[0]), sum(fwd), sum(bwd), sum(sync), tuple(ready))

    def _chunk_over(self, index: int, parts: int, samples: int) -> None:
        """Statistics see two halves of a batch: a copy of the gradient for each micro-batch costs more than it tells."""
        half = (parts + 1) // 2
        if index + 1 in (half, parts):
            count = half if index + 1 == half else parts - half
            self.statistics.part(samples * count / parts, parts / count)

    @peers_needed()
    def average(self, weight: float) -> None:
        """Collective. The mean over micro-steps, then over the replicas of this stage; frozen layers send nothing."""
        self._look_for_clipping()
        if self.num_replicas == 1:
            if weight != 1.0:
                self.scale_gradients(weight)
            return
        params = [p for layer in self._own_layers()[1] for p in layer.params.values() if p.requires_grad]
        for dtype in dict.fromkeys(param.dtype for param in params):
            of_type = [param for param in params if param.dtype == dtype]
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in of_type]
            buffer = torch.cat([grad.reshape(-1) for grad in grads]).mul_(weight)
            self.statistics.bytes_reduced += buffer.numel() * buffer.element_size()
            start = self.timer.mark()
            dist.all_reduce(buffer, group=self.replicas)
            self.timer.span("sync", start)
            for param, grad, mean in zip(of_type, grads, torch.split(buffer, [g.numel() for g in grads]), strict=True):
                param.grad = grad.copy_(mean.view_as(grad))

    def _look_for_clipping(self) -> None:
        """During the first optimizer step: loops do the same in each."""
        made, self._made = self._made, None
        if self.world.size > 1 and any(grad._version != version for grad, version in made or ()):
            warnings.warn(
                "gradients are changed between train_step() and optimizer.step(): clipping there goes by the norm of each "
                "stage and replica alone; clip with LayerElastic(max_grad_norm=...)",
                stacklevel=2,
            )

    @peers_needed()
    def clip(self, params: Sequence[nn.Parameter], max_norm: float) -> None:
        """Collective. By the norm over all stages."""
        grads = [param.grad for param in params if param.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads).to("cpu", torch.float64)
        square = norm.square().reshape(1)
        if self.num_stages > 1:
            dist.all_reduce(square, group=self.pipe)
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, square.sqrt().squeeze(0).to(self.device, torch.float32))

    def close(self) -> None:
        """Schedules go; other stages' parameters are not fetched back (:meth:`model_state` does that)."""
        self.runner.forget()

    # --- trust

    def _own_layers(self) -> tuple[int, list[Layer]]:
        """(index of the first, the stage's layers as they are now)."""
        begin, end = self.span.first_layer, self.span.end_layer
        return begin, self.freezer.layers[begin:end]

    def check_in_step(self, layers: Sequence[Layer]) -> None:
        """Collective. The replicas of each stage hold the same bits; different stages hold different layers."""
        if self.world.size == 1:
            return
        known = {id(param) for layer in layers for param in layer.params.values()}
        rest = {n: p for n, p in self.model.named_parameters() if id(p) not in known and n in self._held}
        begin, own = self._own_layers()
        sums = torch.zeros(len(layers) + 1, dtype=torch.int64)
        sums[begin : begin + len(own)] = checksums(own)
        sums[-1] = checksums([Layer(OUTSIDE, [], rest)])[0]
        groups = [range(j * self.num_replicas, (j + 1) * self.num_replicas) for j in range(self.num_stages)]
        compare_sums(sums, [*(layer.name for layer in layers), OUTSIDE], groups, self.world)

    # --- states

    @peers_needed()
    def _merge(self, mine: dict[str, T]) -> dict[str, T]:
        """Collective. The stages' parts together, on every rank, on the CPU."""
        if self.num_stages == 1:
            return mine
        parts: list[Any] = [None] * self.num_stages
        dist.all_gather_object(parts, _on_cpu(mine), group=self.pipe)
        return {name: value for part in parts for name, value in part.items()}

    def held_model_state(self) -> dict[str, Any]:
        """This stage's layers."""
        return {name: value for name, value in self.model.state_dict().items() if name in self._held}

    def model_state(self) -> dict[str, Any]:
        """Collective. In the model's order."""
        state = self.model.state_dict()
        merged = self._merge(self.held_model_state())
        return {name: merged[name] for name in state if name in merged}

    def load_model_state(self, state: Mapping[str, Any]) -> None:
        """Collective. What this rank holds; replicas take the first one's buffers, as each may have saved its own."""
        mine = {name: value for name, value in state.items() if name in self._held}
        result = self.model.load_state_dict(mine, strict=False)
        missing = [name for name in result.missing_keys if name in self._held]
        unknown = [name for name in state if name not in {*mine, *result.missing_keys}]
        if missing or unknown:
            raise UserError(
                f"the state is of another model: {len(missing)} names are missing, {len(unknown)} unknown "
                f"({', '.join([*missing, *unknown][:5])})",
                "load the state of the model that LayerElastic was given",
            )
        self._share_buffers()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Collective. Groups as they are, and the state of all stages' parameters."""
        packed = named_state.optimizer_state(self.model, optimizer, whole=False)
        return {**packed, "state": self._merge(packed["state"])}

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Groups, and the state of this rank's parameters (and of those outside the model)."""
        names = {name for name, _ in self.model.named_parameters()}
        mine = {name: value for name, value in state["state"].items() if name in self._held or name not in names}
        named_state.load_optimizer_state(self.model, optimizer, {**state, "state": mine})


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    return value
