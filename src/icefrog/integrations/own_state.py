"""The runtime's own state in a framework's checkpoint: a text beside the framework's values, and a few tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from icefrog.runtime import LayerElastic
from icefrog.runtime.checkpoint import load, write_state
from icefrog.runtime.saving import TENSORS

_FILE = "icefrog.pt"


def own_state(elastic: LayerElastic) -> tuple[str, dict[str, Any]]:
    """JSON, and what of the state has tensors: the gradient that the next step is compared with, a rule's memory."""
    state = elastic.state_dict(own_only=True)
    tensors = {key: state.pop(key) for key in TENSORS}
    return json.dumps(state), tensors


def restore(elastic: LayerElastic, text: str, tensors: Mapping[str, Any] | None) -> None:
    """Inverse of :func:`own_state`; without the tensors some measurements begin anew.

    Raises:
        UserError: the state is of a model with other layers.
    """
    elastic.load_state_dict(json.loads(text) | dict(tensors or {}))


def write_tensors(folder: Path, text: str, tensors: Mapping[str, Any]) -> None:
    """Into a framework's checkpoint folder; appears there whole or not at all."""
    half = folder / f"{_FILE}.tmp"
    write_state({"of": _digest(text), **tensors}, half)
    half.replace(folder / _FILE)


def read_tensors(folders: Sequence[Path], text: str) -> dict[str, Any] | None:
    """What was written beside this text, in whichever of the folders; None: it is in none of them."""
    for folder in folders:
        if (folder / _FILE).is_file():
            found = load(folder / _FILE, torch.device("cpu"))
            if found.pop("of", None) == _digest(text):
                return found
    return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
