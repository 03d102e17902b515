"""Where the time of a training step goes: forward, backward by layer, synchronisation, the rest. By hooks; no extra pass.

On the CPU marks are wall-clock readings; on CUDA they are events on the current stream, read at the next step, so that
measuring never makes the CPU wait for the step in flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from icefrog.runtime.hook_owner import HookOwner
from icefrog.runtime.ready import GradientWatch
from icefrog.runtime.reentrant import in_reentrant_checkpoint


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One optimizer step, all its micro-steps together, seconds."""

    step_s: float  # from the end of the step before (or the start of forward) to the end of this one
    fwd_s: float
    bwd_s: float  # until the last gradient is ready; frozen layers cost nothing here
    sync_s: float  # from there to the optimizer step
    ready_s: tuple[
        float, ...
    ]  # by layer: backward time of the last micro-step until its gradients are ready; NaN: frozen


class StepTimer(HookOwner):
    """Owned by :class:`~icefrog.runtime.engine.Engine`, which calls :meth:`step_enter` and :meth:`step_exit`."""

    def __init__(self, model: nn.Module, num_layers: int, device: torch.device, watch: GradientWatch) -> None:
        self.model = model
        self.device = device
        self.num_layers = num_layers
        self.clock: Callable[[], float] = time.perf_counter  # on the CPU
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._forward_start),
            model.register_forward_hook(self._forward_end),
        ]
        watch.listen(self._ready)
        self._pending: _Marks | None = None
        self._marks = _Marks()
        self._last_exit: Any = None

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    @property
    def backward_ran(self) -> bool:
        """Whether a backward pass has followed the last forward pass of the step in progress."""
        return bool(self._marks.micro) and self._marks.micro[-1][2] is not None

    def reset(self) -> None:
        """The coming step follows something that is not training (validation, a checkpoint)."""
        self._marks = _Marks()
        self._last_exit = None

    def mark(self) -> Any:
        """A reading of the clock, from which a :meth:`span` goes."""
        return self._mark()

    def span(self, kind: Literal["fwd", "bwd", "sync"], start: Any) -> None:
        """Something ran from ``start`` until now, where passes do not follow each other (a pipeline's stage)."""
        self._marks.spans[kind].append((start, self._mark()))

    def _mark(self) -> Any:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            return event
        return self.clock()

    def _forward_start(self, model: nn.Module, _args: Any) -> None:
        if model is self.model and torch.is_grad_enabled():
            self._marks.micro.append([self._mark(), None, None])

    def _forward_end(self, model: nn.Module, _args: Any, _output: Any) -> None:
        if model is self.model and torch.is_grad_enabled() and self._marks.micro:
            self._marks.micro[-1][1] = self._mark()

    def _ready(self, layer: int, _params: Sequence[nn.Parameter]) -> None:
        mark = self._mark()
        self._marks.ready[layer] = mark
        if self._marks.micro:
            self._marks.micro[-1][2] = mark

    def step_enter(self) -> None:
        """The optimizer step begins (the last micro-step's backward and its synchronisation are over)."""
        self._marks.enter = self._mark()

    def step_exit(self) -> StepTimes | None:
        """The optimizer step is over. Returns this step's times (CPU), or those of the step before (CUDA)."""
        marks, self._marks = self._marks, _Marks()
        marks.start = self._last_exit
        marks.exit = self._last_exit = self._mark()
        if self.device.type != "cuda":
            return self._times(marks)
        ready, self._pending = self._pending, marks
        return self._times(ready) if ready is not None else None

    def _times(self, marks: _Marks) -> StepTimes | None:
        if marks.spans["fwd"]:
            return self._stage_times(marks)
        micro = [m for m in marks.micro if m[1] is not None and m[2] is not None]
        if not micro or marks.enter is None:
            return None
        last = micro[-1]
        nan = float("nan")
        return StepTimes(
            step_s=self._between(marks.start if marks.start is not None else micro[0][0], marks.exit),
            fwd_s=sum(self._between(m[0], m[1]) for m in micro),
            bwd_s=sum(self._between(m[1], m[2]) for m in micro),
            sync_s=self._between(last[2], marks.enter),
            ready_s=tuple(
                self._between(last[1], marks.ready[i]) if i in marks.ready else nan for i in range(self.num_layers)
            ),
        )

    def _stage_times(self, marks: _Marks) -> StepTimes:
        """From the spans: ``ready_s`` from the start of the last micro-batch's backward pass."""
        sums = {kind: sum(self._between(*span) for span in spans) for kind, spans in marks.spans.items()}
        start = marks.start if marks.start is not None else marks.spans["fwd"][0][0]
        last = marks.spans["bwd"][-1][0] if marks.spans["bwd"] else None
        return StepTimes(
            step_s=self._between(start, marks.exit),
            fwd_s=sums["fwd"],
            bwd_s=sums["bwd"],
            sync_s=sums["sync"],
            ready_s=tuple(
                self._between(last, marks.ready[i]) if last is not None and i in marks.ready else float("nan")
                for i in range(self.num_layers)
            ),
        )

    def _between(self, start: Any, end: Any) -> float:
        if self.device.type == "cuda":
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3
        return float(end - start)


class _Marks:
    """Marks of one optimizer step."""

    def __init__(self) -> None:
        self.start: Any = None
        self.micro: list[list[Any]] = []  # [forward start, forward end, last gradient ready]
        self.ready: dict[int, Any] = {}
        self.spans: dict[str, list[tuple[Any, Any]]] = {"fwd": [], "bwd": [], "sync": []}
        self.enter: Any = None
        self.exit: Any = None


class LayerFlops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts each layer's forward FLOPs during the first training forward, and the order in which layers run.

    Attributes:
        flops: forward FLOPs of the pass by key, as counted by ``torch.utils.flop_counter``'s formulas.
        order: keys in the order of their last call.
        reentrant: a layer ran inside a reentrant activation checkpoint.
    """

    def __init__(self, modules: Sequence[tuple[int, nn.Module]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: dict[int, float] = {}
        self.order: list[int] = []
        self.reentrant = False
        self._current = -1
        # On every module below too: a forward may call a layer's children directly. What several keys share tells nothing.
        users: dict[nn.Module, set[int]] = {}
        for key, root in modules:
            for module in root.modules():
                users.setdefault(module, set()).add(key)
        self._handles = [
            module.register_forward_pre_hook(self._enter_hook(max(keys)))
            for module, keys in users.items()
            if len(keys) == 1 or any(module is root for _, root in modules)
        ]

    def _enter_hook(self, key: int) -> Any:
        def enter(_module: nn.Module, _args: Any) -> None:
            self._current = key
            if key in self.order:
                self.order.remove(key)
            self.order.append(key)
            self.reentrant = self.reentrant or (not torch.is_grad_enabled() and in_reentrant_checkpoint())

        return enter

    def finish(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops[self._current] = self.flops.get(self._current, 0.0) + float(
                formula(*args, **kwargs, out_val=result)
            )
        return result
