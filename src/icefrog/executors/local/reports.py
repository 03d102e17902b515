"""From what a job writes to what the controller is told: reading ``reports.jsonl`` and judging how an attempt ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from icefrog import events as ev
from icefrog.executors.local import files
from icefrog.executors.local.attempts import Attempt
from icefrog.runtime import protocol
from icefrog.spec import JobSpec


@dataclass(slots=True)
class Tail:
    """Reads complete lines as they come; a line that is only half there waits for its other half."""

    path: Path
    offset: int = 0  # bytes read and understood

    def read(self) -> Iterator[tuple[protocol.AnyReport | str, int]]:
        """(report, or the text of a line that is none; offset behind it)."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return
        for line in data.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                return
            self.offset += len(line)
            try:
                yield protocol.decode(line), self.offset
            except ValidationError:
                yield line[:80].decode(errors="replace").strip(), self.offset


@dataclass(slots=True)
class Story:
    """What an attempt's reports add up to."""

    started: protocol.Started | None = None
    checkpoint_samples: float | None = None
    """Effective samples of the checkpoint that a next attempt would resume from."""
    stopped: protocol.StoppedReport | None = None
    finished: protocol.Finished | None = None
    metric: float | None = None

    def add(self, report: protocol.AnyReport) -> None:
        """Take in one report."""
        match report:
            case protocol.Started():
                self.started = report
                self.checkpoint_samples = report.effective_samples
            case protocol.Checkpointed():
                self.checkpoint_samples = report.effective_samples
            case protocol.Progress():
                self.metric = report.metric if report.metric is not None else self.metric
            case protocol.StoppedReport():
                self.stopped = report
                self.checkpoint_samples = report.effective_samples
            case protocol.Finished():
                self.finished = report
            case protocol.Warned():
                pass


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended."""

    kind: Literal["finished", "stopped", "crashed"]
    time_s: float
    reason: str = ""
    exit_code: int | None = None
    outcome: Literal["completed", "target_missed"] = "completed"
    metric: float | None = None
    effective_samples: float | None = None
    notes: list[str] = field(default_factory=list)

    def event(self, job_id: str, attempt: int, offset: int) -> ev.JobFinished | ev.JobStopped | ev.JobCrashed:
        """The event that says so, as that attempt's."""
        common = {"time_s": self.time_s, "job_id": job_id, "attempt": attempt, "report_offset": offset}
        if self.kind == "finished":
            return ev.JobFinished(
                **common, outcome=self.outcome, metric=self.metric, effective_samples=self.effective_samples
            )
        if self.kind == "stopped":
            return ev.JobStopped(**common, effective_samples=self.effective_samples)
        return ev.JobCrashed(
            **common, reason=self.reason, exit_code=self.exit_code, effective_samples=self.effective_samples
        )


def ending(attempt: Attempt, spec: JobSpec, story: Story, now_s: float) -> Ending:
    """Judge an attempt that is over.

    Its own last word counts first. Without one: exit 0 counts as done (the target, where there is one, is compared with the
    last metric reported), leaving after a request to stop as stopped, anything else as a crash.
    """
    record = files.read_record(attempt.path / "exit.json")
    samples = story.checkpoint_samples
    time_s = now_s if record is None else float(record["time_s"])
    if story.finished is not None:
        done = story.finished
        return Ending("finished", time_s, "", 0, done.outcome, done.metric, done.effective_samples)
    if story.stopped is not None:
        return Ending("stopped", time_s, effective_samples=samples)
    if record is None:
        return Ending("crashed", time_s, "its supervisor was killed", effective_samples=samples)
    if record["problem"] and not record["stop_forwarded"]:
        return Ending("crashed", time_s, record["problem"], effective_samples=samples)
    foreign = story.started is None
    if record["stop_forwarded"] and (foreign or (record["failed_rank"] is None and not record["killed"])):
        return Ending("stopped", time_s, effective_samples=samples)
    if record["killed"]:
        reason = f"did not leave within {spec.stop_grace_s:g} s of being asked to, and was killed"
        return Ending("crashed", time_s, reason, effective_samples=samples)
    if record["failed_rank"] is None:
        return _exited_well(spec, story, time_s)
    rank = record["failed_rank"]
    code = int(record["exit_codes"][rank])
    how = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
    words = attempt.last_words()
    reason = f"rank {rank} {how}" + (f": {words}" if words else "")
    return Ending("crashed", time_s, reason, code, effective_samples=samples)


def _exited_well(spec: JobSpec, story: Story, time_s: float) -> Ending:
    notes = ["exited with 0 without reporting a result; counted as done"]
    outcome: Literal["completed", "target_missed"] = "completed"
    if spec.target is not None and story.metric is not None and not spec.target.reached(story.metric):
        outcome = "target_missed"
    elif spec.target is not None and story.metric is None:
        notes = ["exited with 0 without reporting a metric; counted as done, its target cannot be checked"]
    return Ending("finished", time_s, "", 0, outcome, story.metric, None, notes)


def started_event(spec: JobSpec, attempt: int, report: protocol.Started, offset: int) -> ev.JobStarted:
    """The attempt is up, as its runtime says."""
    return ev.JobStarted(
        time_s=report.time_s,
        job_id=spec.job_id,
        attempt=attempt,
        report_offset=offset,
        total_samples=_total(spec, report),
        profile=report.profile,
    )


def progress_event(
    spec: JobSpec, attempt: int, report: protocol.Progress | protocol.Started, offset: int
) -> ev.ProgressReported:
    """One interval is over. A first report after the job was counted as started says the same."""
    common = {"time_s": report.time_s, "job_id": spec.job_id, "attempt": attempt, "report_offset": offset}
    if isinstance(report, protocol.Started):
        return ev.ProgressReported(
            **common,
            epoch=report.epoch,
            effective_samples=report.effective_samples,
            total_samples=_total(spec, report),
            frozen_layers=report.frozen_layers,
            reason="first report",
            profile=report.profile,
        )
    remaining = report.remaining_samples
    return ev.ProgressReported(
        **common,
        epoch=report.epoch,
        effective_samples=report.effective_samples,
        total_samples=None if remaining is None else report.effective_samples + remaining,
        metric=report.metric,
        frozen_layers=report.frozen_layers,
        psi=report.psi,
        throughput=report.throughput,
        mem_bytes=report.mem_bytes,
        util_pct=report.util_pct,
        variance=report.variance,
        sqr_norm=report.sqr_norm,
        reason=report.reason,
        profile=report.profile,
    )


def _total(spec: JobSpec, report: protocol.Started) -> float | None:
    return None if report.samples_per_epoch is None else float(spec.max_epochs * report.samples_per_epoch)
