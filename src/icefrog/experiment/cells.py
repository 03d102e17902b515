"""Cells: the single runs an experiment consists of, and what they are compared by."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from icefrog.errors import UserError
from icefrog.experiment.spec import ExperimentSpec, TraceEntry, Value, VariantEntry, default_settings
from icefrog.policies import make_policy, policy_class
from icefrog.spec import ClusterSpec
from icefrog.specfile import YamlFile, parse_cluster

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy with fixed options."""

    name: str
    policy: str
    options: Mapping[str, Value] = field(default_factory=dict)
    series: str = ""
    """What the variants that one list of options made have in common; else the name."""
    axis: tuple[str, float] | None = None
    """The listed option and its value here, where it is a number."""


@dataclass(frozen=True, slots=True)
class Condition:
    """The settings under which variants are compared. ``axes`` names those that differ between conditions."""

    cluster: ClusterSpec
    load: float = 1.0
    pace: float = 1.0
    world: Mapping[str, float] = field(default_factory=dict)
    restrict_freezing: float = 0.0
    restricted_max_fraction: float = 0.3
    axes: Mapping[str, Value] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What tells it from the others: ``load=2, noise=0.1``; empty if it is the only one."""
        return ", ".join(f"{key}={_plain(value)}" for key, value in self.axes.items())


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation."""

    trace: TraceEntry
    seed: int
    variant: Variant
    condition: Condition

    @property
    def replicate(self) -> tuple[str, int]:
        """Cells of one condition with the same replicate run the same jobs: they are compared in pairs."""
        return self.trace.label, self.seed

    def inputs(self) -> dict[str, Any]:
        """Everything that decides the result, as JSON, but for the trace's content and the program.

        What is set to its default is left out, so that a curve over a setting shares the cell at its default with others.
        """
        here, usual = self.condition, default_settings()
        options = policy_class(self.variant.policy).Options.model_validate(dict(self.variant.options))
        return {
            "schema": SCHEMA,
            "policy": self.variant.policy,
            "options": {
                key: _json(value) for key, value in options.model_dump(mode="json", exclude_defaults=True).items()
            },
            "seed": self.seed,
            "trace": self.trace.model_dump(mode="json", exclude={"name", "source"}),
            "generator": self.trace.source if self.trace.source.startswith("synth:") else None,
            "cluster": here.cluster.model_dump(mode="json"),
            "load": here.load,
            "pace": here.pace,
            "world": {key: value for key, value in sorted(here.world.items()) if value != usual[key]},
            "restrict_freezing": [here.restrict_freezing, here.restricted_max_fraction]
            if here.restrict_freezing
            else None,
        }

    def key(self, program: str, trace: str) -> str:
        """The cell's name among results: a digest of :meth:`inputs`, the program and the trace's content."""
        text = json.dumps([self.inputs(), program, trace], sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def label(self) -> str:
        """For people: ``icefrog, philly-120, seed 3, load=2``."""
        parts = [self.variant.name, self.trace.label, f"seed {self.seed}", self.condition.label]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Experiment:
    """An experiment, expanded and checked."""

    name: str
    about: str
    variants: tuple[Variant, ...]
    base: str
    conditions: tuple[Condition, ...]
    traces: tuple[TraceEntry, ...]
    seeds: tuple[int, ...]

    def cells(self) -> Iterator[Cell]:
        """Every cell: condition by condition, and in it all variants on the same jobs before other jobs follow."""
        for condition, trace, seed, variant in product(self.conditions, self.traces, self.seeds, self.variants):
            yield Cell(trace, seed, variant, condition)


def expand(file: YamlFile[ExperimentSpec]) -> Experiment:
    """Multiply lists out, check policies, options and clusters. Raises :class:`UserError` with file and line."""
    spec = file.model
    variants = _variants(file)
    names = [variant.name for variant in variants]
    if spec.base is not None and spec.base not in names:
        raise UserError(
            f"{file.where('base')}: base: no variant is called {spec.base!r}", f"variants: {', '.join(names)}"
        )
    labels = [trace.label for trace in spec.traces]
    if twice := next((i for i, label in enumerate(labels) if label in labels[:i]), None):
        raise UserError(
            f"{file.where('traces', twice)}: traces.{twice}: a second trace is called {labels[twice]!r}", "add a name:"
        )
    return Experiment(
        name=spec.name or file.path.stem,
        about=spec.about.strip(),
        variants=variants,
        base=spec.base or names[0],
        conditions=_conditions(file),
        traces=spec.traces,
        seeds=spec.seeds,
    )


def _variants(file: YamlFile[ExperimentSpec]) -> tuple[Variant, ...]:
    found: list[Variant] = []
    for i, entry in enumerate(file.model.policies):
        for variant in _expanded(entry):
            try:
                make_policy(variant.policy, variant.options)
            except UserError as error:
                raise UserError(f"{file.where('policies', i)}: policies.{i}: {error.message}", error.hint) from error
            if any(variant.name == other.name for other in found):
                raise UserError(
                    f"{file.where('policies', i)}: policies.{i}: a second variant is called {variant.name!r}",
                    "add a name:",
                )
            found.append(variant)
    return tuple(found)


def _expanded(entry: VariantEntry) -> Iterator[Variant]:
    """One variant for each combination of the listed options."""
    listed = [key for key, values in entry.set.items() if len(values) > 1]
    fixed = ",".join(f"{key}={_plain(values[0])}" for key, values in entry.set.items() if len(values) == 1)
    series = entry.name or (f"{entry.policy}[{fixed}]" if fixed else entry.policy)
    for values in product(*entry.set.values()):
        options = dict(zip(entry.set, values, strict=True))
        if not listed:
            yield Variant(series, entry.policy, options, series)
            continue
        chosen = ",".join(f"{key}={_plain(options[key])}" for key in listed)
        value = options[listed[0]]
        numeric = len(listed) == 1 and isinstance(value, int | float) and not isinstance(value, bool)
        axis = (listed[0], float(value)) if numeric else None
        yield Variant(f"{series}[{chosen}]", entry.policy, options, series, axis)


def _conditions(file: YamlFile[ExperimentSpec]) -> tuple[Condition, ...]:
    spec = file.model
    settings: dict[str, Sequence[Any]] = {
        "cluster": spec.clusters,
        "scale": spec.scales,
        "load": spec.loads,
        **spec.world,
        "restrict_freezing": spec.workload.restrict_freezing,
    }
    parsed = {}
    for text in spec.clusters:
        try:
            parsed[text] = parse_cluster(text)
        except UserError as error:
            message = error.message.removeprefix("--cluster: ")
            raise UserError(f"{file.where('cluster')}: cluster: {message}", error.hint) from error
    found = []
    for values in product(*settings.values()):
        chosen = dict(zip(settings, values, strict=True))
        found.append(
            Condition(
                cluster=scaled(parsed[chosen["cluster"]], chosen["scale"]),
                load=chosen["load"] * chosen["scale"],
                world={key: float(chosen[key]) for key in spec.world},
                restrict_freezing=chosen["restrict_freezing"],
                restricted_max_fraction=spec.workload.restricted_max_fraction,
                axes={key: value for key, value in chosen.items() if len(settings[key]) > 1},
            )
        )
    return tuple(found)


def scaled(cluster: ClusterSpec, times: int) -> ClusterSpec:
    """``times`` as many nodes of each kind."""
    nodes = tuple(node.model_copy(update={"count": node.count * times}) for node in cluster.nodes)
    return ClusterSpec(nodes=nodes)


def _json(value: Any) -> Any:
    """JSON has no infinity, which is an option's value here and there: as a text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Value) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, int | float) else str(value)
