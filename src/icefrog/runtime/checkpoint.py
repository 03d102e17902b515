"""Checkpoints on disk: atomic, verified by a digest, the last two kept; the states of random generators.

A checkpoint is two files: ``NNNNNNNN.pt`` (tensors and plain values, loadable with ``weights_only=True``) and
``NNNNNNNN.json`` (its SHA-256, size and a summary). The second is written last: without it, or when the digest does not
match, the checkpoint does not count and the one before it is used. Sharded ones (:mod:`icefrog.runtime.sharded`) are folders
``NNNNNNNN.dcp`` with a ``manifest.json`` inside. Other files in the folder are the user's.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import warnings
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from icefrog.runtime.folder_lock import FolderLock
from icefrog.runtime.readable import read

KEEP = 2
# Seven counted digits behind a zero, so that a date (20231231.json) is not taken for ours.
_OWN = re.compile(r"0\d{7}\.(pt|json|dcp)(\.tmp)?", re.ASCII)


class CheckpointStore:
    """The checkpoints of one job in one folder.

    Args:
        folder: created when first written to.
        keep: how many are kept.
    """

    collective = False
    """Whether every rank calls :meth:`save`, not rank 0 only."""

    def __init__(self, folder: str | os.PathLike[str], keep: int = KEEP) -> None:
        self.folder = Path(folder)
        self.keep = keep
        self._damaged: set[int] = set()
        self.lock: FolderLock | None = None
        """Of a running job, which must have the folder for itself; None: whoever likes may write."""

    def save(self, state: dict[str, Any], summary: dict[str, Any]) -> Path:
        """Write one more checkpoint; when this returns it is on disk. ``summary``: a few JSON values for humans."""
        path = self.next_path(".pt")
        manifest = manifest_of(path)
        halves = path.with_suffix(".pt.tmp"), path.with_suffix(".json.tmp")
        try:
            write_state(state, halves[0])
            digest, size = digest_of(halves[0])
            halves[0].replace(path)
            with halves[1].open("w") as text:
                json.dump({"schema": 1, "sha256": digest, "bytes": size, **summary}, text)
                sync(text)
            halves[1].replace(manifest)
        except BaseException:
            for half in halves:  # on a full disk its room is needed
                half.unlink(missing_ok=True)
            raise
        sync_folder(self.folder)
        self.forget_old()
        return path

    def next_path(self, suffix: str) -> Path:
        """Where the next checkpoint goes; the folder exists then, and what killed runs left in it is gone.

        Raises:
            UserError: the folder is another job's.
        """
        if self.lock is not None:
            self.lock.check(self)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.forget_old()
        # Whatever bears such a name counts: a folder of the user's, 00000003.pt, is in the way, too.
        number = max((_number(path) for path in self.folder.iterdir() if _OWN.fullmatch(path.name)), default=0) + 1
        return self.folder / f"{number:08d}{suffix}"

    def claim(self) -> None:
        """The folder is this store's from now on, until :meth:`close`. Only in the process that writes.

        Raises:
            UserError: another job has it.
        """
        if self.lock is not None:
            self.lock.take(self)

    def close(self) -> None:
        """Another job may have the folder."""
        if self.lock is not None:
            self.lock.release(self)

    def paths(self) -> list[Path]:
        """Complete checkpoints, newest first (not verified)."""
        whole = [path for path in self._own() if path.suffix in (".pt", ".dcp") and manifest_of(path).is_file()]
        return sorted(whole, key=_number, reverse=True)

    def _own(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if _OWN.fullmatch(path.name)]
        return [path for path in found if (path.is_dir() if ".dcp" in path.name else path.is_file())]

    def newest_valid(self) -> Path | None:
        """The newest checkpoint whose digest matches. Warns about each one that had to be passed over."""
        paths = self.paths()
        for path in paths:
            problem = _problem(path)
            if problem is None:
                return path
            self._damaged.add(_number(path))
            rest = (
                "none is left, training starts from the beginning" if path is paths[-1] else "using the one before it"
            )
            warnings.warn(f"checkpoint {path} is damaged ({problem}): {rest}", stacklevel=2)
        return None

    def forget_old(self) -> None:
        """Remove halves, and all but the newest ``keep``; damaged ones once there is a newer one that is not."""
        whole = [_number(path) for path in self.paths()]
        kept = [number for number in whole if number not in self._damaged][: self.keep]
        for path in self._own():
            number = _number(path)
            old = number < max(kept, default=0) and number not in kept
            if old or number not in whole or path.suffix == ".tmp":
                _remove(path)


def write_state(state: Any, path: Path) -> None:
    """Into a new file; when this returns it is on disk.

    Raises:
        OSError: it cannot be written. (PyTorch, which then cannot end the file either, speaks of "unexpected pos".)
    """
    try:
        with path.open("wb") as file:
            torch.save(state, file)
            sync(file)
    except RuntimeError as error:
        cause = error.__context__
        if not isinstance(cause, OSError):
            raise
        raise OSError(cause.errno, cause.strerror) from error


def load(path: Path, device: torch.device) -> dict[str, Any]:
    """The state of a verified checkpoint that one process wrote.

    Raises:
        UserError: it holds something else than plain values.
    """
    return read(path, device)


def _number(path: Path) -> int:
    """Of a file of ours."""
    return int(path.name[:8])


def manifest_of(path: Path) -> Path:
    """The file that makes a checkpoint count."""
    return path / "manifest.json" if path.suffix == ".dcp" else path.with_suffix(".json")


def _problem(path: Path) -> str | None:
    try:
        manifest = json.loads(manifest_of(path).read_text())
        if not isinstance(manifest, dict):
            return "its manifest is not an object"
        if path.suffix == ".pt":
            files = {path: [manifest["sha256"], manifest["bytes"]]}
        else:
            files = {path / name: found for name, found in manifest["files"].items()}
        for file, found in files.items():
            if list(digest_of(file)) != found:
                return "its digest does not match" if file == path else f"the digest of {file.name} does not match"
    except (OSError, ValueError, KeyError, AttributeError) as error:
        return str(error)
    return None


def _remove(path: Path) -> None:
    """A checkpoint, or a half of one. A folder loses its name first, so that it never looks whole with files missing."""
    if path.suffix == ".dcp":
        gone = path.with_suffix(".dcp.tmp")
        shutil.rmtree(gone, ignore_errors=True)
        path = path.rename(gone)
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def digest_of(path: Path) -> tuple[str, int]:
    """(SHA-256 in hexadecimal, size in bytes)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size


def sync(file: IO[Any]) -> None:
    """Return when what was written to the file is on disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """The same of a folder's names."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rng_state() -> dict[str, Any]:
    """States of the generators of this process: torch, CUDA, numpy (global), python."""
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002 - users draw from it
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": [
            str(kind),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "python": [version, list(internal), gauss],
    }


def set_rng_state(state: dict[str, Any], rank: int = 0) -> None:
    """Go on exactly there; ranks but the first, given another's state because they are new, are seeded apart from it."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.cpu().numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if rank > 0:
        seed = int(torch.randint(2**31, ()).item()) + rank
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        random.seed(seed)
