"""Per-layer gradient statistics from the gradients that training computes anyway (section 3 of the model).

Where the R gradients of a step come from:

* several ranks: DDP's communication hook sees each bucket before and after the all-reduce (so before any clipping);
* one rank, several accumulation micro-steps: differences of the accumulated gradient;
* a pipeline, or replicas of one: the same, of parts of each replica's batch, which passes the stages in micro-batches;
* one rank, one micro-step: this step's gradient and the one before it, copied as backward produces them;
* parameters split over ranks: the same, on each rank's slices of the averaged gradient, with M the global batch. (Second
  moments are split, too, so one rank's own gradient cannot be preconditioned where it is whole.)

Under Adam-like optimizers gradients are measured preconditioned, g / (sqrt(v) + eps) with v bias-corrected as the optimizer
itself uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from icefrog.estimate.penalty import replica_estimate, successive_estimate
from icefrog.profile import FloatArray
from icefrog.runtime.layers import Layer
from icefrog.runtime.peers import peers_needed
from icefrog.runtime.preconditioning import Precondition, Preconditioner, Scale, Tensors, real, sqr_norms, successive
from icefrog.runtime.ready import GradientWatch
from icefrog.runtime.shards import as_slice, local_part
from icefrog.runtime.trained import trained_by
from icefrog.runtime.world import World

Source = Literal["replicas", "micro_steps", "parts", "steps"]
DENSE_STEPS = 21
"""Of a job: so many make the 20 estimates that a layer needs before it is believed, on one rank, too."""
SPARSE = 10
NEVER = 10**12
"""As ``every``: no step is measured."""


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """S and |G|^2 of one step, shape (L,) each; entries of frozen layers mean nothing."""

    variance: FloatArray
    sqr_norm: FloatArray
    every: int = 1
    """This step stands for so many."""


class Statistics:
    """Collects one step's statistics; owned by :class:`~icefrog.runtime.engine.Engine`.

    Args:
        layers: all of them, frozen ones included.
        optimizer: for the preconditioner.
        world: this process among its peers.
        accum_steps: k.
        source: where the gradients come from whose spread is measured.
        num_replicas: d, copies of the model that see different samples.
        precondition: see :class:`Preconditioner`.
        loss_scale: present scale of the loss (AMP), 1 without.
        every: measure each n-th step only; default: each of the first DENSE_STEPS, then each SPARSE-th.
        watch: tells when gradients are there; needed where successive steps are compared.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        optimizer: torch.optim.Optimizer,
        world: World,
        *,
        accum_steps: int,
        source: Source,
        num_replicas: int,
        precondition: Precondition = "auto",
        loss_scale: Callable[[], float] = lambda: 1.0,
        every: int | None = None,
        watch: GradientWatch | None = None,
    ) -> None:
        self.num_layers = len(layers)
        self.trained = trained_by(optimizer)
        """Ids of the parameters that count: others may have gradients, but do not move."""
        self.params = [param for layer in layers for param in layer.params.values() if id(param) in self.trained]
        self._place = {id(param): i for i, param in enumerate(self.params)}
        self.layer_of = {id(param): i for i, layer in enumerate(layers) for param in layer.params.values()}
        split = any(hasattr(param, "to_local") for param in self.params)  # each over all ranks
        self.preconditioner = Preconditioner(optimizer, precondition, world.max if split else None)
        self.world = world
        self.accum_steps = accum_steps
        self.loss_scale = loss_scale
        self.every = every
        self.source = source
        self.copies = num_replicas
        self.replicas = {"replicas": num_replicas, "micro_steps": accum_steps}.get(source, 1)
        self.capture = False
        self._weight = 1.0 / num_replicas  # of this rank's accumulated gradient in the average
        self._mean_scale = 1.0  # accumulated gradient -> g_r
        self.bytes_reduced = 0  # gradient bytes handed to the all-reduce so far
        self._step = 0
        self._missing = False
        self._before: dict[int, torch.Tensor] = {}  # bucket or -> per-layer |g_r|^2
        self._after: dict[int, torch.Tensor] = {}
        self._now: dict[int, torch.Tensor] = {}
        self._arrived: set[int] = set()  # of ``_now``: those of the step in progress
        self._last: dict[int, torch.Tensor] = {}
        self._last_samples = 0
        self._last_scale = 1.0  # loss scale of ``_last``
        self._micro = torch.zeros(0)
        self._mean: torch.Tensor | None = None  # |g|^2 by layer of the averaged micro-steps
        self._num_parts = 0
        if self.source == "steps" and watch is not None:
            watch.listen(self._copy)
        self.reset()

    def reset(self) -> None:
        """Forget what is half collected: the boundary moved, or training was restored."""
        self._before.clear()
        self._after.clear()
        self._now.clear()
        self._arrived.clear()
        self._last.clear()
        self._micro = torch.zeros(self.num_layers, dtype=torch.float64)
        self._mean = None
        self._num_parts = 0
        self._missing = False
        self._plan()

    def state_dict(self, names: Mapping[int, str], *, held_only: bool = False) -> dict[str, Any]:
        """What the coming step needs of the steps before it.

        With successive steps that is the last gradient (one more copy of it in the checkpoint), and only if the coming step
        is measured: with it, a resumed run is the uninterrupted one to the bit.

        Args:
            names: id of a parameter -> its name.
            held_only: for a sharded checkpoint; else a gradient that is spread over ranks is left out.
        """
        needed = self.source == "steps" and self.due and (held_only or self.world.size == 1)
        kept = [param for param in self.params if needed and id(param) in self._last and id(param) in names]
        last = {names[id(param)]: as_slice(self._last[id(param)], param) for param in kept}
        return {"step": self._step, "last_samples": self._last_samples, "last_scale": self._last_scale, "last": last}

    def load_state_dict(self, state: Mapping[str, Any], params: Mapping[str, torch.Tensor]) -> None:
        """Inverse of :meth:`state_dict`; ``params``: the parameters by name."""
        self.reset()
        self._step = state["step"]
        self._plan()
        if self.source != "steps":
            return
        self._last_samples, self._last_scale = state["last_samples"], state["last_scale"]
        for name, grad in state["last"].items():
            param = params[name]
            if hasattr(param, "device_mesh") == hasattr(grad, "device_mesh"):  # else whole one time, sliced the other
                self._last[id(param)] = local_part(grad).to(param.device, copy=True)

    def skip(self) -> None:
        """The step in progress cannot be measured: part of it was not seen, or is not finite."""
        self._missing = True

    def _every(self, step: int) -> int:
        """n at a step: each n-th is measured there."""
        return self.every or (1 if step < DENSE_STEPS else SPARSE)

    def _is_due(self, step: int) -> bool:
        return (step + 1) % self._every(step) == 0

    def _plan(self) -> None:
        """Whether the coming step is measured (or, with R = 1, is the one before a measured one)."""
        self.capture = self.due or (self.source == "steps" and self._is_due(self._step + 1))

    @property
    def due(self) -> bool:
        """Whether the step now in progress is to be measured; the same on all ranks."""
        return self._is_due(self._step)

    @property
    def weight(self) -> tuple[float, float]:
        """As given to :meth:`set_weight`."""
        return self._weight, self._mean_scale

    def set_weight(self, weight: float, mean_scale: float) -> None:
        """For the coming step: what this rank's accumulated gradient counts in the average, and what makes it g_r."""
        self._weight, self._mean_scale = weight, mean_scale

    # --- one rank, successive steps

    def _copy(self, _layer: int, params: Sequence[nn.Parameter]) -> None:
        if not self.capture:
            return
        held: Tensors = []
        grads: Tensors = []
        for param in params:
            if param.grad is None or id(param) not in self.trained:
                continue
            grad, key = local_part(param.grad), id(param)
            self._arrived.add(key)
            buffer = self._now.get(key)
            if buffer is None or buffer.shape != grad.shape:
                self._now[key] = grad.detach().clone()
            else:
                held.append(buffer)
                grads.append(grad.detach())
        if held:
            torch._foreach_copy_(held, grads)

    def _successive(self) -> torch.Tensor | None:
        """|g_t - g_(t-1)|^2 and g_t . g_(t-1) by layer, shape (2L,)."""
        pairs = [p for p in self.params if p.requires_grad and id(p) in self._arrived and id(p) in self._last]
        scale = self._scale(pairs) if pairs else None
        if scale is None:
            return None
        now = self._plain([self._now[id(p)] for p in pairs])
        last = self._plain([self._last[id(p)] for p in pairs], self._last_scale)
        return self._by_layer(pairs, successive(now, last, scale or None)).flatten()

    # --- several ranks

    def comm_hook(self, _state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """DDP communication hook: the weighted average of the ranks' gradients, and |g_r|^2, |g|^2 on the way."""
        buffer, index = bucket.buffer(), bucket.index()
        sparse = buffer.is_sparse  # of an embedding: alone in its bucket, which then has no views
        pairs = zip(bucket.parameters(), [buffer] if sparse else bucket.gradients(), strict=True)
        counted = [(param, grad) for param, grad in pairs if id(param) in self.trained]
        # DDP orders buckets anew behind its first pass, which a job that resumes has once more: sums must not tell.
        counted.sort(key=lambda pair: self._place[id(pair[0])])
        params, grads = [param for param, _ in counted], [grad for _, grad in counted]
        capture = self.capture
        scale = self._scale(params) if capture else None
        if capture and scale is None:
            self._missing = True
        divisors = scale.by_element() if scale else None
        if scale is not None:
            self._before[index] = self._sqr_norms(params, grads, scale, divisors) * self._mean_scale**2
        buffer.mul_(self._weight)
        sent = [buffer._indices(), buffer._values()] if sparse else [buffer]
        self.bytes_reduced += sum(part.numel() * part.element_size() for part in sent)
        with peers_needed():
            future = dist.all_reduce(buffer, async_op=True).get_future()

        def measured(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            with peers_needed():
                reduced = done.value()[0]
            if scale is not None:
                means = [reduced] if sparse and grads else grads
                self._after[index] = self._sqr_norms(params, means, scale, divisors)
            return reduced

        averaged: torch.futures.Future[torch.Tensor] = future.then(measured)
        return averaged

    # --- one rank, accumulation micro-steps

    def micro_step(self, samples: int) -> None:
        """A micro-step's backward is over (where they are the source): add n_r |g_r|^2 of what it added to the gradient."""
        if self.capture and self.source == "micro_steps":
            self._add(samples)

    def part(self, samples: float, factor: float) -> None:
        """A part of this replica's batch is through (where parts are the source), also if nothing of this rank trains.

        Args:
            samples: of the part.
            factor: what makes that which it added to the gradient the mean over the part.
        """
        if self.capture and self.source == "parts":
            self._num_parts += 1
            self._add(samples, factor)

    def _add(self, samples: float, factor: float = 1.0) -> None:
        live, grads = self._live()
        scale = self._scale(live)
        if scale is None:
            self._missing = True
            return
        before = [self._last.get(id(param)) for param in live]
        added = [grad if last is None else grad - last for grad, last in zip(grads, before, strict=True)]
        self._last.update({id(param): grad.detach().clone() for param, grad in zip(live, grads, strict=True)})
        self._micro += samples * factor**2 * self._sqr_norms(live, added, scale).cpu()

    def rescale_micro(self, factor: float) -> None:
        """The accumulated gradient was scaled by ``factor`` (micro-steps of unequal size)."""
        for held in self._last.values():
            held.mul_(factor)

    def mean_is_ready(self) -> None:
        """The accumulated gradient is the average now; not un-scaled or clipped yet (of micro-steps or parts)."""
        if self.source not in ("micro_steps", "parts") or not self.due or self._missing:
            return
        live, grads = self._live()
        scale = self._scale(live)
        if scale is not None:
            self._mean = self._sqr_norms(live, grads, scale).cpu()

    # --- common

    def local(self, samples: int) -> torch.Tensor:
        """This rank's part of the estimate, to be summed over ranks: float64 on the CPU. NaN where there is none.

        Replicas: n_r |g_r|^2 by layer, shape (L,). Micro-steps: sum n_r |g_r|^2, then |g|^2, of this rank's parameters,
        shape (2L,). Parts: as micro-steps, then the number of parts, shape (2L + 1,). Steps: |g_t - g_(t-1)|^2, then
        g_t . g_(t-1), of this rank's parameters, shape (2L,).
        """
        found = None if self._missing else self._local(samples)
        if found is None:
            size = {"replicas": self.num_layers, "parts": 2 * self.num_layers + 1}.get(self.source, 2 * self.num_layers)
            return torch.full((size,), float("nan"), dtype=torch.float64)
        return found.detach().to("cpu", torch.float64)

    def _local(self, samples: int) -> torch.Tensor | None:
        if self.source == "steps":
            return self._successive()
        if self.source == "replicas":
            return samples * _total(self._before) if self._before else None
        if self._mean is None:
            return None
        # The replicas of a stage have the same mean, and the stages of a replica the same number of parts.
        if self.source == "micro_steps":
            return torch.cat([self._micro, self._mean])
        count = torch.tensor([self._num_parts * self.copies / self.world.size], dtype=torch.float64)
        return torch.cat([self._micro, self._mean / self.copies, count])

    def finish(self, sums: FloatArray | None, total_samples: int, passes: int = 1) -> StepStatistics | None:
        """The step's statistics, if it was measured; prepares the next step.

        Args:
            sums: over ranks of :meth:`local`; None: this process is alone.
            total_samples: M.
            passes: backward passes of each rank that the user summed up before the step, each synchronised on its own.
        """
        result = None
        if self.due:
            mine = _array(self.local(total_samples)) if sums is None else sums
            result = self._finish(mine, total_samples, passes)
        self._step += 1
        self._before.clear()
        self._after.clear()
        self._micro.zero_()
        self._mean = None
        self._num_parts = 0
        missing, self._missing = self._missing, False
        if self.source == "steps" and not missing:
            if self.capture:
                self._last, self._now = {key: self._now[key] for key in self._arrived}, self._last
                self._last_samples, self._last_scale = total_samples, self.loss_scale()
        else:
            self._last.clear()
        self._arrived.clear()
        self._plan()
        return result

    def _finish(self, sums: FloatArray, total: int, passes: int) -> StepStatistics | None:
        if self.source == "steps":
            if np.all(np.isnan(sums)) or total != self._last_samples:
                return None
            diff, dot = np.split(sums, 2)
            return StepStatistics(*successive_estimate(diff, dot, total), self._every(self._step))
        if self.source == "replicas":
            if not self._after or not np.all(np.isfinite(sums)):
                return None
            weighted, mean = sums, _array(_total(self._after))
        else:
            if np.all(np.isnan(sums)):
                return None
            weighted, mean = np.split(sums[: 2 * self.num_layers], 2)
        replicas = round(float(sums[-1])) if self.source == "parts" else self.replicas
        if replicas < 2 or (self.source == "parts" and passes > 1):  # a batch that could not be cut, or several
            return None
        # Every replica is given the weighted mean of |g_r|^2: the estimate depends on that mean alone.
        rows = np.tile(weighted / total, (replicas, 1))
        samples = np.full(replicas, total / replicas)
        variance, sqr_norm = replica_estimate(rows, mean, samples)
        if self.source == "replicas" and passes > 1:
            # Ranks differ by the last pass alone, whose variance is one of ``passes`` equal parts of the gradient's.
            sqr_norm = sqr_norm - (passes - 1) * variance / total
            variance = passes * variance
        return StepStatistics(variance, sqr_norm, self._every(self._step))

    def _live(self) -> tuple[list[nn.Parameter], Tensors]:
        """What trains, and its accumulated gradients."""
        live = [p for p in self.params if p.requires_grad and p.grad is not None]
        return live, [p.grad for p in live if p.grad is not None]

    def _scale(self, params: Sequence[torch.Tensor]) -> Scale | Literal[False] | None:
        """False: raw gradients; None: the optimizer has no state yet, so nothing can be measured."""
        return self.preconditioner.scale(params) if params else False

    def _plain(self, grads: Sequence[torch.Tensor], loss_scale: float | None = None) -> Tensors:
        """Real, and un-scaled (AMP)."""
        unscale = 1.0 / (loss_scale or self.loss_scale())
        found = [real(grad) for grad in grads]
        return found if unscale == 1.0 else list(torch._foreach_mul(found, unscale))

    def _sqr_norms(
        self,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        scale: Scale | Literal[False],
        divisors: Tensors | None = None,
    ) -> torch.Tensor:
        """|g / s|^2 by layer, float64, shape (L,)."""
        if not params:  # a stage of which nothing trains
            return torch.zeros(self.num_layers, dtype=torch.float64)
        return self._by_layer(params, sqr_norms(self._plain(grads), scale or None, divisors))

    def _by_layer(self, params: Sequence[torch.Tensor], values: torch.Tensor) -> torch.Tensor:
        """Sums of each layer's values, (..., P) -> (..., L)."""
        where = torch.tensor([self.layer_of[id(p)] for p in params], dtype=torch.int64, device=values.device)
        return values.new_zeros(*values.shape[:-1], self.num_layers).index_add_(-1, where, values)


def _total(by_bucket: dict[int, torch.Tensor]) -> torch.Tensor:
    return torch.stack([values.cpu() for values in by_bucket.values()]).sum(0)


def _array(values: torch.Tensor) -> FloatArray:
    return np.asarray(values.detach().to("cpu", torch.float64).numpy(), dtype=np.float64)
