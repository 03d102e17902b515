"""The tensors in what modules are called with and return: nested lists, tuples and mappings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor, depth first."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict) or hasattr(value, "items"):
        for item in value.values():
            yield from tensors_of(item)


def num_bytes(value: Any) -> int:
    """Of all tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(value))


def wants_gradient(value: Any) -> bool:
    """Whether a gradient of one of the tensors is asked for: for itself, or for what it was computed from."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_of(value))
