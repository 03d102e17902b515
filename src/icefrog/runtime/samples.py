"""How many samples a model is called with, told from what it is called with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from icefrog.runtime.tensors import tensors_of

_CHANNELS = (1, 3, 4)
"""Of an image: a list of tensors (3, H, W) holds images, not a batch of three of several inputs."""


class SampleCount:
    """Of one model's forward passes.

    Mostly a batch is one dimension of the first tensor. A list or tuple is a *list of samples* instead, and its length
    counts, where it holds strings, or tensors of one kind or mappings of equal keys (detection) that no batch dimension
    unites: because their first dimensions differ (sequences), or there is a list of as many mappings beside it (targets). A
    model that was given one such list is given no other lists. Tensors that look like images are samples until a call shows
    that the model takes several inputs: (4, 30, 64) is an image, or four sequences.

    Args:
        batch_dim: where a tensor has its samples; one with fewer dimensions has them in its last.
    """

    def __init__(self, batch_dim: int = 0) -> None:
        self._batch_dim = batch_dim
        self._lists: bool | None = None  # whether lists hold samples; None: not known

    def of(self, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
        """Samples of a call; 0: cannot be told."""
        given = [*args, *kwargs.values()]
        for place, value in enumerate(given):
            beside = {len(other) for other in given[place + 1 :] if _are_mappings(other)}
            if count := self._count(value, beside):
                return count
        return 0

    def _count(self, value: Any, beside: set[int]) -> int:
        if isinstance(value, PackedSequence):
            return int(value.batch_sizes[0])
        if isinstance(value, (torch.Tensor, np.ndarray)):
            return int(value.shape[min(self._batch_dim, value.ndim - 1)]) if value.ndim else 0
        if isinstance(value, (list, tuple)) and value and self._holds_samples(value, beside):
            return len(value)
        return next((count for item in _parts(value) if (count := self._count(item, beside))), 0)

    def _holds_samples(self, items: Sequence[Any], beside: set[int]) -> bool:
        if all(isinstance(item, str) for item in items):
            return True
        alike = all(isinstance(item, torch.Tensor) for item in items) and len({(i.dim(), i.dtype) for i in items}) == 1
        if not (alike or _are_mappings(items)):
            return False
        tensors = [tensor for item in items for tensor in tensors_of(item) if tensor.dim()]
        images = any(t.dim() == 3 and t.size(0) in _CHANNELS and t.dtype != torch.int64 for t in tensors)
        if len({tensor.size(0) for tensor in tensors}) > 1 or len(items) in beside:
            self._lists = True
        elif not images and self._lists is None:
            self._lists = False
        return images if self._lists is None else self._lists


def _are_mappings(value: Any) -> bool:
    """A list of mappings with equal keys."""
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and all(isinstance(item, dict) and item.keys() == value[0].keys() for item in value)
    )


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        yield from value
    elif isinstance(value, dict) or hasattr(value, "items"):
        yield from value.values()
    elif is_dataclass(value) and not isinstance(value, type):
        yield from (getattr(value, field.name) for field in fields(value))
