"""What a checkpoint may hold: values that ``torch.load(weights_only=True)`` reads back, which runs no code of the file's.

PyTorch saves anything and only refuses it when it is read, days later. So what other code gives is looked at before the
first step. numpy's numbers and arrays count as plain: an LR scheduler that computes with numpy leaves them in the
optimizer's groups.
"""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from icefrog.errors import UserError

_PLAIN: tuple[type, ...] = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray),
    *(torch.dtype, torch.device, torch.Size, torch.layout),
)
_KINDS = "?bhilqBHILQefdFD"
"""numpy's numbers."""


def refuse_unreadable(value: Any, where: str) -> None:
    """Make sure that a state can be read back from a checkpoint.

    Args:
        value: nested; of lists, tuples, sets, dicts, tensors and plain values.
        where: what it is called in the message.

    Raises:
        UserError: something in it cannot.
    """
    if isinstance(value, torch.Tensor) or type(value) in _PLAIN:
        return
    if isinstance(value, np.generic | np.ndarray) and value.dtype.char in _KINDS and type(value) in _numpy_types():
        return
    if type(value) in (dict, OrderedDict, Counter):
        for key, item in value.items():
            refuse_unreadable(key, f"{where}: the key {key!r}")
            refuse_unreadable(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple, set):
        for place, item in enumerate(value):
            refuse_unreadable(item, f"{where}[{place}]")
    else:
        raise UserError(
            f"{where} is a {type(value).__name__}, which cannot be read back from a checkpoint",
            "let its state_dict() give tensors, numbers, strings, and lists or dicts of them",
        )


def read(path: Path, device: torch.device | str) -> dict[str, Any]:
    """A state from a file that ``torch.save`` wrote.

    Raises:
        UserError: it holds something else than plain values.
    """
    try:
        with torch.serialization.safe_globals(_numpys()):
            state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        what = next((line for line in str(error).splitlines() if "Unsupported" in line), str(error)).strip()
        raise UserError(
            f"{path} holds what is not read from a checkpoint: {what[:300]}",
            "let the state_dict() of what is registered give tensors, numbers, strings, and lists or dicts of them",
        ) from error
    return state


def _numpy_types() -> set[type]:
    return {np.ndarray, *(np.dtype(kind).type for kind in _KINDS)}


def _numpys() -> list[Any]:
    """What numbers and arrays are made of in a pickle, in this release of numpy."""
    kinds = [np.dtype(kind) for kind in _KINDS]
    makers = [np.float64(0).__reduce__()[0], np.zeros(0).__reduce__()[0]]
    return [*makers, np.ndarray, np.dtype, *dict.fromkeys(type(kind) for kind in kinds)]
