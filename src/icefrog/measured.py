"""From measured cells to a profile: what ``icefrog profile`` keeps, fits and writes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from icefrog.errors import UserError
from icefrog.estimate.fit_profile import PointError, ProfileFit, StepPoint, fit_profile
from icefrog.estimate.occupancy import OccupancyPoint, fit_occupancy
from icefrog.profile import (
    ComputeCurve,
    OccupancyParams,
    Parallel,
    Pipelined,
    Profile,
    ThroughputParams,
)
from icefrog.runtime.protocol import Probed, ProbedCell

_UNKNOWN = ThroughputParams(fwd=ComputeCurve(alpha_s=0, beta_s=0), bwd=ComputeCurve(alpha_s=0, beta_s=0))


class Sidecar(BaseModel):
    """The runs that were measured so far, beside the profile's file; a broken-off measurement goes on from here."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_: Literal[1] = Field(default=1, alias="schema")
    of: str = Field(description="digest of all that the cells depend on: script, arguments, depths, device, ...")
    runs: Mapping[str, Probed] = Field(default_factory=dict, description="by 'GPUs x batch per GPU x micro-steps'")

    @classmethod
    def read(cls, path: Path, of: str) -> Sidecar:
        """What was kept of the same measurement; empty where there is none, or only of another.

        Raises:
            UserError: the file is not of this kind.
        """
        try:
            known = cls.model_validate_json(path.read_text())
        except FileNotFoundError:
            return cls(schema=1, of=of)
        except (OSError, UnicodeDecodeError, ValidationError) as error:
            raise UserError(f"{path} does not hold measured cells", "remove it, or choose another --out") from error
        return known if known.of == of else cls(schema=1, of=of)

    def with_run(self, key: str, run: Probed) -> Sidecar:
        """One more."""
        return self.model_copy(update={"runs": {**self.runs, key: run}})

    def write(self, path: Path) -> None:
        """Replace the file in one step."""
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(self.model_dump_json(by_alias=True, indent=1))
        temporary.replace(path)


def digest(script: Path | None, facts: Mapping[str, Any]) -> str:
    """Of the script's text and everything else that a cell depends on."""
    text = script.read_bytes() if script is not None else b""
    return hashlib.sha256(text + repr(sorted(facts.items())).encode()).hexdigest()


def cells_of(runs: Sequence[Probed]) -> list[ProbedCell]:
    """Every configuration once (of two runs with the same one, the later), in order."""
    found = {_place(cell): cell for run in runs for cell in run.cells}
    return [found[place] for place in sorted(found)]


def _place(cell: ProbedCell) -> tuple[int, int, int, int, int]:
    return (cell.num_gpus, cell.num_nodes, cell.batch_per_gpu, cell.accum_steps, cell.frozen_layers)


def fit_runs(name: str, runs: Sequence[Probed], gpu_type: str, samples_per_epoch: int | None = None) -> ProfileFit:
    """The profile that the runs tell, with its errors.

    Args:
        name: of the profile.
        runs: of one script on one kind of device; at least one cell.
        gpu_type: of the device.
        samples_per_epoch: where the script does not say it.

    Raises:
        UserError: the runs are of models with other layers or of several kinds of parallelism, nothing was measured, or
            nobody says how large an epoch is.
    """
    cells = cells_of(runs)
    if not cells:
        raise UserError("no configuration was measured", "see what the runs said")
    first = runs[0]
    if any([layer.name for layer in run.layers] != [layer.name for layer in first.layers] for run in runs):
        raise UserError("the runs trained models with other layers", "let the model not depend on batch or GPUs")
    size = require_epoch(first, samples_per_epoch)
    blank = Profile(
        name=name,
        layers=max(runs, key=lambda run: sum(layer.bwd_s for layer in run.layers) > 0).layers,
        throughput=_UNKNOWN,
        parallel=_kind(runs),
        occupancy=OccupancyParams(mem_bytes=(0, 0, 0, 0), util_pct=(0, 0, 0, 0)),
        samples_per_epoch=size,
        max_local_batch=max(cell.batch_per_gpu for cell in cells),
        gpu_type=gpu_type,
        provenance="",
    )
    fit = fit_profile(blank, [_point(cell) for cell in cells])
    occupancy = fit_occupancy(
        [
            OccupancyPoint(
                batch_per_gpu=cell.batch_per_gpu,
                theta=float(blank.theta[cell.frozen_layers]),
                omega=float(blank.omega[cell.frozen_layers]),
                mem_bytes=cell.mem_bytes,
                util_pct=100.0 if cell.util_pct is None else cell.util_pct,
            )
            for cell in cells
        ]
    )
    profile = fit.profile.model_copy(update={"occupancy": occupancy, "provenance": _provenance(fit, cells)})
    return ProfileFit(profile, fit.errors)


def require_epoch(run: Probed, samples_per_epoch: int | None) -> int:
    """Samples of an epoch, as given or as the run says.

    Raises:
        UserError: nobody says it.
    """
    size = samples_per_epoch or run.samples_per_epoch
    if size is None:
        raise UserError(
            "nobody says how many samples an epoch has",
            "use elastic.sampler(...), pass samples_per_epoch= to LayerElastic, or give --samples-per-epoch",
        )
    return size


def _kind(runs: Sequence[Probed]) -> Parallel:
    """One process alone is of any kind that deals samples. Of pipelines, the split into the most stages is kept."""
    several = [run for run in runs if any(cell.num_gpus > 1 for cell in run.cells)]
    told = [run.parallel for run in several or runs]
    stages = [kind for kind in told if isinstance(kind, Pipelined)]
    if len(stages) == len(told) and all(kind.num_stages == stages[0].num_stages for kind in stages):
        widest = max(stages, key=lambda kind: len(kind.stage_layers or ()))
        return widest.model_copy(update={"micro_batches": max(kind.micro_batches for kind in stages)})
    if any(kind != told[0] for kind in told):
        raise UserError("the runs were parallelised in several ways", "let the script spread its model in one way")
    return told[0]


def _point(cell: ProbedCell) -> StepPoint:
    return StepPoint(
        num_gpus=cell.num_gpus,
        num_nodes=cell.num_nodes,
        batch_per_gpu=cell.batch_per_gpu,
        accum_steps=cell.accum_steps,
        frozen_layers=cell.frozen_layers,
        step_s=cell.step_s,
        fwd_s=cell.fwd_s if cell.fwd_s > 0 else None,
        sync_s=cell.sync_s,
    )


def _provenance(fit: ProfileFit, cells: Sequence[ProbedCell]) -> str:
    text = f"measured by icefrog profile: {len(cells)} configurations"
    unseen = fit.unseen_errors()
    if not unseen.size:
        return text
    return f"{text}; step time of configurations left out: median error {100 * float(np.median(unseen)):.1f} %"


def summary(errors: Sequence[PointError]) -> dict[str, dict[str, float]]:
    """Median, 90th percentile and largest relative error, of the fit and of configurations left out."""
    values = {
        "fitted": [error.fitted_error for error in errors],
        "held_out": [e for error in errors if (e := error.unseen_error) is not None],
    }
    return {
        name: {"median": float(np.median(v)), "p90": float(np.quantile(v, 0.9)), "max": float(np.max(v))}
        for name, v in values.items()
        if v
    }
