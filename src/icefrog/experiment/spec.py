"""What an experiment file says: the typed form of the YAML. ``docs/experiments.md`` explains it with examples.

Every setting takes one value or a list; lists multiply. Nothing here runs anything or knows what a policy is.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from icefrog.executors.sim.failures import Outages
from icefrog.executors.sim.truth import WorldConfig
from icefrog.simulate import SimSettings
from icefrog.spec import Count, Number, Text
from icefrog.specfile import FileKind, YamlFile, read_yaml

Value: TypeAlias = float | int | bool | str
"""A setting's value."""

RUN_SETTINGS = ("round_s", "restart_s")
"""Settings of the run that policies know, too."""
OUTAGE_SETTINGS = ("node_mtbf_h", "node_repair_h")
"""Failing nodes (:class:`icefrog.executors.sim.failures.Outages`); a mean time between failures of 0: they do not fail."""


def world_settings() -> tuple[str, ...]:
    """Every setting of ``world:``, the world's own (those that are numbers) and those of the run."""
    return tuple(default_settings())


def default_settings() -> dict[str, float]:
    """What every setting is where nothing is said."""
    run, outages = SimSettings(), Outages()
    numbers = {field.name: field.default for field in fields(WorldConfig) if isinstance(field.default, int | float)}
    return {
        **{name: float(getattr(run, name)) for name in RUN_SETTINGS},
        **{name: float(value) for name, value in numbers.items() if name not in ("seed", *RUN_SETTINGS)},
        **dict(zip(OUTAGE_SETTINGS, (outages.node_mtbf_h or 0.0, outages.node_repair_h), strict=True)),
    }


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else (value,)


def _known(name: str) -> str:
    if name not in world_settings():
        close = difflib.get_close_matches(name, world_settings(), n=1)
        meant = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"unknown setting; {meant}settings: {', '.join(world_settings())}")
    return name


Nonnegative = Annotated[Number, Field(ge=0, le=1e6)]
Load = Annotated[Number, Field(ge=1e-3, le=1e4)]
Share = Annotated[Number, Field(ge=0, le=1)]
Loads: TypeAlias = Annotated[tuple[Load, ...], BeforeValidator(_listed), Field(min_length=1)]
Shares: TypeAlias = Annotated[tuple[Share, ...], BeforeValidator(_listed), Field(min_length=1)]
Nonnegatives: TypeAlias = Annotated[tuple[Nonnegative, ...], BeforeValidator(_listed), Field(min_length=1)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TraceEntry(_Frozen):
    """Where jobs come from. In the file also just the source."""

    source: Text = Field(min_length=1, description="FILE or synth:NAME; $VARIABLES are filled in")
    name: Text | None = Field(default=None, description="how tables call it; default: the source's last part")
    format: Text | None = None
    start: datetime | None = Field(default=None, description="only jobs submitted from this local time on")
    hours: Annotated[Number, Field(gt=0)] | None = Field(default=None, description="only jobs within so many hours")
    day_hours: tuple[int, int] | None = Field(
        default=None, description="[3, 7]: from 3 to 7 o'clock of any day, pooled"
    )
    jobs: Count | None = Field(default=None, description="sample so many jobs (times the load)")

    @field_validator("day_hours")
    @classmethod
    def _within_a_day(cls, value: tuple[int, int] | None) -> tuple[int, int] | None:
        if value is not None and not 0 <= value[0] < value[1] <= 24:
            raise ValueError("two hours of the day are needed, the first before the second")
        return value

    @property
    def path(self) -> str:
        """The source with variables filled in."""
        return os.path.expandvars(self.source)

    @property
    def label(self) -> str:
        """How tables call it."""
        return self.name or Path(self.source).name.removeprefix("synth:")


class VariantEntry(_Frozen):
    """A policy with options. In the file also just the policy's name. A list as an option's value makes one variant each."""

    policy: Text = Field(min_length=1)
    name: Text | None = Field(default=None, description="how tables call it; default: the policy and what is set")
    set: dict[str, Annotated[tuple[Value, ...], BeforeValidator(_listed), Field(min_length=1)]] = Field(
        default_factory=dict, description="options of the policy"
    )


class WorkloadEntry(_Frozen):
    """What is done to the jobs before they are replayed."""

    restrict_freezing: Shares = Field(default=(0.0,), description="share of the jobs with a restricted freezing range")
    restricted_max_fraction: Share = Field(default=0.3, description="the largest share of layers those let be frozen")


class ExperimentSpec(_Frozen):
    """An experiment: every variant on every trace, seed, and combination of settings, the same jobs for all variants."""

    name: Text | None = Field(default=None, description="default: the file's name")
    about: str = ""
    traces: Annotated[tuple[TraceEntry, ...], BeforeValidator(_listed), Field(min_length=1)]
    clusters: Annotated[tuple[Text, ...], BeforeValidator(_listed), Field(min_length=1)] = Field(alias="cluster")
    policies: Annotated[tuple[VariantEntry, ...], BeforeValidator(_listed), Field(min_length=1)]
    base: Text | None = Field(default=None, description="the variant others are compared with; default: the first")
    loads: Loads = Field(default=(1.0,), alias="load")
    scales: Annotated[tuple[Count, ...], BeforeValidator(_listed), Field(min_length=1)] = Field(
        default=(1,), alias="scale", description="multiplies the nodes of the cluster and the load"
    )
    seeds: Annotated[tuple[Annotated[int, Field(ge=0, strict=True)], ...], Field(min_length=1)] = (0,)
    world: dict[Annotated[str, AfterValidator(_known)], Nonnegatives] = Field(default_factory=dict)
    workload: WorkloadEntry = WorkloadEntry()

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, data: Any) -> Any:
        """``synth:philly-120`` for ``{source: ...}``, ``fifo`` for ``{policy: ...}``, ``8`` for the seeds 0 to 7."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        for key, field in (("traces", "source"), ("policies", "policy")):
            if key in data:
                data[key] = [{field: item} if isinstance(item, str) else item for item in _listed(data[key])]
        count = data.get("seeds")
        if isinstance(count, int) and not isinstance(count, bool) and 1 <= count <= 10_000:
            data["seeds"] = list(range(count))
        return data

    @field_validator("traces", "clusters", "loads", "scales", "seeds")
    @classmethod
    def _different(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if any(value in values[:i] for i, value in enumerate(values)):
            raise ValueError("an entry is given twice")
        return values


_FORMS: Mapping[str, str] = {
    "name": "a text",
    "about": "a text",
    "traces": "a list of FILE, synth:NAME or {source: ..., name, format, start, hours, day_hours, jobs}",
    "source": "FILE or synth:NAME",
    "start": "an ISO local time, e.g. 2017-10-03T03:00",
    "hours": "a number above 0",
    "day_hours": "two hours of the day, e.g. [3, 7]",
    "jobs": "a whole number from 1",
    "cluster": "12x4, 12x4:TYPE, a cluster file, or a list of them",
    "policies": "a list of policy names or {policy: NAME, name: TEXT, set: {option: value or list}}",
    "policy": "the name of a policy; `icefrog policies` lists them",
    "set": "a mapping of the policy's options to a value or a list of values",
    "base": "the name of one of the variants",
    "load": "a number from 0.001 to 10000, or a list of them",
    "scale": "a whole number from 1, or a list of them",
    "seeds": "a whole number N (seeds 0 to N-1), or a list of different whole numbers from 0",
    "world": f"a mapping of settings to a number (or a list) from 0: {', '.join(world_settings())}",
    "restrict_freezing": "a number from 0 to 1, or a list of them",
    "restricted_max_fraction": "a number from 0 to 1",
}

EXPERIMENT = FileKind(
    name="experiment", example="traces: [synth:philly-120] / cluster: 12x4 / policies: [fifo, icefrog]", forms=_FORMS
)


def read_experiment(path: Path) -> YamlFile[ExperimentSpec]:
    """Read an experiment file. Raises :class:`icefrog.errors.UserError` with file, line and key."""
    return read_yaml(path, ExperimentSpec, EXPERIMENT)
