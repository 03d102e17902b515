"""The file protocol between an executor and a running job. No torch here: executors import it.

The executor gives each rank an environment (:class:`Grant` as JSON in ``ICEFROG_GRANT``, and the names below) and a folder
per attempt. Rank 0 appends JSON lines to ``reports.jsonl`` in that folder, each with a single write; the executor asks for
a stop by creating a file ``stop`` in it, and changes the bounds of a running job by replacing ``grant.json`` in it.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter

from icefrog.profile import LayerCost, Parallel, Profile
from icefrog.spec import RuleName, Target

ENV_JOB_ID = "ICEFROG_JOB_ID"
ENV_ATTEMPT = "ICEFROG_ATTEMPT"
ENV_ATTEMPT_DIR = "ICEFROG_ATTEMPT_DIR"
ENV_CHECKPOINT_DIR = "ICEFROG_CHECKPOINT_DIR"
ENV_GRANT = "ICEFROG_GRANT"

Outcome: TypeAlias = Literal["completed", "target_missed"]

REPORTS_FILE = "reports.jsonl"
STOP_FILE = "stop"
GRANT_FILE = "grant.json"
PROBE_FILE = "probe.json"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ProbeRequest(_Frozen):
    """What ``icefrog profile`` asks of a run: measure so many typical steps at each depth, write :data:`PROBE_FILE`, leave.

    Such a run decides nothing, saves nothing and has no target.
    """

    steps: int = Field(ge=1)
    depths: tuple[int, ...] | None = Field(default=None, description="None: 0, a quarter, half and three quarters of L")


class Grant(_Frozen):
    """What the scheduler gave this attempt: resources and bounds. Inside them the job's own tuner decides."""

    num_gpus: int = Field(ge=1)
    num_nodes: int = Field(default=1, ge=1)
    batch_per_gpu: int = Field(ge=1)
    accum_steps: int = Field(default=1, ge=1)
    global_batch: int = Field(ge=1)
    min_frozen_layers: int = Field(default=0, ge=0)
    max_frozen_layers: int | None = Field(default=None, ge=0, description="None: max_fraction alone bounds it")
    max_fraction: float = Field(default=0.9, ge=0, le=1)
    rule: RuleName = Field(default="auto", description="the job file's; auto: what the policy reckons with")
    freezing: Literal["none", "tuner", "freezeout", "signal"] = Field(
        default="tuner",
        description="what the scheduler's policy reckons with; freezeout: the job must follow it, whatever its rule; "
        "signal: the rule progress, where the runtime can",
    )
    statistics: bool = Field(default=True, description="whether the scheduler needs the variance of gradients")
    elastic_batch: bool = Field(default=False, description="the job may move its global batch between epochs")
    base_batch: int | None = Field(default=None, ge=1, description="M0, samples; None: the global batch")
    max_global_batch: int | None = Field(default=None, ge=1, description="samples; None: not bounded")
    shared: bool = False
    target: Target | None = None
    max_epochs: int | None = Field(default=None, ge=1)
    parallel: str = Field(default="auto", description="where the script leaves it open: auto, ddp, fsdp, ...")
    probe: ProbeRequest | None = None

    @property
    def asked_rule(self) -> RuleName | None:
        """The rule that job file and policy ask for; None: the runtime's default."""
        if self.rule != "auto":
            return self.rule
        return self.freezing if self.freezing in ("none", "tuner") else None

    @property
    def moves_batch(self) -> bool:
        """Whether the job has a range of batches, and may move within it."""
        return self.elastic_batch and (self.max_global_batch is None or self.max_global_batch != self.base_batch)


class ProbedCell(_Frozen):
    """One configuration as rank 0 measured it: means over the faster half of its steps."""

    num_gpus: int = Field(ge=1)
    num_nodes: int = Field(ge=1)
    batch_per_gpu: int = Field(ge=1)
    accum_steps: int = Field(ge=1)
    frozen_layers: int = Field(ge=0)
    num_steps: int = Field(ge=1)
    step_s: float = Field(gt=0)
    fwd_s: float = Field(ge=0, description="of all micro-steps")
    bwd_s: float = Field(ge=0)
    sync_s: float = Field(ge=0, description="from the last gradient to the update: what backward does not hide")
    mem_bytes: float = Field(gt=0, description="peak of the process (CPU) or of the device")
    util_pct: float | None = Field(
        default=None, ge=0, le=100, description="of the device, or of the core; None: unknown"
    )


class Probed(_Frozen):
    """``probe.json``: what one run measured."""

    schema_: Literal[1] = Field(default=1, alias="schema")
    parallel: Parallel = Field(description="how the model was spread")
    samples_per_epoch: int | None
    layers: tuple[LayerCost, ...]
    cells: tuple[ProbedCell, ...]


def _finite(time_s: float) -> float:
    """A clock that says nothing sensible says 0; readers keep each job's times in order anyway."""
    return time_s if math.isfinite(time_s) else 0.0


class Report(_Frozen):
    """Common to all lines of ``reports.jsonl``."""

    time_s: Annotated[float, AfterValidator(_finite)] = Field(description="seconds since the epoch")


class Started(Report):
    """The job is up, restored if there was a checkpoint, and about to compute."""

    kind: Literal["started"] = "started"
    layers: tuple[str, ...]
    samples_per_epoch: int | None
    epoch: int
    effective_samples: float
    resumed: bool
    frozen_layers: int = 0
    min_frozen_layers: int = Field(default=0, description="of the grant that is obeyed from here on")
    batch_per_gpu: int | None = Field(
        default=None, ge=1, description="in force, of a batch that a checkpoint brought back"
    )
    accum_steps: int | None = Field(default=None, ge=1)
    profile: Profile | None = None


class Progress(Report):
    """One tuning interval is over (an epoch, or ``tune_every_steps`` steps)."""

    kind: Literal["progress"] = "progress"
    epoch: int
    step: int = Field(description="optimizer steps since the job's first start")
    samples: int = Field(description="samples since the job's first start")
    effective_samples: float
    remaining_samples: float | None = Field(description="P: P0 - effective samples; None before P0 is known")
    metric: float | None
    frozen_layers: int
    min_frozen_layers: int = Field(default=0, description="of the grant that is obeyed from here on")
    batch_per_gpu: int | None = Field(default=None, ge=1, description="in force from here on, as frozen_layers")
    accum_steps: int | None = Field(default=None, ge=1)
    psi: float
    throughput: float = Field(description="T, samples/s, measured over the interval's steps")
    step_s: float
    effective_progress: float
    variance: tuple[float, ...] | None = Field(description="S by layer; None while not ready")
    sqr_norm: tuple[float, ...] | None
    signal: tuple[float, ...] | None = Field(
        default=None,
        description="share of first-order progress by layer, from a rule that goes by it; frozen: as it froze",
    )
    mem_bytes: float
    util_pct: float | None
    reason: str
    profile: Profile | None


class Bounded(Report):
    """A grant that was changed is obeyed from the next step on."""

    kind: Literal["bounded"] = "bounded"
    frozen_layers: int = Field(description="in force")
    min_frozen_layers: int = Field(description="of the grant")


class Checkpointed(Report):
    """A checkpoint is safely on disk."""

    kind: Literal["checkpointed"] = "checkpointed"
    path: str
    effective_samples: float
    wait_s: float = Field(default=0.0, description="seconds that training stood still for it")


class Warned(Report):
    """Something the user should know; training goes on."""

    kind: Literal["warning"] = "warning"
    message: str


class StoppedReport(Report):
    """The job saved a checkpoint and leaves, as it was asked to."""

    kind: Literal["stopped"] = "stopped"
    effective_samples: float


class Finished(Report):
    """The target was reached (``completed``; also without a target), or P0 was used up before (``target_missed``)."""

    kind: Literal["finished"] = "finished"
    outcome: Outcome
    metric: float | None
    effective_samples: float


AnyReport: TypeAlias = Started | Progress | Bounded | Checkpointed | Warned | StoppedReport | Finished

_CODEC: TypeAdapter[AnyReport] = TypeAdapter(Annotated[AnyReport, Field(discriminator="kind")])


def encode(report: AnyReport) -> bytes:
    """One line with its newline."""
    return report.model_dump_json(by_alias=True).encode() + b"\n"


def decode(line: str | bytes) -> AnyReport:
    """Inverse of :func:`encode`. Raises ``pydantic.ValidationError`` on anything else."""
    return _CODEC.validate_json(line)
