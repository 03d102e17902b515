"""Batches as rows: a 128-bit key for each row of a model's input, and outputs (trees of tensors) as bytes by row."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from icefrog.runtime.rowstore import Key
from icefrog.runtime.tensors import tensors_of


class UnsupportedError(Exception):
    """Why an output cannot be cached; the message is for the user."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of an output: its shape, or of rows what follows the batch dimension."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return math.prod(self.shape) * torch.empty(0, dtype=self.dtype).element_size()


# -- hashing of inputs ------------------------------------------------------------------------------------------------------


def row_keys(value: Any) -> tuple[int, list[Key], str]:
    """(B, a 128-bit key of every row, the kind of input) of whatever a model is called with.

    Tensors whose first dimension is B (that of the first tensor) count row by row; all else counts for every row. The kind
    says everything but the tensors' values and B: two inputs of one kind make tensors of the same shapes.

    Raises:
        UnsupportedError: there is no batch, or an argument whose value cannot be read.
    """
    tensors: list[torch.Tensor] = []
    plain: list[str] = [str(torch.is_autocast_enabled()), str(torch.get_default_dtype())]
    _collect(value, tensors, plain)
    first = next((tensor for tensor in tensors if tensor.ndim), None)
    if first is None:
        raise UnsupportedError("the model's input holds no tensor with a batch dimension")
    batch = int(first.shape[0])
    keys = torch.zeros((batch, 2), dtype=torch.int64)
    for number, tensor in enumerate(tensors):
        plain.append(f"{tuple(tensor.shape[1:])}{tensor.dtype}")
        rows = tensor.detach()
        rows = rows if rows.ndim and rows.shape[0] == batch else rows.reshape(1, -1)
        keys += _hash_rows(rows, number).cpu()
    kind = "|".join(plain)
    salt = np.frombuffer(_digest(kind), dtype="<i8")
    keys += torch.from_numpy(salt.copy())
    return batch, [(int(a), int(b)) for a, b in keys.tolist()], kind


def _collect(value: Any, tensors: list[torch.Tensor], plain: list[str]) -> None:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
    elif isinstance(value, dict) or hasattr(value, "items"):
        for key, item in value.items():
            plain.append(str(key))
            _collect(item, tensors, plain)
    elif isinstance(value, (list, tuple)):
        plain.append(f"{type(value).__name__}{len(value)}")
        for item in value:
            _collect(item, tensors, plain)
    elif value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype, torch.device)):
        plain.append(repr(value))
    else:
        raise UnsupportedError(f"the model is called with a {type(value).__name__}, whose content is unknown")


def take_rows(value: Any, batch: int, chosen: torch.Tensor) -> Any:
    """What the model is called with for some of the rows: the tensors that :func:`row_keys` counts row by row are cut.

    Raises:
        UnsupportedError: a container that cannot be made again.
    """
    if isinstance(value, torch.Tensor):
        return value[chosen.to(value.device)] if value.ndim and value.shape[0] == batch else value
    if type(value) is dict:
        return {key: take_rows(item, batch, chosen) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(take_rows(item, batch, chosen) for item in value)
    if hasattr(value, "items") or isinstance(value, (list, tuple)):
        raise UnsupportedError(f"a {type(value).__name__} cannot be cut")
    return value


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _hash_rows(rows: torch.Tensor, salt: int) -> torch.Tensor:
    """Two universal hashes of every row, shape (B or 1, 2): sums of its 32-bit words times fixed random 64-bit weights."""
    flat = rows.contiguous().reshape(rows.shape[0], -1)
    raw = flat.view(torch.uint8) if flat.numel() else flat.new_zeros((rows.shape[0], 0), dtype=torch.uint8)
    words = nn.functional.pad(raw, (0, -raw.shape[1] % 4)).view(torch.int32).to(torch.int64)
    weights = _weights(words.shape[1], salt).to(words.device)
    sums = torch.stack([(words * weights[0]).sum(1), (words * weights[1]).sum(1)], dim=1)
    return sums ^ (sums >> 29)


def _weights(count: int, salt: int) -> torch.Tensor:
    """Shape (2, count), int64; the same in every process."""
    generator = np.random.Generator(np.random.PCG64([0x1CEF06, salt]))
    return torch.from_numpy(generator.integers(-(2**63), 2**63, size=(count, 2), dtype=np.int64).T.copy())


# -- outputs: trees of tensors ----------------------------------------------------------------------------------------------


def template(output: Any) -> Any:
    """The output with a :class:`Leaf` in place of each tensor.

    Raises:
        UnsupportedError: it holds something that is no tensor, container or plain value.
    """
    if isinstance(output, torch.Tensor):
        return Leaf(tuple(output.shape), output.dtype)
    if type(output) in (tuple, list):
        return type(output)(template(item) for item in output)
    if type(output) is dict:
        return {key: template(item) for key, item in output.items()}
    if output is None or isinstance(output, (bool, int, float, str)):
        return output
    raise UnsupportedError(f"an output of type {type(output).__name__} cannot be cached")


def by_row(structure: Any, batch: int) -> Any:
    """The template of one row of an output of ``batch`` rows.

    Raises:
        UnsupportedError: it holds a tensor with another first dimension.
    """

    def row(leaf: Leaf) -> Leaf:
        if leaf.shape[:1] != (batch,):
            raise UnsupportedError(f"an output of shape {leaf.shape} has no row for each sample")
        return Leaf(leaf.shape[1:], leaf.dtype)

    return _map(structure, row)


def _map(structure: Any, make: Callable[[Leaf], Any]) -> Any:
    if isinstance(structure, Leaf):
        return make(structure)
    if type(structure) in (tuple, list):
        return type(structure)(_map(item, make) for item in structure)
    if type(structure) is dict:
        return {key: _map(item, make) for key, item in structure.items()}
    return structure


def leaves(structure: Any) -> Iterable[Leaf]:
    """In the order of :func:`~icefrog.runtime.tensors.tensors_of`."""
    if isinstance(structure, Leaf):
        yield structure
    elif isinstance(structure, (tuple, list)):
        for item in structure:
            yield from leaves(item)
    elif isinstance(structure, dict):
        for item in structure.values():
            yield from leaves(item)


def zeros(structure: Any, device: torch.device) -> Any:
    """An output of that shape."""
    return _map(structure, lambda leaf: torch.zeros(leaf.shape, dtype=leaf.dtype, device=device))


def pack(output: Any, batch: int) -> torch.Tensor:
    """The rows as bytes, shape (B, row_bytes), on the CPU."""
    parts = [t.detach().contiguous().reshape(batch, -1).view(torch.uint8) for t in tensors_of(output)]
    return torch.cat(parts, dim=1).cpu() if len(parts) > 1 else parts[0].cpu()


def unpack(structure: Any, rows: torch.Tensor, device: torch.device) -> Any:
    """Inverse of :func:`pack`."""
    position = 0

    def take(leaf: Leaf) -> torch.Tensor:
        nonlocal position
        raw = rows[:, position : position + leaf.row_bytes].contiguous()
        position += leaf.row_bytes
        return raw.view(leaf.dtype).reshape(len(rows), *leaf.shape).to(device)

    return _map(structure, take)
