"""A run that measures its own cost at given depths and leaves: the job's side of ``icefrog profile``.

Whole steps are timed by the machinery that every job runs (:class:`~icefrog.runtime.timing.StepTimer`). Forward times and
outputs of single layers need a hook on every module; they are taken in a few steps of their own, after all others.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from icefrog.errors import UserError
from icefrog.profile import FloatArray, LayerCost, Pipelined
from icefrog.runtime import protocol
from icefrog.runtime.engine import Engine
from icefrog.runtime.layers import Layer
from icefrog.runtime.profiling import SKIPPED_STEPS, PointKey, process_peak_bytes
from icefrog.runtime.tensors import num_bytes
from icefrog.runtime.timing import StepTimes

CLOCK_STEPS = 5
ROUNDS = 4
LATE_STEPS = 1
"""On CUDA, and in a pipeline, a step's times come with the next one."""
WARMUP_STEPS = 3
"""Steps before anything counts: the layers' order is settled, caches are warm."""


class Probe:
    """Moves through the depths; :meth:`stepped` after every step. Every rank counts the same steps, so all move together.

    Each depth is visited several times, so that a load on the machine that comes and goes falls on all of them, and the
    deepest comes first: peak memory, which only ever grows in some allocators, can then be told apart in the first round.

    Args:
        request: steps and depths.
        engine: of the job.
        write: called on rank 0 with what was measured.
    """

    def __init__(
        self, request: protocol.ProbeRequest, engine: Engine, write: Callable[[protocol.Probed], None]
    ) -> None:
        self._request = request
        self._engine = engine
        self._write = write
        self._visits: list[int] = []  # depths to come, the next one last
        self._step = 0
        self._since = 0  # step at which the present depth was put in force; 0: not yet at any
        self._times: dict[PointKey, list[StepTimes]] = {}
        self._occupancy: dict[PointKey, tuple[float, float | None]] = {}  # peak bytes, utilisation, of the first visit
        self._time = CoreClock()
        self._clock: LayerClock | None = None
        self._until = 0  # step after which the layers' clock is read

    def stepped(self, samples_per_epoch: int | None) -> bool:
        """Collective. A step is over; True: everything is measured and written, and the run should end."""
        self._step += 1
        self._take()
        if self._clock is not None:
            if self._step < self._until:
                return False
            self._finish(self._clock, samples_per_epoch)
            return True
        if self._step < WARMUP_STEPS:
            return False
        if self._since == 0:
            if self._engine.cache is not None:  # what computing costs is asked for
                self._engine.cache.close()
                self._engine.cache = None
            self._visits = self._depths() * ROUNDS
            self._enter(self._visits.pop())
        elif self._step - self._since >= SKIPPED_STEPS + LATE_STEPS + -(-self._request.steps // ROUNDS):
            key = self._engine.point()
            _, util = self._engine.profiler.sample_occupancy(key)
            self._occupancy.setdefault(key, (peak_bytes(self._engine.device), util))
            if self._visits:
                self._enter(self._visits.pop())
            else:
                self._engine.move(0)
                self._until = self._step + CLOCK_STEPS
                self._clock = LayerClock(self._engine.parallel.forward_module, self._engine.layers, self._now)
        return False

    def _take(self) -> None:
        times, self._engine.profiler.last = self._engine.profiler.last, None
        if times is not None and self._since > 0:
            self._times.setdefault(self._engine.point(), []).append(times)

    def _depths(self) -> list[int]:
        num_layers = len(self._engine.layers)
        given = self._request.depths
        depths = {num_layers * quarter // 4 for quarter in range(4)} if given is None else set(given)
        if wrong := [depth for depth in depths if not 0 <= depth < num_layers]:
            raise UserError(
                f"cannot freeze {wrong[0]} of {num_layers} layers", f"give depths from 0 to {num_layers - 1}"
            )
        return sorted(depths)

    def _enter(self, depth: int) -> None:
        self._engine.move(depth)
        self._engine.profiler.moved()
        self._engine.timer.clock = self._time
        self._engine.timer.reset()
        self._engine.profiler.last = None  # on CUDA, a step's times come with the next one
        self._since = self._step
        reset_peak(self._engine.device)
        self._engine.profiler.sample_occupancy(self._engine.point())

    def _now(self) -> float:
        """For the few steps of the :class:`LayerClock`, whose own cost does not matter."""
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)
        return self._time()

    def _cells(self) -> list[protocol.ProbedCell]:
        """Without depths at which no step was whole (a loader whose batches are all of another size)."""
        cells = []
        for key, (mem_bytes, util_pct) in sorted(self._occupancy.items()):
            if key not in self._times:
                continue
            step, forward, backward, sync, *_ = faster_half(self._times[key]).tolist()
            cells.append(
                protocol.ProbedCell(
                    **key._asdict(),
                    num_steps=len(self._times[key]),
                    step_s=step,
                    fwd_s=max(forward, 0.0),
                    bwd_s=max(backward, 0.0),
                    sync_s=max(sync, 0.0),
                    mem_bytes=mem_bytes,
                    util_pct=util_pct,
                )
            )
        return cells

    def _finish(self, clock: LayerClock, samples_per_epoch: int | None) -> None:
        clock.close()
        self._time.close()
        kind = self._engine.parallel.describe()
        layers = self._layers(clock, kind.micro_batches if isinstance(kind, Pipelined) else 1)
        if self._engine.world.rank != 0:
            return
        self._write(
            protocol.Probed(
                schema=1,
                parallel=kind,
                samples_per_epoch=samples_per_epoch,
                layers=layers,
                cells=tuple(self._cells()),
            )
        )

    def _layers(self, clock: LayerClock, micro_batches: int) -> tuple[LayerCost, ...]:
        """Collective. Forward times and outputs are of one pass, a micro-batch's in a pipeline."""
        profiler, samples = self._engine.profiler, max(self._engine.counting.batch_per_gpu, 1)
        own = torch.tensor([clock.seconds, clock.output_bytes], dtype=torch.float64)
        seconds, output_bytes = (self._engine.parallel.merge_layers(own) * micro_batches / samples).tolist()
        bwd = np.zeros(len(self._engine.layers))
        if full := self._times.get(self._engine.point()):
            ready = np.nan_to_num(faster_half(full)[4:])
            later = np.maximum.accumulate(np.append(ready, 0.0)[::-1])[::-1][1:]  # when all layers behind it are done
            bwd = np.maximum(ready - later, 0.0) / samples
        total = sum(profiler.flops)
        return tuple(
            LayerCost(
                name=name,
                flops=flops if total > 0 else size,
                param_bytes=max(size, 1.0),
                activation_bytes=output_bytes[i],
                fwd_s=seconds[i],
                bwd_s=float(bwd[i]),
            )
            for i, ((name, size), flops) in enumerate(zip(profiler.layers, profiler.flops, strict=True))
        )


class CoreClock:
    """Wall-clock time less what the thread that made it has waited for a core: on a crowded CPU, steps as if alone there.

    Waiting for data or for other ranks is in it. Where the kernel does not tell, it is the wall clock.
    """

    def __init__(self) -> None:
        self._waited: int | None = None
        with contextlib.suppress(OSError):
            self._waited = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def __call__(self) -> float:
        """Seconds; only differences mean something."""
        if self._waited is None:
            return time.perf_counter()
        waited_ns = self._waited_ns(self._waited)
        while True:
            now_s = time.perf_counter()
            before_ns, waited_ns = waited_ns, self._waited_ns(self._waited)
            if waited_ns == before_ns:  # else a wait lies between the two readings, and would be taken off twice
                return now_s - waited_ns / 1e9

    @staticmethod
    def _waited_ns(schedstat: int) -> int:
        return int(os.pread(schedstat, 100, 0).split()[1])

    def close(self) -> None:
        """It is the wall clock from here on."""
        if self._waited is not None:
            os.close(self._waited)
            self._waited = None


def faster_half(times: Sequence[StepTimes]) -> FloatArray:
    """Mean of the faster half of the steps, as what else runs on a machine only ever adds time.

    Returns:
        Step, forward, backward, synchronisation, and gradients ready by layer, s; shape (4 + L,).
    """
    fast = sorted(times, key=lambda t: t.step_s)[: (len(times) + 1) // 2]
    rows = np.array([(t.step_s, t.fwd_s, t.bwd_s, t.sync_s, *t.ready_s) for t in fast])
    return np.asarray(rows.mean(axis=0))


class LayerClock:
    """Forward time of every layer and the bytes of what it hands on, by hooks on its modules.

    A layer's time goes from the start of its first module to the start of the next layer's, whatever is called between.

    Attributes:
        seconds: by layer, median over the passes.
        output_bytes: by layer, of the whole micro-batch.
        passes: training forward passes seen.
    """

    def __init__(self, model: nn.Module, layers: list[Layer], now: Callable[[], float]) -> None:
        self._now = now
        self._totals: list[list[float]] = [[] for _ in layers]
        self.output_bytes = [0.0] * len(layers)
        self.passes = 0
        self._marks: list[tuple[int, Any]] = []  # (layer that begins, when); in forward only
        self._inside = False
        owners: dict[nn.Module, set[int]] = {}
        for index, layer in enumerate(layers):
            for module in layer.submodules():
                owners.setdefault(module, set()).add(index)
        self._handles: list[RemovableHandle] = [model.register_forward_pre_hook(self._start)]
        for module, users in owners.items():
            if len(users) == 1 and module is not model:
                index = next(iter(users))
                self._handles.append(module.register_forward_pre_hook(self._enter_hook(index)))
                self._handles.append(module.register_forward_hook(self._leave_hook(index)))
        self._handles.append(model.register_forward_hook(self._end))

    @property
    def seconds(self) -> list[float]:
        """Median forward time by layer; 0 for one that was never called by its module."""
        return [float(np.median(times)) if times else 0.0 for times in self._totals]

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    def _start(self, _model: nn.Module, _args: Any) -> None:
        self._marks, self._inside = [], torch.is_grad_enabled()

    def _enter_hook(self, index: int) -> Callable[[nn.Module, Any], None]:
        def enter(_module: nn.Module, _args: Any) -> None:
            if self._inside and (not self._marks or self._marks[-1][0] != index):
                self._marks.append((index, self._now()))

        return enter

    def _leave_hook(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        def leave(_module: nn.Module, _args: Any, output: Any) -> None:
            if self._inside:
                self.output_bytes[index] = float(num_bytes(output))

        return leave

    def _end(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        if not self._inside:
            return
        self._inside = False
        self._marks.append((-1, self._now()))
        sums: dict[int, float] = {}
        for (index, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            sums[index] = sums.get(index, 0.0) + end - begin
        for index, seconds in sums.items():
            self._totals[index].append(seconds)
        self.passes += 1


def reset_peak(device: torch.device) -> None:
    """Peak memory counts from here, where the system allows that."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> float:
    """Peak memory of the device's allocator, or of this process, since :func:`reset_peak`."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_reserved(device))
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024.0 * float(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    return process_peak_bytes(device.type)
