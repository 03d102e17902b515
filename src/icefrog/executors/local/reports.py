"""From what a job writes to what the controller is told: reading ``reports.jsonl`` and judging how an attempt ended."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from icefrog import events as ev
from icefrog.executors.local import files
from icefrog.executors.local.attempts import Attempt
from icefrog.executors.local.text import plain
from icefrog.runtime import protocol
from icefrog.spec import JobSpec

_MAX_READ_BYTES = 1 << 24  # at a time; a line as long as this is none


@dataclass(slots=True)
class Tail:
    """Reads complete lines as they come; a line that is only half there waits for its other half."""

    path: Path
    offset: int = 0  # bytes read and understood

    def read(self) -> Iterator[tuple[protocol.AnyReport | str, int]]:
        """(report, or the text of a line that is none; offset behind it)."""
        try:
            with files.open_regular(self.path) as file:
                file.seek(self.offset)
                data = file.read(_MAX_READ_BYTES)
        except OSError:  # not there, or not a file
            return
        *lines, rest = data.split(b"\n")
        if not lines and len(rest) == _MAX_READ_BYTES:
            self.offset += len(rest)
            yield plain(rest[:80].decode(errors="replace")), self.offset
        for line in lines:
            self.offset += len(line) + 1
            try:
                report = protocol.decode(line)
            except ValidationError:
                yield plain(line[:80].decode(errors="replace")), self.offset
            else:
                problem = nonsense(report)
                yield f"{problem} in a report of kind {report.kind}" if problem else report, self.offset


def nonsense(report: protocol.AnyReport) -> str:
    """What is wrong with a report that has the right form: numbers that no job can have; empty if nothing is."""
    numbers = report.model_dump(include={"effective_samples", "remaining_samples", "psi", "throughput", "epoch"})
    for name, value in numbers.items():
        if value is not None and not 0 <= value < 1e18:
            return f"{name} {value!r:.40}"
    if isinstance(report, protocol.Started) and not 0 <= (report.samples_per_epoch or 0) < 1e15:
        return f"samples_per_epoch {report.samples_per_epoch!r:.40}"
    if isinstance(report, protocol.Bounded) and not 0 <= report.frozen_layers <= 1e6:
        return f"frozen_layers {report.frozen_layers!r:.40}"
    if isinstance(report, protocol.Started | protocol.Progress):
        depth = math.inf if report.profile is None else report.profile.num_layers
        if not 0 <= report.frozen_layers <= min(depth, 1e6):
            return f"frozen_layers {report.frozen_layers!r:.40}"
    if isinstance(report, protocol.Progress):
        given = [values for values in (report.variance, report.sqr_norm, report.signal) if values is not None]
        if any(not 0 <= value < math.inf for values in given for value in values):
            return "statistics that are not numbers from 0 on"
        lengths = {len(values) for values in given} | ({report.profile.num_layers} if report.profile else set())
        if given and len(lengths) > 1:
            return "statistics of another length than its layers"
    return ""


@dataclass(slots=True)
class Story:
    """What an attempt's reports add up to."""

    started: protocol.Started | None = None
    checkpoint_samples: float | None = None
    """Effective samples of the checkpoint that a next attempt would resume from."""
    frozen_layers: int = 0
    min_frozen_layers: int = 0
    """Of the grant that it obeyed when it said so."""
    stopped: protocol.StoppedReport | None = None
    finished: protocol.Finished | None = None
    metric: float | None = None

    def add(self, report: protocol.AnyReport) -> None:
        """Take in one report."""
        if isinstance(report, protocol.Started | protocol.Progress | protocol.Bounded):
            self.frozen_layers, self.min_frozen_layers = report.frozen_layers, report.min_frozen_layers
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
            case protocol.Warned() | protocol.Bounded():
                pass

    def obeys(self, told: protocol.Grant, born_with: protocol.Grant | None) -> bool:
        """Whether it freezes as many layers as it was told to, as far as it said; before its first word, as it was born."""
        least = told.min_frozen_layers
        if self.started is None:
            return born_with is not None and born_with.min_frozen_layers >= least
        return min(self.frozen_layers, self.min_frozen_layers) >= least


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

    Its own last word counts first, though not against the target in its specification. Without one: exit 0 counts as done
    (the target, where there is one, is compared with the last metric reported), leaving after a request to stop as
    stopped, anything else as a crash.
    """
    record = attempt.exit_record()
    samples = story.checkpoint_samples
    time_s = now_s if record is None else record.time_s
    if story.finished is not None:
        return _finished(spec, story.finished, None if record is None else record.failure(), time_s)
    if story.stopped is not None:
        return Ending("stopped", time_s, effective_samples=samples)
    if record is None:
        damaged = ", or its exit.json was damaged" if attempt.exit_damaged() else ""
        return Ending("crashed", time_s, f"its supervisor was killed{damaged}", effective_samples=samples)
    if record.problem and not record.stop_forwarded:
        return Ending("crashed", time_s, plain(record.problem), effective_samples=samples)
    foreign = story.started is None
    if record.stop_forwarded and (foreign or (record.failed_rank is None and not record.killed)):
        return Ending("stopped", time_s, effective_samples=samples)
    if record.killed:
        reason = f"did not leave within {spec.stop_grace_s:g} s of being asked to, and was killed"
        return Ending("crashed", time_s, reason, effective_samples=samples)
    failure = record.failure()
    if failure is None:
        return _exited_well(spec, story, time_s)
    words = attempt.last_words()
    reason = _how(failure) + (f": {words}" if words else "")
    return Ending("crashed", time_s, reason, failure[1], effective_samples=samples)


def _how(failure: tuple[int, int]) -> str:
    rank, code = failure
    return f"rank {rank} was killed by signal {-code}" if code < 0 else f"rank {rank} exited with {code}"


def _finished(spec: JobSpec, done: protocol.Finished, failure: tuple[int, int] | None, time_s: float) -> Ending:
    """It says that it is done. That it fails afterwards loses nothing, yet should be known."""
    notes = [] if failure is None else [f"{_how(failure)} after it had reported its result, which counts"]
    outcome = done.outcome
    short = spec.target is not None and done.metric is not None and not spec.target.reached(done.metric)
    if spec.target is not None and short and outcome == "completed":
        outcome = "target_missed"
        notes.append(f"reported as completed with {done.metric:g}, which misses its target {spec.target.value:g}")
    return Ending("finished", time_s, "", 0, outcome, done.metric, done.effective_samples, notes)


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
        batch_per_gpu=report.batch_per_gpu,
        accum_steps=report.accum_steps,
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
            batch_per_gpu=report.batch_per_gpu,
            accum_steps=report.accum_steps,
            reason="first report",
            profile=report.profile,
        )
    return ev.ProgressReported(
        **common,
        epoch=report.epoch,
        effective_samples=report.effective_samples,
        total_samples=_total_seen(spec, report),
        metric=report.metric,
        frozen_layers=report.frozen_layers,
        batch_per_gpu=report.batch_per_gpu,
        accum_steps=report.accum_steps,
        psi=report.psi,
        throughput=report.throughput,
        mem_bytes=report.mem_bytes,
        util_pct=report.util_pct,
        variance=report.variance,
        sqr_norm=report.sqr_norm,
        signal=report.signal,
        reason=plain(report.reason),
        profile=report.profile,
    )


def _total(spec: JobSpec, report: protocol.Started) -> float | None:
    return None if report.samples_per_epoch is None else float(spec.max_epochs * report.samples_per_epoch)


def _total_seen(spec: JobSpec, report: protocol.Progress) -> float | None:
    """P0 as far as a progress report tells it. What remains is never below 0, so at 0 it says nothing of P0."""
    if report.remaining_samples:
        return report.effective_samples + report.remaining_samples
    return None if report.profile is None else float(spec.max_epochs * report.profile.samples_per_epoch)
