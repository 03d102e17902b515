"""Everything that can be written to the log: events (what happened), facts (what the controller concluded), commands.

The log is a sequence of these records and the only truth: the state is a fold over it. Records are frozen, carry the time
in seconds (since the epoch for a live cluster, since the trace's start in a simulation), and travel as JSON lines.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, TypeAdapter

from icefrog.gpu_types import ANY_GPU
from icefrog.profile import Profile
from icefrog.spec import JobSpec
from icefrog.types import FreezingRule, GpuId


class Record(BaseModel):
    """Common to all entries of the log."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    time_s: float = Field(allow_inf_nan=False)


class Grant(BaseModel):
    """What the scheduler grants: resources and bounds. Inside them the job's own tuner chooses (m, l)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_gpus: int = Field(ge=1)
    num_nodes: int = Field(default=1, ge=1)
    batch_per_gpu: int = Field(ge=1)
    accum_steps: int = Field(default=1, ge=1)
    min_frozen_layers: int = Field(
        default=0, ge=0, description="a sharer must freeze this deep to fit beside its partner"
    )
    max_frozen_layers: int | None = Field(default=None, ge=0, description="None: the job's own bound")
    freezing: FreezingRule = Field(
        default="tuner", description="the rule by which the job may freeze within these bounds"
    )
    elastic_batch: bool = Field(default=False, description="the job may move its global batch by itself")
    shared: bool = False
    reports: bool = Field(default=True, description="whether anybody reads reports of progress")
    gpu_type: str = Field(default=ANY_GPU, description="the type of the GPUs where the plan named one")

    @property
    def global_batch(self) -> int:
        """M = a * m * k, samples."""
        return self.num_gpus * self.batch_per_gpu * self.accum_steps


# --- events: from users, executors and the driver --------------------------------------------------------------------


class JobSubmitted(Record):
    """A user's job enters the system."""

    kind: Literal["job_submitted"] = "job_submitted"
    job: InstanceOf[JobSpec]  # one that is there was checked when it was made
    profile: InstanceOf[Profile] | None = Field(default=None, description="what its user measured (JobSpec.profile)")

    @property
    def job_id(self) -> str:
        """The job's id."""
        return self.job.job_id


class CancelRequested(Record):
    """A user wants the job gone."""

    kind: Literal["cancel_requested"] = "cancel_requested"
    job_id: str


class AttemptEvent(Record):
    """Something an attempt (one uninterrupted run of a job on fixed GPUs) reports.

    ``report_offset`` is how far the executor had read the attempt's own reports: after a crash of the controller, reading
    goes on from there, so no report is lost or counted twice.
    """

    job_id: str
    attempt: int
    report_offset: int = 0


class JobStarted(AttemptEvent):
    """The attempt holds its GPUs and is about to compute."""

    kind: Literal["job_started"] = "job_started"
    total_samples: float | None = None
    batch_per_gpu: int | None = Field(default=None, ge=1, description="m in force, of a job that moves its batch")
    accum_steps: int | None = Field(default=None, ge=1)
    profile: Profile | None = None


class ProgressReported(AttemptEvent):
    """One tuning interval (an epoch by default) is over; the boundary, profile and statistics as they are now."""

    kind: Literal["progress_reported"] = "progress_reported"
    epoch: int
    effective_samples: float
    total_samples: float | None = None
    metric: float | None = None
    frozen_layers: int = 0
    batch_per_gpu: int | None = Field(default=None, ge=1, description="m in force, of a job that moves its batch")
    accum_steps: int | None = Field(default=None, ge=1)
    psi: float = 1.0
    throughput: float = 0.0
    mem_bytes: float | None = None
    util_pct: float | None = None
    variance: tuple[float, ...] | None = None
    sqr_norm: tuple[float, ...] | None = None
    signal: tuple[float, ...] | None = Field(default=None, description="shares by layer, of a job that goes by them")
    reason: str = ""
    profile: Profile | None = None


class JobWarned(AttemptEvent):
    """The job noticed something its user should know; it goes on."""

    kind: Literal["job_warned"] = "job_warned"
    message: str


class JobStopped(AttemptEvent):
    """The attempt saved a checkpoint and left its GPUs, as it was asked to."""

    kind: Literal["job_stopped"] = "job_stopped"
    effective_samples: float | None = None


class JobCrashed(AttemptEvent):
    """The attempt died. The job goes on from its last checkpoint."""

    kind: Literal["job_crashed"] = "job_crashed"
    reason: str
    cause: Literal["job", "node"] = Field(
        default="job", description="'node': it was lost with its node, no fault of its own"
    )
    exit_code: int | None = None
    effective_samples: float | None = Field(default=None, description="of the checkpoint it will resume from, if known")


class JobFinished(AttemptEvent):
    """The job reached its target, or ran out of samples."""

    kind: Literal["job_finished"] = "job_finished"
    outcome: Literal["completed", "target_missed"]
    metric: float | None = None
    effective_samples: float | None = None


class Tick(Record):
    """A scheduling round is due."""

    kind: Literal["tick"] = "tick"


class NodeDown(Record):
    """A node has left service: it failed, or its owner took it back. Attempts on it report their own end."""

    kind: Literal["node_down"] = "node_down"
    node: int = Field(ge=0, description="index in the cluster's list of single nodes")
    reason: str = ""


class NodeUp(Record):
    """A node is in service again."""

    kind: Literal["node_up"] = "node_up"
    node: int = Field(ge=0, description="index in the cluster's list of single nodes")


# --- facts: concluded by the controller ------------------------------------------------------------------------------


class PlanDecided(Record):
    """A decision was taken. ``reasons``, ``waiting_reason`` and ``memory`` hold only what changed since the last one."""

    kind: Literal["plan_decided"] = "plan_decided"
    policy: str
    gpus_granted: int
    waiting: int
    reasons: dict[str, str] = Field(default_factory=dict)
    waiting_reason: str | None = Field(
        default=None, description="what waiting jobs without a reason of their own are told from now on, in ``reasons``"
    )
    memory: Any = None


class JobFailed(Record):
    """The job is given up: refused, or crashed too often."""

    kind: Literal["job_failed"] = "job_failed"
    job_id: str
    reason: str


# --- commands: to the executor ---------------------------------------------------------------------------------------


class Command(Record):
    """An order to the executor. Obeying it twice is the same as once: it is known by (job, attempt, kind)."""

    job_id: str
    attempt: int
    reason: str = ""

    @property
    def command_id(self) -> str:
        """The idempotency key."""
        return f"{self.job_id}/{self.attempt}/{getattr(self, 'kind', '')}"


class Start(Command):
    """Run a waiting job as this attempt on these GPUs, as soon as they are free."""

    kind: Literal["start"] = "start"
    gpus: tuple[InstanceOf[GpuId], ...]
    grant: Grant


class Resize(Command):
    """Stop the running attempt (attempt - 1) with a checkpoint and go on as this attempt on these GPUs."""

    kind: Literal["resize"] = "resize"
    gpus: tuple[InstanceOf[GpuId], ...]
    grant: Grant


class Regrant(Command):
    """Same GPUs, other bounds (a sharing partner came or went): no restart."""

    kind: Literal["regrant"] = "regrant"
    grant: Grant


class Preempt(Command):
    """Stop the attempt with a checkpoint; the job waits again."""

    kind: Literal["preempt"] = "preempt"


class Stop(Command):
    """End the job for good (cancelled)."""

    kind: Literal["stop"] = "stop"


Event: TypeAlias = (
    JobSubmitted
    | CancelRequested
    | JobStarted
    | ProgressReported
    | JobWarned
    | JobStopped
    | JobCrashed
    | JobFinished
    | Tick
    | NodeDown
    | NodeUp
    | PlanDecided
    | JobFailed
)
AnyCommand: TypeAlias = Start | Resize | Regrant | Preempt | Stop
AnyRecord: TypeAlias = Event | AnyCommand

JobRecord: TypeAlias = (
    CancelRequested
    | JobStarted
    | ProgressReported
    | JobWarned
    | JobStopped
    | JobCrashed
    | JobFinished
    | JobFailed
    | AnyCommand
)
"""What is said of one job that was submitted."""

_CODEC: TypeAdapter[AnyRecord] = TypeAdapter(Annotated[AnyRecord, Field(discriminator="kind")])


def encode(record: AnyRecord) -> str:
    """One line of JSON, without the newline; fields at their defaults are left out."""
    return encode_bytes(record).decode()


def encode_bytes(record: AnyRecord) -> bytes:
    """The same in UTF-8."""
    return record.__pydantic_serializer__.to_json(record, by_alias=True, exclude_none=True)


def decode(line: str | bytes) -> AnyRecord:
    """Inverse of :func:`encode`. Raises ``pydantic.ValidationError`` on anything else."""
    return _CODEC.validate_json(line)
