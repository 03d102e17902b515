"""Finished cells on disk: one file each, written whole or not at all, never run again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from icefrog.errors import UserError
from icefrog.experiment.cells import SCHEMA, Cell

_SEAL = ',"sha256":"'
"""Before the last value of a file: the digest of the text before it. A digit that a disk flipped would be believed."""


class NotFiniteError(ValueError):
    """A result with a number that JSON does not know (NaN, an infinity): no result."""


class CellStore:
    """``OUT/cells/<key>.json``. Several experiments may share a folder: equal cells have equal keys.

    Raises:
        UserError: the folder cannot be made or written to.
    """

    def __init__(self, out_dir: Path) -> None:
        self.out_dir = out_dir
        self.folder = _folder(out_dir)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"--out: {out_dir} cannot be a folder: {error.strerror}", "give a path that can be written"
            ) from error

    def path(self, key: str) -> Path:
        """Where a cell's result lies."""
        return _path(self.out_dir, key)

    def get(self, key: str) -> dict[str, Any] | None:
        """A finished cell's result; None if it is not there, or not as it was written (it is then run again)."""
        return finished(self.out_dir, key)

    def put(self, key: str, cell: Cell, result: Mapping[str, Any]) -> None:
        """Write a result: to a temporary file first, so that an interruption leaves no half of one.

        Raises:
            NotFiniteError: the result holds NaN or an infinity; nothing is written.
            UserError: the file cannot be written.
        """
        if (where := next(_not_finite(result), None)) is not None:
            raise NotFiniteError(f"a result that is no finite number: {where}")
        document = {"schema": SCHEMA, "key": key, "cell": cell.label(), "inputs": cell.inputs(), **result}
        body = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).removesuffix("}")
        text = f'{body}{_SEAL}{_digest(body)}"}}'
        part = self.folder / f".{key}.{os.getpid()}.part"
        try:
            with part.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self.path(key))
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise UserError(
                f"cannot write {self.path(key)}: {error.strerror}", "free some space; finished cells are kept"
            ) from error


def finished(out_dir: Path, key: str) -> dict[str, Any] | None:
    """A finished cell's result, read without touching the folder; None as for :meth:`CellStore.get`."""
    try:
        text = _path(out_dir, key).read_text(encoding="utf-8")
        body, _, digest = text.rpartition(_SEAL)
        if digest != _digest(body) + '"}':
            return None
        found = json.loads(text)
    except (OSError, ValueError):
        return None
    whole = isinstance(found, dict) and found.get("schema") == SCHEMA and found.get("key") == key
    return found if whole and {"summary", "jobs", "trace"} <= found.keys() else None


def _folder(out_dir: Path) -> Path:
    return out_dir / "cells"


def _path(out_dir: Path, key: str) -> Path:
    return _folder(out_dir) / f"{key}.json"


def _not_finite(value: Any, name: str = "") -> Iterator[str]:
    """Where in a result such numbers are: ``summary.avg_jct_s is nan``."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _not_finite(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _not_finite(part, f"{name}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{name} is {value}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
