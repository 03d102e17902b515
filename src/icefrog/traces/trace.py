"""What a trace is: submitted jobs and an account of the rows that were read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One job of a log. ``submit_s`` counts from the trace's own zero (``Trace.start``, if it is known)."""

    job_id: str
    submit_s: float
    num_gpus: int
    duration_s: float  # service time at num_gpus: what the log says it ran, without queueing
    user: str = ""
    vc: str = ""

    @property
    def gpu_s(self) -> float:
        """GPU-seconds: duration x GPUs."""
        return self.duration_s * self.num_gpus


@dataclass(frozen=True, slots=True)
class ReadReport:
    """How many rows were read, kept, and dropped by reason. ``read == kept + sum(dropped)`` always."""

    read: int
    kept: int
    dropped: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.read != self.kept + sum(self.dropped.values()):
            raise AssertionError(f"{self.read} rows read, but {self.kept} kept and {dict(self.dropped)} dropped")

    def drop(self, reason: str, count: int) -> ReadReport:
        """The report after ``count`` more of the kept rows were left out for ``reason``."""
        if count == 0:
            return self
        dropped = {**self.dropped, reason: self.dropped.get(reason, 0) + count}
        return ReadReport(self.read, self.kept - count, dropped)

    def text(self) -> str:
        """One line: ``82,247 rows read, 82,246 kept; dropped: 1 (empty line)``."""
        line = f"{self.read:,} rows read, {self.kept:,} kept"
        reasons = ", ".join(f"{count:,} ({reason})" for reason, count in self.dropped.items())
        return f"{line}; dropped: {reasons}" if reasons else line


@dataclass(frozen=True, slots=True)
class Trace:
    """Jobs in order of submission. ``start``: local time (naive) of 0 s; None: relative times only."""

    jobs: tuple[TraceJob, ...]
    report: ReadReport
    source: str
    start: datetime | None = None

    def __len__(self) -> int:
        return len(self.jobs)
