"""Job and cluster specifications: the typed form of what users write (parsing with line numbers: ``specfile``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from itertools import accumulate
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from icefrog.copying import copied
from icefrog.gpu_types import ANY_GPU, GPU_TYPES

_RESERVED_ENV = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"})
"""Which rank a process is and which GPUs are its own: what the scheduler decides (and ``ICEFROG_*``)."""

JOB_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,119}$"


def _no_bool(value: object) -> object:
    """YAML's ``yes`` is a bool, which Python would take for the number 1."""
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value


def _plain_text(value: str) -> str:
    """What can be a path, an argument or an environment variable, and can be written to the log."""
    if "\0" in value:
        raise ValueError("holds a NUL character")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no character") from None
    return value


Count = Annotated[int, Field(ge=1, le=1_000_000_000, strict=True)]
"""A whole number from 1 (to a billion): neither a text nor a bool nor 2.0."""
Text = Annotated[str, AfterValidator(_plain_text)]
"""A text without NUL and half characters."""
Number = Annotated[float, BeforeValidator(_no_bool)]
"""A finite number; texts like '8e10' (which YAML does not read as a number) are accepted."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class BatchRule(_Frozen):
    """A fixed global batch, or a range in powers of two from ``min`` to ``max`` (batch elasticity)."""

    global_: Count | None = Field(default=None, alias="global", description="fixed global batch, samples")
    min: Count | None = Field(default=None, description="smallest global batch, samples")
    max: Count | None = Field(default=None, description="largest global batch, samples")

    @model_validator(mode="after")
    def _one_form(self) -> BatchRule:
        fixed, ranged = self.global_ is not None, self.min is not None or self.max is not None
        if fixed == ranged or (ranged and (self.min is None or self.max is None)):
            raise ValueError("give either {global: N} or {min: A, max: B}")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min ({self.min}) is larger than max ({self.max})")
        return self

    @property
    def initial(self) -> int:
        """M0: the batch a job starts with, samples."""
        first = self.global_ if self.global_ is not None else self.min
        assert first is not None
        return first

    def options(self) -> tuple[int, ...]:
        """Every global batch the job may use, ascending: one, or ``min`` times powers of two up to ``max``."""
        if self.min is None or self.max is None:
            return (self.initial,)
        return tuple(self.min << k for k in range(int(math.log2(self.max / self.min)) + 1))


RuleName: TypeAlias = Literal[
    "auto", "progress", "tuner", "none", "linear", "freezeout", "autofreeze", "egeria", "pipetransformer"
]
"""Freezing rules that need no settings; a job's script may bring its own. ``auto``: the one that the policy reckons with."""


class FreezeRule(_Frozen):
    """How deep a prefix the job lets be frozen, and by which rule."""

    max_fraction: Number = Field(default=0.9, ge=0.0, le=1.0, description="largest share of layers frozen")
    rule: RuleName = Field(
        default="auto", description="'auto': the one that the policy reckons with; docs/elastic-training.md"
    )


Mode: TypeAlias = Literal["max", "min"]
"""Whether more of a metric is better, or less."""


class Target(_Frozen):
    """The validation metric that ends the job."""

    metric: str = Field(default="accuracy", min_length=1)
    value: Number
    mode: Mode = "max"

    def reached(self, metric: float) -> bool:
        """Whether ``metric`` is at least as good as the target; NaN never is."""
        return metric >= self.value if self.mode == "max" else metric <= self.value


class JobSpec(_Frozen):
    """One training job, as its user describes it. Immutable; progress lives in ``state``."""

    name: str = Field(pattern=JOB_ID_PATTERN, description="unique among live jobs; also the job's id")
    command: tuple[Text, ...] | None = Field(
        default=None,
        min_length=1,
        description="argv; {max_epochs}, {num_gpus}, {batch}, {checkpoint} are filled in",
    )
    entry: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
        description="package.module:function, called in each rank",
    )
    gpus: tuple[Count, ...] = Field(min_length=1, description="the GPU counts the job accepts, A_k")
    batch: BatchRule
    freeze: FreezeRule = FreezeRule()
    target: Target | None = None
    max_epochs: Count = Field(description="P0 = max_epochs x samples per epoch")
    weight: Number = Field(default=1.0, gt=0)
    deadline_s: Number | None = Field(
        default=None,
        gt=0,
        description="when the job should be done, s after its submission; for deadline-aware policies",
    )
    share: bool = Field(default=False, description="may share one GPU with one other job")
    checkpoint: Text | None = Field(default=None, description="checkpoint folder; default: the job's own folder")
    profile: Text | None = Field(
        default=None, description="a file of `icefrog profile`: what the job costs, until it has measured it itself"
    )
    env: dict[Text, Text] = Field(default_factory=dict)
    cwd: Text | None = Field(
        default=None, description="folder the command runs in; default: where the job is submitted"
    )
    stop_grace_s: Number = Field(
        default=30.0, gt=0, description="time to save a checkpoint and leave when asked to, s; killed after it"
    )

    # Replays only (a trace reader fills these in).
    workload: str | None = Field(default=None, description="a model of the catalogue; simulation only")
    submit_s: float = Field(default=0.0, ge=0, description="submission time in a replay, s")
    num_gpus: int | None = Field(
        default=None, ge=1, description="GPUs the user asked for; default: the largest of gpus"
    )
    duration_s: float | None = Field(
        default=None,
        gt=0,
        description="logged service time at num_gpus, s: only oracle policies and the world read it",
    )
    labels: dict[Text, Text] = Field(default_factory=dict, description="user, VC, ...: carried through to jobs.csv")

    @field_validator("gpus")
    @classmethod
    def _ascending(cls, gpus: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(gpus)) != len(gpus):
            raise ValueError("a GPU count is given twice")
        return tuple(sorted(gpus))

    @field_validator("env")
    @classmethod
    def _not_reserved(cls, env: dict[str, str]) -> dict[str, str]:
        if wrong := [name for name in env if not name or "=" in name]:
            raise ValueError(f"{wrong[0]!r} cannot be the name of a variable")
        if taken := [name for name in env if name in _RESERVED_ENV or name.startswith("ICEFROG_")]:
            raise ValueError(f"the scheduler sets {', '.join(taken)} for each rank")
        return env

    @field_validator("command")
    @classmethod
    def _names_a_program(cls, command: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if command is not None and not command[0].strip():
            raise ValueError("the program has no name")
        return command

    @model_validator(mode="after")
    def _consistent(self) -> JobSpec:
        if sum(x is not None for x in (self.command, self.entry, self.workload)) != 1:
            raise ValueError("give exactly one of command, entry (or workload, in a simulation)")
        if not any(batch % count == 0 for batch in self.batch.options() for count in self.gpus):
            raise ValueError(
                f"no batch of {list(self.batch.options())} can be split over any of gpus {list(self.gpus)}"
            )
        if self.share and 1 not in self.gpus:
            raise ValueError("share: true needs 1 among gpus (only one-GPU jobs share)")
        if self.num_gpus is not None and self.num_gpus not in self.gpus:
            raise ValueError(f"num_gpus ({self.num_gpus}) is not one of gpus {list(self.gpus)}")
        return self

    @property
    def job_id(self) -> str:
        """The job's identity in events and logs."""
        return self.name

    @property
    def requested_gpus(self) -> int:
        """The count that rigid policies (fifo, srtf) give."""
        return self.num_gpus if self.num_gpus is not None else self.gpus[-1]


def without_duration(spec: JobSpec) -> JobSpec:
    """The spec as a scheduler may see it: the logged time is not told."""
    if spec.duration_s is None:
        return spec
    return copied(spec, {**spec.__dict__, "duration_s": None})


class NodeSpec(_Frozen):
    """``count`` equal nodes."""

    gpus: int = Field(ge=1, le=1024, strict=True, description="GPUs a node")
    count: int = Field(default=1, ge=1, le=100_000, strict=True)
    gpu_type: str = ANY_GPU
    gpu_mem_bytes: Number = Field(
        default=80e9, gt=0, description="of one GPU; default: that of the type where it is known, else 8.0e10"
    )

    @model_validator(mode="before")
    @classmethod
    def _memory_of_its_type(cls, data: Any) -> Any:
        if isinstance(data, dict) and "gpu_mem_bytes" not in data and data.get("gpu_type") in GPU_TYPES:
            return {**data, "gpu_mem_bytes": GPU_TYPES[data["gpu_type"]].mem_bytes}
        return data


class ClusterSpec(_Frozen):
    """The nodes of a cluster, in order. Node ``i`` of the flattened list is what placement calls node ``i``."""

    model_config = ConfigDict(ignored_types=(cached_property,))

    nodes: tuple[NodeSpec, ...] = Field(min_length=1, max_length=1000)

    def __copy__(self) -> Self:
        """A copy without cached values: ``model_copy(update=...)`` would otherwise keep those of the old nodes."""
        copied = super().__copy__()
        for name in set(copied.__dict__) - set(type(self).model_fields):
            del copied.__dict__[name]
        return copied

    @cached_property
    def largest_nodes_gpus(self) -> tuple[int, ...]:
        """GPUs of the largest node, of the two largest, and so on."""
        return tuple(accumulate(sorted(self.gpus_per_node, reverse=True)))

    @cached_property
    def gpus_per_node(self) -> tuple[int, ...]:
        """GPUs of every single node."""
        return tuple(group.gpus for group in self.nodes for _ in range(group.count))

    @cached_property
    def node_types(self) -> tuple[str, ...]:
        """GPU type of every single node."""
        return tuple(group.gpu_type for group in self.nodes for _ in range(group.count))

    @cached_property
    def node_mem_bytes(self) -> tuple[float, ...]:
        """Memory of one GPU of every single node."""
        return tuple(group.gpu_mem_bytes for group in self.nodes for _ in range(group.count))

    @cached_property
    def parts(self) -> Mapping[str, ClusterSpec]:
        """By GPU type, the nodes of that type alone; the type with the most GPUs first, equal ones as they are listed."""
        types = dict.fromkeys(group.gpu_type for group in self.nodes)
        if len(types) == 1:
            return {self.nodes[0].gpu_type: ClusterSpec(nodes=self.nodes)}  # not self: == would never end
        parts = {t: ClusterSpec(nodes=tuple(n for n in self.nodes if n.gpu_type == t)) for t in types}
        return dict(sorted(parts.items(), key=lambda part: -part[1].num_gpus))

    @cached_property
    def num_gpus(self) -> int:
        """All GPUs."""
        return sum(group.gpus * group.count for group in self.nodes)

    @cached_property
    def gpu_mem_bytes(self) -> float:
        """Memory of the smallest GPU: what a sharing pair must fit in."""
        return min(group.gpu_mem_bytes for group in self.nodes)

    def label(self) -> str:
        """``12x4`` for equal nodes, ``2x8+4x4`` for unequal ones, ``2x8:a100+4x4:t4`` where types differ."""
        typed = len(self.parts) > 1
        return "+".join(f"{g.count}x{g.gpus}" + (f":{g.gpu_type}" if typed else "") for g in self.nodes)


def job_schema() -> dict[str, Any]:
    """The published JSON schema of a job file."""
    return JobSpec.model_json_schema(by_alias=True)


def cluster_schema() -> dict[str, Any]:
    """The published JSON schema of a cluster file."""
    return ClusterSpec.model_json_schema(by_alias=True)
