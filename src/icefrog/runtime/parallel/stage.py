"""Runs one pipeline stage: schedules of ``torch.distributed.pipelining`` that know which stages are frozen.

A stage whose layers are all frozen runs forward only: nothing is kept for a backward pass, and no gradient is received.
Where no stage before this one trains, its input asks for no gradient, so none is computed and none is sent (Eq. 11, 12).

Shapes are told to the schedules (*static* mode), after one forward pass in eval mode for each new shape. Left to
themselves they run one more forward and backward pass in training mode, which would move normalisation statistics.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from icefrog.errors import UserError
from icefrog.runtime.timing import LayerFlops, StepTimer

LossFn = Callable[[Any, Any], torch.Tensor]
KEPT_SCHEDULES = 4  # by shape: full batches and an epoch's last one, in training and in evaluation
_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
_MAX_DIMS = 14


@dataclass(frozen=True)
class Shape:
    """Of one tensor that travels between ranks."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Shape:
        """Of a tensor at hand."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def meta(self, requires_grad: bool) -> torch.Tensor:
        """A tensor without data; gradients only of what can have one."""
        differentiable = self.dtype.is_floating_point or self.dtype.is_complex
        return torch.empty(self.sizes, dtype=self.dtype, device="meta", requires_grad=requires_grad and differentiable)

    def encode(self) -> torch.Tensor:
        """Fixed size, int64, shape (16,)."""
        filled = (*self.sizes, *([0] * (_MAX_DIMS - len(self.sizes))))
        return torch.tensor([len(self.sizes), _DTYPES.index(self.dtype), *filled], dtype=torch.int64)

    @classmethod
    def decode(cls, row: torch.Tensor) -> Shape:
        """Inverse of :meth:`encode`."""
        count, dtype, *sizes = (int(value) for value in row.tolist())
        return cls(tuple(sizes[:count]), _DTYPES[dtype])


class _Stage(PipelineStage):
    """A stage that forgets at once what no backward pass will ask for, and tells when a micro-batch is through.

    It is timed, too: passes are, waiting for other stages is not.
    """

    def __init__(self, *args: Any, runner: StageRunner, on_chunk: Callable[[int], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._runner = runner
        self._on_chunk = on_chunk

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        timer = self._runner.timer if torch.is_grad_enabled() else None
        start = timer.mark() if timer else None
        output = super().forward_one_chunk(*args, **kwargs)
        if timer:
            timer.span("fwd", start)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        if self.has_backward:
            start = self._runner.timer.mark()
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
            self._runner.timer.span("bwd", start)
        else:
            self.fwd_cache.pop(bwd_chunk_id, None)
        self._on_chunk(bwd_chunk_id)


class _Chain(nn.Sequential):
    """The stage's links. Its output is sent, so it is one contiguous tensor."""

    def forward(self, value: Any) -> Any:
        output = super().forward(value)  # type: ignore[no-untyped-call]
        if not isinstance(output, torch.Tensor):
            raise UserError(
                f"a layer at the end of a stage returns {type(output).__name__}",
                "layers of a pipeline pass one tensor on; return a tensor, or cut elsewhere (first_layers=)",
            )
        return output.contiguous()


class StageRunner:
    """This rank's stage.

    Args:
        links: the stage's part of the chain.
        group: the ranks of one pipeline, in the order of stages; None: one stage alone.
        device: of the stage.
        micro_batches: mu, at most. A batch is cut into equal parts: mu is lowered to a divisor of its size.
        schedule: ``1f1b`` or ``gpipe``; a batch with fewer micro-batches than stages is run as ``gpipe``.
        on_chunk: called after each micro-batch's backward pass on this stage, skipped or not, with (its index, mu of this
            batch, samples of this batch).
        counted: (layer, module) of what FLOPs are counted for.
    """

    def __init__(
        self,
        links: Sequence[nn.Module],
        group: dist.ProcessGroup | None,
        device: torch.device,
        micro_batches: int,
        schedule: Literal["1f1b", "gpipe"],
        on_chunk: Callable[[int, int, int], None],
        counted: Sequence[tuple[int, nn.Module]],
    ) -> None:
        self.module = _Chain(*links)
        self.group = group
        self.device = device
        self.micro_batches = micro_batches
        self.schedule = schedule
        self.on_chunk = on_chunk
        self.counted = counted
        self.flops: dict[int, float] = {}
        """Forward FLOPs of one sample, by layer of this stage; counted once."""
        self.index = dist.get_rank(group) if group is not None else 0
        self.num_stages = dist.get_world_size(group) if group is not None else 1
        self.frozen_stages = 0
        self.timer: StepTimer
        """Told of every pass; to be set before the first."""
        self.samples, self.parts = 0, 1
        """Samples and micro-batches of the last batch."""
        self._loss_fn: LossFn | None = None
        self._schedules: OrderedDict[Any, PipelineScheduleSingle] = OrderedDict()

    @property
    def is_first(self) -> bool:
        """Whether batches enter here."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.index == self.num_stages - 1

    def set_frozen_stages(self, count: int) -> None:
        """Collective. The first ``count`` stages have nothing to train."""
        if count != self.frozen_stages:
            self.frozen_stages = count
            self._schedules.clear()

    def forget(self) -> None:
        """Drop schedules and their buffers."""
        self._schedules.clear()

    def train(self, x: Any, y: Any, loss_fn: LossFn, begin: Callable[[int], None]) -> torch.Tensor:
        """Collective in the pipeline. Forward and backward of one batch; gradients are those of the mean over it.

        Args:
            x: the batch, shape (n, ...); the first stage's counts, other ranks' are ignored.
            y: what the loss compares with, shape (n, ...); the first stage's counts, it is sent to the last one.
            loss_fn: of (output, y), the mean over the samples of a micro-batch.
            begin: called with n before anything is computed.

        Returns:
            The loss, the same on every rank.

        Raises:
            UserError: x or y is not a tensor, or they differ in length.
        """
        x_shape, y_shape = self._agree(x, y)
        samples = x_shape.sizes[0]
        self.samples = samples
        begin(samples)
        parts = self.parts = _largest_divisor(samples, self.micro_batches)
        self._loss_fn = lambda output, target: loss_fn(output, target) / parts
        if self.group is None or self.num_stages == 1:
            if not self.flops:
                self._forward_once(x[: samples // parts])
            return self._train_alone(x, y, parts)
        schedule = self._schedule(x_shape, parts, x, train=True)
        sending, y = self._pass_target(y, y_shape)
        losses: list[torch.Tensor] = []
        if self.is_first:
            schedule.step(x)
        elif self.is_last:
            schedule.step(target=y, losses=losses, return_outputs=False)
        else:
            schedule.step()
        if sending is not None:
            sending.wait()
        total = torch.zeros((), dtype=torch.float64)
        if losses:
            total += torch.stack([loss.detach().double() for loss in losses]).sum().cpu()
        dist.broadcast(total, group=self.group, group_src=self.num_stages - 1)
        return total.to(torch.get_default_dtype())

    def _train_alone(self, x: torch.Tensor, y: torch.Tensor, parts: int) -> torch.Tensor:
        assert self._loss_fn is not None
        total = torch.zeros((), dtype=torch.float64)
        for index, (part, target) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            start = self.timer.mark()
            loss = self._loss_fn(self.module(part), target)
            self.timer.span("fwd", start)
            start = self.timer.mark()
            loss.backward()  # type: ignore[no-untyped-call]
            self.timer.span("bwd", start)
            self.on_chunk(index, parts, len(x))
            total += loss.detach().double().cpu()
        return total.to(torch.get_default_dtype())

    @torch.no_grad()
    def evaluate(self, x: Any) -> torch.Tensor:
        """Collective in the pipeline. The model's output for the first stage's batch, on every rank."""
        if self.group is None or self.num_stages == 1:
            output: torch.Tensor = self.module(x)
            return output
        x_shape, _ = self._agree(x, None)
        parts = _largest_divisor(x_shape.sizes[0], self.micro_batches)
        schedule = self._schedule(x_shape, parts, x, train=False)
        found = schedule.step(x) if self.is_first else schedule.step()
        row = Shape.of(found).encode() if self.is_last else torch.empty(_MAX_DIMS + 2, dtype=torch.int64)
        dist.broadcast(row, group=self.group, group_src=self.num_stages - 1)
        shape = Shape.decode(row)
        sent = found if self.is_last else torch.empty(shape.sizes, dtype=shape.dtype, device=self.device)
        dist.broadcast(sent, group=self.group, group_src=self.num_stages - 1)
        return sent

    # --- what the ranks tell each other

    def _agree(self, x: Any, y: Any) -> tuple[Shape, Shape]:
        """Shapes of the first stage's batch; an input that cannot be used is an error on every rank."""
        problem = 0
        rows = torch.zeros(3, _MAX_DIMS + 2, dtype=torch.int64)
        if self.is_first:
            problem = _problem(x, y)
            rows[0, 0] = problem
            if problem == 0:
                rows[1] = Shape.of(x).encode()
                rows[2] = Shape.of(x if y is None else y).encode()
        if self.num_stages > 1:
            dist.broadcast(rows, group=self.group, group_src=0)
        if problem := int(rows[0, 0]):
            raise UserError(*_PROBLEMS[problem])
        return Shape.decode(rows[1]), Shape.decode(rows[2])

    def _pass_target(self, y: Any, shape: Shape) -> tuple[dist.Work | None, Any]:
        if self.is_first:
            sent = y.to(self.device).contiguous()
            return dist.isend(sent, group=self.group, group_dst=self.num_stages - 1), y
        if self.is_last:
            y = torch.empty(shape.sizes, dtype=shape.dtype, device=self.device)
            dist.recv(y, group=self.group, group_src=0)
        return None, y

    # --- schedules

    def _schedule(self, x_shape: Shape, parts: int, x: Any, *, train: bool) -> PipelineScheduleSingle:
        """Collective. The key is the same on every rank, so all build at the same step."""
        kind = self.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        key = (train, x_shape, parts, autocast)
        schedule = self._schedules.get(key)
        if schedule is None:
            schedule = self._schedules[key] = self._build(x_shape, parts, x, train)
            if len(self._schedules) > KEPT_SCHEDULES:
                self._schedules.popitem(last=False)
        self._schedules.move_to_end(key)
        return schedule

    def _build(self, x_shape: Shape, parts: int, x: Any, train: bool) -> PipelineScheduleSingle:
        incoming, outgoing = self._probe(x_shape, parts, x)
        trains = train and self.index >= self.frozen_stages
        stage = _Stage(
            self.module,
            self.index,
            self.num_stages,
            self.device,
            input_args=(incoming.meta(train and self.index > self.frozen_stages),),
            output_args=(outgoing.meta(trains),),
            group=self.group,
            runner=self,
            on_chunk=lambda chunk: self.on_chunk(chunk, parts, x_shape.sizes[0]) if train else None,
        )
        loss = self._loss if trains else None
        kind = Schedule1F1B if train and self.schedule == "1f1b" and parts >= self.num_stages else ScheduleGPipe
        return kind(stage, parts, loss_fn=loss, scale_grads=False)

    def _loss(self, output: Any, target: Any) -> torch.Tensor:
        assert self._loss_fn is not None
        return self._loss_fn(output, target)

    @torch.no_grad()
    def _probe(self, x_shape: Shape, parts: int, x: Any) -> tuple[Shape, Shape]:
        """Shapes of one micro-batch before and after this stage, from one forward pass of zeros in eval mode."""
        if self.is_first:
            sample = x[: x_shape.sizes[0] // parts]
            incoming = Shape.of(sample)
        else:
            row = torch.empty(_MAX_DIMS + 2, dtype=torch.int64)
            dist.recv(row, group=self.group, group_src=self.index - 1)
            incoming = Shape.decode(row)
            sample = torch.zeros(incoming.sizes, dtype=incoming.dtype, device=self.device)
        outgoing = Shape.of(self._forward_once(sample))
        if not self.is_last:
            dist.send(outgoing.encode(), group=self.group, group_dst=self.index + 1)
        return incoming, outgoing

    @torch.no_grad()
    def _forward_once(self, sample: torch.Tensor) -> torch.Tensor:
        """In eval mode: no statistics move and nothing is drawn. The first time, FLOPs are counted."""
        training = [module for module in self.module.modules() if module.training]
        for module in training:
            module.training = False
        try:
            if self.flops:
                return self.module(sample)  # type: ignore[no-any-return]
            with LayerFlops(self.counted) as counter:
                output: torch.Tensor = self.module(sample)
            counter.finish()
            self.flops = {layer: counter.flops.get(layer, 0.0) / len(sample) for layer, _ in self.counted}
            return output
        finally:
            for module in training:
                module.training = True


def _largest_divisor(samples: int, most: int) -> int:
    return max(parts for parts in range(1, min(samples, most) + 1) if samples % parts == 0)


def _problem(x: Any, y: Any) -> int:
    if not isinstance(x, torch.Tensor) or not (y is None or isinstance(y, torch.Tensor)):
        return 1
    if x.ndim == 0 or len(x) == 0 or (y is not None and (y.ndim == 0 or len(y) != len(x))):
        return 2
    return 3 if max(x.ndim, 0 if y is None else y.ndim) > _MAX_DIMS else 0


_PROBLEMS = {
    1: ("a pipeline's batch is one tensor, and so is what the loss compares it with", "pass two tensors"),
    2: ("a pipeline's batch and targets must have the same first dimension, and not be empty", "pass (n, ...) tensors"),
    3: (f"tensors of more than {_MAX_DIMS} dimensions", "reshape them inside the model"),
}
