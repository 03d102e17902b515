"""The catalogue of models: layers, costs, gradient statistics and task of each, with where every number comes from.

Read from files of this package when asked for: ``tasks.yaml`` (by hand), ``catalogue.json`` (counted from the
architectures), ``fitted_pollux.json`` and ``gradient_totals.json`` (fitted to public measurements), ``layer_split.json``,
``signal_split.json`` and ``frozen_worth.json`` (measured at small scale).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from icefrog.errors import UserError
from icefrog.profile import GpuCost, LayerCost, OccupancyParams, Profile, ThroughputParams
from icefrog.spec import Target
from icefrog.workloads import modelled
from icefrog.workloads.classes import CLASSES, GpuTimeClass
from icefrog.workloads.gradients import GradientCurves, load_split, load_totals, own_totals
from icefrog.workloads.worth import FrozenWorth

GPU_TYPE = "a100"
"""What every profile is for: the nearest to the paper's A800 that public measurements exist of."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Range(_Frozen):
    """From ``min`` to ``max``, both included."""

    min: int = Field(ge=1)
    max: int = Field(ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) is larger than max ({self.max})")
        return self


class GpuRange(_Frozen):
    """Counts are multiples of ``unit``, up to ``max``."""

    unit: int = Field(ge=1)
    max: int = Field(ge=1)


class ThroughputSource(_Frozen):
    """Where step times come from: exactly one of ``fitted``, ``points``, ``roofline``."""

    fitted: str | None = None
    points: tuple[tuple[float, float], ...] | None = None
    points_gpu: str | None = None
    roofline: Literal["tf32", "bf16"] | None = None
    sharded: bool = False


class GradientSource(_Frozen):
    """Where gradient statistics come from."""

    totals: str | None
    split: str
    worth: Literal["cnn", "transformer", "finetune"] = "cnn"


class Task(_Frozen):
    """One entry of ``tasks.yaml``."""

    dataset: str
    dataset_samples: int = Field(ge=1)
    classes: dict[GpuTimeClass, float]
    gpus: GpuRange
    batch: Range
    local_batch: Range
    target: Target
    share: bool
    optimizer_bytes: float = Field(ge=0)
    throughput: ThroughputSource
    gradients: GradientSource


@dataclass(frozen=True)
class Provenance:
    """Where the numbers come from; 'modelled' and 'proxy' say that nobody measured this model."""

    layers: str
    throughput: str
    occupancy: str
    gradients: str

    def text(self) -> str:
        """One line."""
        return (
            f"layers: {self.layers}; step time: {self.throughput}; "
            f"occupancy: {self.occupancy}; gradients: {self.gradients}"
        )


@dataclass(frozen=True)
class Workload:
    """One model with its task. ``profile.samples_per_epoch`` is that of the data set."""

    name: str
    task: Task
    profile: Profile
    curves: GradientCurves
    parameters: int
    forward_macs: float  # of one sample
    sample: str
    provenance: Provenance


class Catalogue(Mapping[str, Workload]):
    """Workloads by name, in the order of ``tasks.yaml``; each is put together when first asked for."""

    def __init__(self, files: Mapping[str, Any], profiles: Mapping[str, Profile] | None = None) -> None:
        self._files = files
        self._profiles = profiles or {}
        self._built: dict[str, Workload] = {}
        self._typed: dict[str, Profile] = {}

    @cached_property
    def tasks(self) -> Mapping[str, Task]:
        """Tasks by name."""
        return MappingProxyType({n: Task.model_validate(raw) for n, raw in self._files["tasks"].items()})

    def __getitem__(self, name: str) -> Workload:
        if name not in self._built:
            if name not in self.tasks:
                raise KeyError(name)
            built = _build(name, self.tasks[name], self._files)
            self._built[name] = replace(built, profile=self._profiles.get(name, built.profile))
        return self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)

    def require(self, name: str) -> Workload:
        """Like ``[name]``.

        Raises:
            UserError: no such workload.
        """
        if name not in self.tasks:
            raise UserError(f"unknown workload {name!r}, allowed: {', '.join(self)}", "`icefrog workloads` lists them")
        return self[name]

    def typed_profile(self, name: str) -> Profile:
        """The workload's profile with what it costs on every measured GPU type.

        Raises:
            UserError: no such workload.
        """
        if name in self._profiles:
            return self[name].profile
        if name not in self._typed:
            workload = self.require(name)
            costs = _costs_by_type(workload, self._files)
            self._typed[name] = workload.profile.model_copy(update={"by_gpu_type": costs})
        return self._typed[name]

    def with_profiles(self, profiles: Mapping[str, Profile]) -> Catalogue:
        """The same tasks, some of them with another cost: measured by ``icefrog profile``, say.

        Raises:
            UserError: no such workload, or one with another number of layers: its gradient statistics are by layer.
        """
        for name, profile in profiles.items():
            known = self.require(name).profile.num_layers
            if profile.num_layers != known:
                raise UserError(
                    f"the profile {profile.name} has {profile.num_layers} layers, the workload {name} has {known}",
                    "measure the same architecture, with layers=[...] as `icefrog workloads` counts them",
                )
        return Catalogue(self._files, {**self._profiles, **profiles})

    def of_class(self, kind: GpuTimeClass) -> tuple[tuple[str, float], ...]:
        """(name, weight) of the tasks of one class."""
        return tuple((name, task.classes[kind]) for name, task in self.tasks.items() if kind in task.classes)


def load_catalogue() -> Catalogue:
    """The catalogue that comes with the package."""
    root = resources.files("icefrog.workloads")
    names = ("catalogue", "fitted_pollux", "gradient_totals", "layer_split", "signal_split", "frozen_worth")
    files = {name: json.loads((root / f"{name}.json").read_text(encoding="utf-8")) for name in names}
    files["tasks"] = yaml.safe_load((root / "tasks.yaml").read_text(encoding="utf-8"))
    return Catalogue(files)


def workload_rows() -> list[dict[str, str | int]]:
    """One row a workload for a listing."""
    catalogue = load_catalogue()
    return [_listing_row(catalogue[name]) for name in catalogue]


def _listing_row(workload: Workload) -> dict[str, str | int]:
    task, profile = workload.task, workload.profile
    return {
        "name": workload.name,
        "dataset": task.dataset,
        "class": "/".join(kind for kind in CLASSES if kind in task.classes),
        "layers": profile.num_layers,
        "parameters": f"{workload.parameters / 1e6:.1f} M",
        "forward": f"{workload.forward_macs / 1e9:.2f} GMACs",
        "gpus": f"{task.gpus.unit}..{task.gpus.max}",
        "batch": f"{task.batch.min}..{task.batch.max}",
        "step time": workload.provenance.throughput,
        "gradients": workload.provenance.gradients,
    }


def _build(name: str, task: Task, files: Mapping[str, Any]) -> Workload:
    counted = files["catalogue"]["models"][name]
    layers = counted["layers"]
    params, throughput_source = _throughput(task, counted, files)
    provenance = Provenance(
        layers=f"counted from {counted['source']}",
        throughput=throughput_source,
        occupancy="modelled from counted bytes and FLOPs",
        gradients=_gradient_source(task),
    )
    profile = Profile(
        name=name,
        layers=tuple(LayerCost(name=x["name"], flops=x["flops"], param_bytes=x["param_bytes"]) for x in layers),
        throughput=params,
        occupancy=_occupancy(task, counted, params),
        samples_per_epoch=task.dataset_samples,
        min_local_batch=task.local_batch.min,
        max_local_batch=task.local_batch.max,
        gpu_type=GPU_TYPE,
        provenance=provenance.text(),
    )
    return Workload(
        name=name,
        task=task,
        profile=profile,
        curves=_curves(task, layers, files, provenance.gradients),
        parameters=counted["parameters"],
        forward_macs=counted["forward_macs"],
        sample=counted["sample"],
        provenance=provenance,
    )


def _costs_by_type(workload: Workload, files: Mapping[str, Any]) -> dict[str, GpuCost]:
    """Fitted where the application was measured on the type, else the A100's, scaled as the fitted ones differ (median)."""
    applications = files["fitted_pollux"]["applications"]
    counted, task = files["catalogue"]["models"][workload.name], workload.task
    costs: dict[str, GpuCost] = {}
    for gpu_type in sorted({t for fits in applications.values() for t in fits} - {GPU_TYPE}):
        if task.throughput.fitted is not None:
            fit = applications[task.throughput.fitted][gpu_type]["throughput"]
            params = modelled.with_freezing(ThroughputParams.model_validate(fit))
        else:
            ratios = modelled.compute_ratios(applications, gpu_type, GPU_TYPE)
            params = modelled.with_compute_scaled(workload.profile.throughput, *ratios)
        util_pct = _occupancy(task, counted, params).util_pct
        costs[gpu_type] = GpuCost(throughput=params, util_pct=util_pct)
    return costs


def _occupancy(task: Task, counted: Mapping[str, Any], params: ThroughputParams) -> OccupancyParams:
    return modelled.occupancy(
        counted["layers"],
        params,
        _powers(task.local_batch),
        dtype_bytes=counted["param_dtype_bytes"],
        optimizer_bytes=task.optimizer_bytes,
        sharded=task.throughput.sharded,
    )


def _throughput(task: Task, counted: Mapping[str, Any], files: Mapping[str, Any]) -> tuple[ThroughputParams, str]:
    source = task.throughput
    if source.fitted is not None:
        fit = files["fitted_pollux"]["applications"][source.fitted][GPU_TYPE]
        params = modelled.with_freezing(ThroughputParams.model_validate(fit["throughput"]))
        return params, f"fitted to Pollux/Sia {source.fitted} on A100; effect of freezing modelled"
    cost = modelled.Cost(
        flops=sum(x["flops"] for x in counted["layers"]),
        param_bytes=sum(x["param_bytes"] for x in counted["layers"]),
        saved_bytes=sum(x["saved_bytes"] for x in counted["layers"]) * counted["param_dtype_bytes"] / 4,
        num_layers=len(counted["layers"]),
        weighted_modules=counted["weighted_modules"],
    )
    if source.points is not None and source.points_gpu is not None:
        params = modelled.from_points(cost, source.points, source.points_gpu)
        return params, f"modelled: {len(source.points)} published points on {source.points_gpu.upper()}, scaled to A100"
    assert source.roofline is not None
    kind = "sharded" if source.sharded else "replicated"
    return modelled.roofline(
        cost, source.roofline, sharded=source.sharded
    ), f"modelled: {source.roofline} roofline, {kind}"


def _gradient_source(task: Task) -> str:
    split = f"layer split: small {task.gradients.split} (proxy)"
    if task.gradients.totals is None:
        return f"totals and {split}"
    return f"totals: Pollux {task.gradients.totals}; {split}"


def _curves(
    task: Task, layers: Sequence[Mapping[str, Any]], files: Mapping[str, Any], provenance: str
) -> GradientCurves:
    family = files["layer_split"]["families"][task.gradients.split]
    if task.gradients.totals is None:
        totals = own_totals(family)
    else:
        totals = load_totals(files["gradient_totals"]["applications"][task.gradients.totals])
    weights = np.array([layer["param_bytes"] for layer in layers], dtype=np.float64)
    return GradientCurves(
        totals,
        load_split(family),
        provenance,
        weights / weights.sum(),
        np.array(files["signal_split"]["families"][task.gradients.split]["signal_share"]),
        FrozenWorth.of(files["frozen_worth"]["kinds"][task.gradients.worth]),
    )


def _powers(span: Range) -> list[int]:
    values = [span.min]
    while values[-1] * 2 <= span.max:
        values.append(values[-1] * 2)
    return values
