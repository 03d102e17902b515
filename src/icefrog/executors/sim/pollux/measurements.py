"""Reading what the Pollux artifact measured: ``DIR/pollux/<application>/{placements,scalability,validation-*}.csv``."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias, TypeVar

from icefrog.errors import UserError

T = TypeVar("T")

Times: TypeAlias = tuple[float, float]
"""(step_time, sync_time) of one step without accumulation, s; the second is the exposed part of the first."""


@dataclass(frozen=True, slots=True)
class EpochStats:
    """One epoch of a measured training run with a fixed global batch."""

    progress: float  # scale-invariant iterations from the start of training to the end of the epoch
    iteration: float  # steps likewise
    grad_sqr: float  # |G|^2 of the mean gradient of the initial batch
    grad_var: float  # its variance at the initial batch


@dataclass(frozen=True, slots=True)
class Measurements:
    """All files of one application, in file order."""

    placements: Mapping[str, Mapping[int, Times]]
    """Placement (GPUs of each node, one digit a node) -> local batch -> times."""
    scalability: tuple[tuple[int, int, int, Times], ...]
    """(nodes, GPUs, local batch, times)."""
    validation: Mapping[int, tuple[EpochStats, ...]]
    """Global batch -> one entry an epoch; ascending batches."""


def read_application(data_dir: Path, name: str) -> Measurements:
    """Read the files of one application.

    Args:
        data_dir: the folder that holds ``pollux/<application>/``.
        name: of the application.

    Raises:
        UserError: a file is missing, empty or does not parse.
    """
    folder = data_dir / "pollux" / name
    placements: dict[str, dict[int, Times]] = {}
    for placement, batch, times in _rows(folder / "placements.csv", _placement_row):
        placements.setdefault(placement, {})[batch] = times
    scalability = tuple(_rows(folder / "scalability.csv", _scalability_row))
    validation: dict[int, tuple[EpochStats, ...]] = {}
    files = [(path.stem.removeprefix("validation-"), path) for path in folder.glob("validation-*.csv")]
    for batch, path in sorted((int(stem), path) for stem, path in files if stem.isdecimal()):
        validation[batch] = tuple(_rows(path, _epoch_row))
        for epoch, (before, after) in enumerate(pairwise(validation[batch]), 1):
            if not (before.progress < after.progress and before.iteration < after.iteration):
                raise UserError(f"{path}: epoch {epoch}: progress and iteration must rise from epoch to epoch", _HINT)
    if not validation:
        raise UserError(f"{folder}: no file validation-<batch>.csv", _HINT)
    return Measurements(placements, scalability, validation)


_HINT = "--data (or $ICEFROG_DATA) is the folder that holds pollux/<application>/placements.csv of the Pollux artifact"


def _rows(path: Path, parse: Callable[[Mapping[str, str]], T]) -> list[T]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            rows = []
            for row in reader:
                try:
                    rows.append(parse(row))
                except (KeyError, TypeError, ValueError) as error:
                    raise UserError(f"{path}:{reader.line_num}: {_problem(error)}", _HINT) from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", _HINT) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: not a CSV file: {error}", _HINT) from error
    if not rows:
        raise UserError(f"{path}: no rows", _HINT)
    return rows


def _problem(error: Exception) -> str:
    return f"column {error} is missing" if isinstance(error, KeyError) else str(error)


def _number(row: Mapping[str, str], column: str) -> float:
    value = float(row[column])
    if not math.isfinite(value):
        raise ValueError(f"{column} is {row[column]}")
    return value


def _count(row: Mapping[str, str], column: str) -> int:
    value = _number(row, column)
    if value < 1 or value != int(value):
        raise ValueError(f"{column} is {row[column]}, a whole number from 1 is needed")
    return int(value)


def _times(row: Mapping[str, str]) -> Times:
    step_s, sync_s = _number(row, "step_time"), _number(row, "sync_time")
    if not step_s > 0 or not 0 <= sync_s <= step_s:
        raise ValueError(f"step_time {step_s}, sync_time {sync_s}: 0 <= sync_time <= step_time is needed")
    return step_s, sync_s


def _placement_row(row: Mapping[str, str]) -> tuple[str, int, Times]:
    placement = row["placement"].strip()
    if not placement.isdecimal() or "0" in placement:
        raise ValueError(f"placement is {placement!r}, one digit from 1 a node is needed")
    return placement, _count(row, "local_bsz"), _times(row)


def _scalability_row(row: Mapping[str, str]) -> tuple[int, int, int, Times]:
    return _count(row, "num_nodes"), _count(row, "num_replicas"), _count(row, "local_bsz"), _times(row)


def _epoch_row(row: Mapping[str, str]) -> EpochStats:
    stats = EpochStats(*(_number(row, column) for column in ("progress", "iteration", "grad_sqr", "grad_var")))
    if min(stats.progress, stats.iteration) <= 0:
        raise ValueError(f"progress {stats.progress}, iteration {stats.iteration}: both must be positive")
    if min(stats.grad_sqr, stats.grad_var) < 0 or stats.grad_sqr + stats.grad_var == 0:
        raise ValueError(f"grad_sqr {stats.grad_sqr}, grad_var {stats.grad_var}: neither negative, nor both 0")
    return stats
