"""Checkpoints of states that no rank holds whole: sharded parameters (DTensor), or a part of the layers on each rank.

One checkpoint is a folder ``NNNNNNNN.dcp``: the tensors of model, optimizer and last gradient in the format of
``torch.distributed.checkpoint`` (each rank writes what it holds), everything else in ``rest_00000.pt`` (of rank 0; other
ranks add what only they know), and ``manifest.json`` with the SHA-256 of every file. It is written under another name; when
all ranks are done, one rename by rank 0 makes it count.

It is read at any number of ranks, each rank only what it will hold, or whole by a single process. Tensors are keyed by plain
parameter names: ``model/NAME``, ``optimizer/exp_avg/NAME``, ``gradient/NAME``.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from icefrog.runtime.checkpoint import KEEP, CheckpointStore, digest_of, sync, sync_folder, write_state
from icefrog.runtime.readable import read

_SHARDED: dict[str, tuple[tuple[str, ...], int]] = {
    "model": (("model",), 1),
    "optimizer": (("optimizer", "state"), 2),
    "gradient": (("statistics", "last"), 1),
}
"""Kind of key -> where in the state, and how many keys deep the tensors are."""


class ShardedWriteError(RuntimeError):
    """A rank could not write its part; the same on all ranks."""


class ShardedStore(CheckpointStore):
    """As :class:`CheckpointStore`, in the same folder and numbers; saving is collective.

    Args:
        folder: shared by all ranks.
        group: of all ranks, on a backend for the CPU, used for nothing else: saving runs beside training.
        keep: how many are kept.
    """

    collective = True

    def __init__(self, folder: str | Path, group: dist.ProcessGroup, keep: int = KEEP) -> None:
        super().__init__(folder, keep)
        self.group = group
        self.rank = dist.get_rank(group)

    def save(self, state: dict[str, Any], summary: dict[str, Any]) -> Path:
        """Collective. Write one more checkpoint; when this returns it is on disk.

        Args:
            state: of :func:`icefrog.runtime.saving.pack`, with DTensors, or with the keys that this rank holds. Tensors that
                several ranks hold whole are those of the lowest of them.
            summary: a few JSON values for humans.

        Raises:
            ShardedWriteError: some rank could not write; nothing is left behind.
        """
        path: Path = self._agree(self._start)
        half = path.with_suffix(".dcp.tmp")
        try:
            parts = self._gather(lambda: self._write_rest(half, state))
            # Only now: a rank that failed alone would leave the others waiting for it inside dcp.save.
            parts += self._gather(lambda: self._write_tensors(half, state))
            self._agree(lambda: self._publish(half, path, parts, summary))
        except ShardedWriteError:
            if self.rank == 0:
                shutil.rmtree(half, ignore_errors=True)
            raise
        return path

    def _start(self) -> Path:
        path = self.next_path(".dcp")
        path.with_suffix(".dcp.tmp").mkdir()
        return path

    def _write_rest(self, half: Path, state: dict[str, Any]) -> dict[str, tuple[str, int]]:
        """What is no tensor; returns the digest."""
        _, rest = split(state)
        if self.rank > 0:
            rest = {key: rest[key] for key in ("model", "optimizer") if key in rest}
        path = half / f"rest_{self.rank:05d}.pt"
        write_state(rest, path)
        return {path.name: digest_of(path)}

    def _write_tensors(self, half: Path, state: dict[str, Any]) -> dict[str, tuple[str, int]]:
        """Collective. This rank's tensors; returns the digests."""
        tensors, _ = split(state)
        dcp_save(
            dict(tensors),
            storage_writer=FileSystemWriter(half, sync_files=False),
            planner=DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True),
            process_group=self.group,
        )
        written = [*half.glob(f"__{self.rank}_*.distcp"), *([half / ".metadata"] if self.rank == 0 else [])]
        for path in written:
            with path.open("rb+") as file:
                sync(file)
        return {path.name: digest_of(path) for path in written}

    def _publish(self, half: Path, path: Path, parts: list[dict[str, Any]], summary: dict[str, Any]) -> None:
        files = {name: found for part in parts for name, found in part.items()}
        with (half / "manifest.json").open("w") as text:
            json.dump({"schema": 1, "ranks": dist.get_world_size(self.group), "files": files, **summary}, text)
            sync(text)
        sync_folder(half)
        half.rename(path)
        sync_folder(self.folder)
        self.forget_old()

    def _agree(self, work: Callable[[], Any]) -> Any:
        """Collective. Rank 0 does ``work``; its result on all ranks."""
        box: list[Any] = [None, None]
        if self.rank == 0:
            try:
                box[0] = work()
            except Exception as error:
                box[1] = str(error)
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        if box[1] is not None:
            raise ShardedWriteError(box[1])
        return box[0]

    def _gather(self, work: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """Collective. Every rank does ``work``; the results of all ranks."""
        mine: tuple[dict[str, Any], str | None]
        try:
            mine = work(), None
        except Exception as error:
            mine = {}, f"rank {self.rank}: {error}"
        found: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, mine, group=self.group)
        problems = [problem for _, problem in found if problem is not None]
        if problems:
            raise ShardedWriteError(problems[0])
        return [part for part, _ in found]


def load(path: Path, held: Mapping[str, torch.Tensor] | None = None) -> dict[str, Any]:
    """The state of a verified sharded checkpoint. Not collective: each rank reads what it needs.

    Args:
        path: of the folder. Its index is a pickle: read only what you wrote.
        held: what this rank holds of the model, by name and as it is sharded: that is read, and what the optimizer keeps for
            it. None: everything, whole, on the CPU.
    """
    rests = sorted(path.glob("rest_*.pt"))
    state = read(rests[0], "cpu")
    for other in rests[1:]:
        _merge(state, read(other, "cpu"))
    reader = FileSystemReader(path)
    stored = reader.read_metadata().state_dict_metadata
    tensors: dict[str, torch.Tensor] = {}
    for key, item in stored.items():
        assert isinstance(item, TensorStorageMetadata)
        name = _split_key(key)[1][0]
        like = None if held is None else held.get(name)
        if held is not None and like is None and _key("model", (name,)) in stored:
            continue  # of a layer that another rank holds
        if like is not None and like.shape == item.size:
            tensors[key] = torch.empty_like(like.detach(), dtype=item.properties.dtype)
        else:
            tensors[key] = torch.empty(item.size, dtype=item.properties.dtype)
    if tensors:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it notes that each rank reads for itself
            dcp_load(dict(tensors), storage_reader=reader, no_dist=True)
    for key, tensor in tensors.items():
        kind, names = _split_key(key)
        inner = state
        for name in (*_SHARDED[kind][0], *names[:-1]):
            inner = inner.setdefault(name, {})
        inner[names[-1]] = tensor
    return state


def _key(kind: str, names: tuple[str, ...]) -> str:
    """``optimizer``, (NAME, ``exp_avg``) -> ``optimizer/exp_avg/NAME``: last, as it may hold a slash."""
    return "/".join((kind, *reversed(names)))


def _split_key(key: str) -> tuple[str, tuple[str, ...]]:
    kind, rest = key.split("/", 1)
    return kind, tuple(reversed(rest.split("/", _SHARDED[kind][1] - 1)))


def split(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors that ranks hold a part of, by key; everything else in the state's own structure).

    Raises:
        TypeError: an optimizer keeps sharded tensors in lists or the like: they have no name.
    """
    tensors: dict[str, torch.Tensor] = {}
    rest = dict(state)
    for kind, (where, depth) in _SHARDED.items():
        inner = rest
        for name in where[:-1]:
            if name in inner:
                inner[name] = dict(inner[name])
            inner = inner.get(name, {})
        if where[-1] not in inner:
            continue
        kept: dict[str, Any] = {}
        for names, value in _leaves(inner[where[-1]], depth):
            if isinstance(value, torch.Tensor):
                tensors[_key(kind, names)] = value
                continue
            if any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(value)):
                raise TypeError(f"{kind} state of {names[0]} keeps sharded tensors inside {type(value).__name__}")
            place = kept
            for name in names[:-1]:
                place = place.setdefault(name, {})
            place[names[-1]] = value
        inner[where[-1]] = kept
    return tensors, rest


def _leaves(tree: Mapping[str, Any], depth: int, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in tree.items():
        if depth > 1 and isinstance(value, Mapping):
            yield from _leaves(value, depth - 1, (*names, name))
        else:
            yield (*names, name), value


def _merge(base: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Add what ``base`` lacks; parameter groups are those of all ranks together."""
    for key, value in other.items():
        if key not in base:
            base[key] = value
        elif isinstance(value, Mapping):
            _merge(base[key], value)
        elif key == "groups":
            for mine, theirs in zip(base[key], value, strict=True):
                mine["params"] += [name for name in theirs["params"] if name not in mine["params"]]
