"""The public measurements of the Pollux artifact: reading them, fitting them, and checking the fit on the other half."""

from __future__ import annotations

import csv
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from icefrog.errors import UserError
from icefrog.estimate.fit import NOT_FITTED, FitError, fit_error, fit_params
from icefrog.estimate.fit_vector import ThroughputPoint
from icefrog.profile import ThroughputParams

APPLICATIONS = ("cifar10", "imagenet", "bert", "deepspeech2", "ncf", "yolov3")
GPU_SUFFIXES = {"t4": "", "rtx2080ti": "-rtx", "a100": "-dgx-ext"}
"""GPU type -> suffix of the file names."""
EVEN_BATCHES_ONLY = {"yolov3": 4}
"""Batches that are not a multiple of this are left out of the profiles: they run 1.5-1.9 times slower than their
neighbours (see the evidence), and no job that moves its batch in powers of two uses them."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row of ``placements*.csv``; ``placement`` holds the GPUs of each node, one digit a node."""

    placement: str
    point: ThroughputPoint


@dataclass(frozen=True, slots=True)
class HalfCheck:
    """A fit on half of the placements and half of the batches, and its error elsewhere."""

    num_fitted: int
    params: ThroughputParams
    fitted: FitError
    rest: FitError  # all other points: placement or batch unseen
    both_unseen: FitError  # placement and batch unseen


def read_measurements(data_dir: Path, application: str, gpu_type: str) -> list[Measurement]:
    """Rows of one application on one GPU type, in file order.

    Raises:
        UserError: no such file, or a row that does not parse.
    """
    path = data_dir / "pollux" / application / f"placements{GPU_SUFFIXES[gpu_type]}.csv"
    try:
        with path.open(newline="") as file:
            return [_measurement(row) for row in csv.DictReader(file)]
    except FileNotFoundError as error:
        raise UserError(
            f"{path} not found", "give the folder that holds pollux/<application>/placements.csv"
        ) from error
    except (KeyError, ValueError) as error:
        raise UserError(f"{path}: {error!r}", "expected columns placement,local_bsz,step_time,sync_time") from error


def _measurement(row: dict[str, str]) -> Measurement:
    placement = row["placement"]
    point = ThroughputPoint(
        num_gpus=sum(int(digit) for digit in placement),
        num_nodes=len(placement),
        batch_per_gpu=float(row["local_bsz"]),
        step_s=float(row["step_time"]),
        sync_s=float(row["sync_time"]),
    )
    return Measurement(placement, point)


def halves(rows: Sequence[Measurement]) -> tuple[list[Measurement], list[Measurement], list[Measurement]]:
    """(fitted, rest, both unseen): every second placement and every second batch are fitted, both in sorted order.

    Placements are sorted by nodes, then GPUs, so that both halves span all sizes. ``rest`` is all that is not fitted;
    ``both unseen`` its part with neither the placement nor the batch among the fitted.
    """
    placements = sorted({row.placement for row in rows}, key=lambda name: (len(name), sum(map(int, name)), name))
    batches = sorted({row.point.batch_per_gpu for row in rows})
    even_placements, even_batches = set(placements[::2]), set(batches[::2])
    fitted: list[Measurement] = []
    rest: list[Measurement] = []
    unseen: list[Measurement] = []
    for row in rows:
        seen = (row.placement in even_placements, row.point.batch_per_gpu in even_batches)
        (fitted if all(seen) else rest).append(row)
        if not any(seen):
            unseen.append(row)
    return fitted, rest, unseen


def check_halves(rows: Sequence[Measurement], without: Collection[str] = NOT_FITTED) -> HalfCheck:
    """Fit one half, measure the error on the other; ``without``: terms of the model to leave out, as in ``fit_params``."""
    fitted, rest, unseen = ([row.point for row in part] for part in halves(rows))
    params = fit_params(fitted, without=without)
    return HalfCheck(len(fitted), params, fit_error(params, fitted), fit_error(params, rest), fit_error(params, unseen))


def fit_pollux_profiles(
    data_dir: Path, gpu_types: Sequence[str] = tuple(GPU_SUFFIXES)
) -> dict[str, dict[str, tuple[ThroughputParams, FitError]]]:
    """Application -> GPU type -> (parameters fitted to *all* measured placements, error on those points).

    (yolov3: see ``EVEN_BATCHES_ONLY``.)

    Forward and backward were not measured apart: forward is a third of compute ('modelled'); nothing was measured with
    frozen layers, so that the freezing parameters are the defaults of the model.
    """
    fitted: dict[str, dict[str, tuple[ThroughputParams, FitError]]] = {}
    for application in APPLICATIONS:
        for gpu_type in gpu_types:
            rows = read_measurements(data_dir, application, gpu_type)
            multiple = EVEN_BATCHES_ONLY.get(application, 1)
            points = [row.point for row in rows if row.point.batch_per_gpu % multiple == 0]
            params = fit_params(points)
            fitted.setdefault(application, {})[gpu_type] = (params, fit_error(params, points))
    return fitted
