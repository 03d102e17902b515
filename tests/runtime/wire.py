"""Counts what a process hands to its process groups."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

_SPLIT = {"_reduce_scatter_base_": "reduce_scatter", "_allgather_base_": "all_gather"}  # (output, input, ...)


class Wire(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes given to ``torch.distributed`` in this thread, by operation.

    Attributes:
        sent: name of the c10d operation (``send``, ``allreduce_``, ``broadcast_``, ...) -> bytes of its tensors.
        floats: the same, tensors of floating point only: activations and gradients, not labels or shapes.
        split: bytes of ``reduce_scatter`` and ``all_gather`` as this rank hands them in: its whole gradient, its own slices.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: Counter[str] = Counter()
        self.floats: Counter[str] = Counter()
        self.split: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._overloadpacket.__name__
            if name in _SPLIT:
                self.split[_SPLIT[name]] += args[1].numel() * args[1].element_size()
            for tensor in args[0] if isinstance(args[0], (list, tuple)) else [args[0]]:
                if isinstance(tensor, torch.Tensor):
                    size = tensor.numel() * tensor.element_size()
                    self.sent[name] += size
                    self.floats[name] += size if tensor.dtype == torch.float32 else 0
        return func(*args, **(kwargs or {}))


def flops(work: Any) -> int:
    """FLOPs that ``work()`` computes on this rank, by PyTorch's own counter."""
    with FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())
