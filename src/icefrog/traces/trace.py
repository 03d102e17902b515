"""What a trace is: submitted jobs and an account of the rows that were read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One job of a log. ``submit_s`` counts from the trace's own zero (``Trace.start``, if it is known).

    What a log does not tell is empty or None. Times relative to a submission are seconds after it.
    """

    job_id: str
    submit_s: float
    num_gpus: int
    duration_s: float  # service time at num_gpus: what the log says it ran, without queueing
    user: str = ""
    vc: str = ""  # virtual cluster, partition or account: whoever the GPUs are counted for
    gpu_type: str = ""
    state: str = ""  # how it ended: completed, failed, cancelled, timeout, node_fail, ...
    kind: str = ""  # what the log calls its type: Pretrain, Eval; strict, soft, best; ...
    application: str = ""  # what it trains, as the log names it
    num_replicas: int | None = None  # workers, where the log tells them apart from GPUs
    batch_size: int | None = None  # global batch, samples
    gpu_demand: float | None = None  # GPUs asked for where that is no whole number (half a GPU)
    queue_s: float | None = None  # how long it waited in the log
    time_limit_s: float | None = None  # the limit its user gave
    deadline_s: float | None = None  # after submission; of several, the first
    rewards: tuple[tuple[float, float], ...] = ()  # (seconds after submission, worth if complete by then)

    @property
    def gpu_s(self) -> float:
        """GPU-seconds: duration x GPUs (the fraction, where a fraction was asked for)."""
        return self.duration_s * (self.num_gpus if self.gpu_demand is None else self.gpu_demand)


@dataclass(frozen=True, slots=True)
class ReadReport:
    """How many rows were read, kept, and dropped by reason. ``read == kept + sum(dropped)`` always."""

    read: int
    kept: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    examples: Mapping[str, str] = field(default_factory=dict, compare=False)
    """By reason, the first row that could not be understood: ``line 12, '3x'``."""

    def __post_init__(self) -> None:
        if self.read != self.kept + sum(self.dropped.values()):
            raise AssertionError(f"{self.read} rows read, but {self.kept} kept and {dict(self.dropped)} dropped")

    def drop(self, reason: str, count: int) -> ReadReport:
        """The report after ``count`` more of the kept rows were left out for ``reason``."""
        if count == 0:
            return self
        dropped = {**self.dropped, reason: self.dropped.get(reason, 0) + count}
        return ReadReport(self.read, self.kept - count, dropped, self.examples)

    def text(self) -> str:
        """One line: ``82,247 rows read, 82,246 kept; dropped: 1 (empty line)``."""
        line = f"{self.read:,} rows read, {self.kept:,} kept"
        reasons = ", ".join(f"{count:,} ({self._with_example(reason)})" for reason, count in self.dropped.items())
        return f"{line}; dropped: {reasons}" if reasons else line

    def _with_example(self, reason: str) -> str:
        return f"{reason}, first: {self.examples[reason]}" if reason in self.examples else reason


@dataclass(frozen=True, slots=True)
class Trace:
    """Jobs in order of submission. ``start``: local time (naive) of 0 s; None: relative times only."""

    jobs: tuple[TraceJob, ...]
    report: ReadReport
    source: str
    start: datetime | None = None
    zone: str = ""
    """What ``start`` is local to: an offset as ``+08:00``, or empty where the log does not say."""

    def __len__(self) -> int:
        return len(self.jobs)
