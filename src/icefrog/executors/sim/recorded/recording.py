"""What the event log of a finished live run says of its jobs: how fast they were, what starting and stopping cost them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from icefrog import events as ev
from icefrog.errors import UserError
from icefrog.profile import FloatArray, Profile
from icefrog.spec import JobSpec
from icefrog.types import GpuId


@dataclass(frozen=True, slots=True)
class Interval:
    """From one report of an attempt to its next, under one grant and one boundary: training, validation and saving."""

    grant: ev.Grant
    frozen_layers: int
    samples: float  # processed
    seconds: float

    @property
    def config(self) -> tuple[int, int]:
        """(GPUs, frozen layers)."""
        return self.grant.num_gpus, self.frozen_layers

    def slowed(self, factor: float) -> Interval:
        """As long as ``factor`` of it."""
        return replace(self, seconds=self.seconds * factor)


@dataclass(frozen=True, slots=True)
class Start:
    """One start of an attempt."""

    num_gpus: int
    up_s: float
    """From the command, or from when its GPUs were free, to the job's first sign of life."""
    first: Interval | None
    """Its first interval, in which it is slower; None: it did not get as far as a report."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one report said of the gradients."""

    effective_samples: float
    variance: tuple[float, ...]  # this and the others: empty where it was not told
    sqr_norm: tuple[float, ...]
    signal: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class JobRecording:
    """One job, from its submission to its end. Times in seconds since the run's first submission."""

    spec: JobSpec
    submitted_profile: Profile | None
    submit_s: float
    finish_s: float
    begin_s: float  # first command to start
    needed_samples: float  # effective samples when it ended
    profile: Profile  # as it was last reported; as it was submitted, where it reported none
    intervals: tuple[Interval, ...]  # without the first of each attempt
    starts: tuple[Start, ...]
    stops_s: tuple[float, ...]  # from being asked to leave to having left
    end_s: float  # from the last report to the end
    seen: tuple[Seen, ...]

    @property
    def jct_s(self) -> float:
        """Job completion time."""
        return self.finish_s - self.submit_s

    def warmups_s(self) -> list[tuple[int, float]]:
        """(GPUs, seconds by which the first interval of an attempt exceeded the usual pace) of every start."""
        found = []
        for start in self.starts:
            if (first := start.first) is not None:
                usual_s = self.seconds_per_sample(first.grant.num_gpus, first.frozen_layers) * first.samples
                found.append((start.num_gpus, max(first.seconds - usual_s, 0.0)))
        return found

    def seconds_per_sample(self, num_gpus: int, frozen_layers: int) -> float:
        """Median pace so; at other depths, else on other counts, else of first intervals, where there was nothing better."""
        firsts = [start.first for start in self.starts if start.first is not None]
        usual = list(self.intervals) or firsts
        same = [one for one in usual if one.grant.num_gpus == num_gpus]
        alike = [one for one in same if one.config == (num_gpus, frozen_layers)]
        return float(np.median([one.seconds / one.samples for one in alike or same or usual]))

    def slowed(self, factor: float) -> JobRecording:
        """The same on a machine on which training takes ``factor`` times as long; starting and stopping as it was."""
        starts = [replace(start, first=start.first and start.first.slowed(factor)) for start in self.starts]
        return replace(self, intervals=tuple(one.slowed(factor) for one in self.intervals), starts=tuple(starts))


@dataclass(frozen=True, slots=True)
class Recording:
    """One live run."""

    jobs: Mapping[str, JobRecording]  # in order of submission
    policy: str
    first_round_s: float  # since the first submission; may be below 0

    @property
    def mean_jct_s(self) -> float:
        """Mean job completion time."""
        return float(np.mean([job.jct_s for job in self.jobs.values()]))

    def slowed(self, factor: float) -> Recording:
        """The costs on a machine on which training takes ``factor`` times as long; the jobs' lives stay as they were."""
        return replace(self, jobs={job_id: job.slowed(factor) for job_id, job in self.jobs.items()})

    def slower_than(self, other: Recording) -> float | None:
        """How many times as long a sample took here: median over jobs, GPU counts and depths of both runs; None: none."""
        ratios = []
        for job_id, job in self.jobs.items():
            there = other.jobs[job_id]
            for gpus, depth in {one.config for one in job.intervals} & {one.config for one in there.intervals}:
                ratios.append(job.seconds_per_sample(gpus, depth) / there.seconds_per_sample(gpus, depth))
        return float(np.median(ratios)) if ratios else None


def record(records: Iterable[ev.AnyRecord]) -> Recording:
    """Read a log.

    Raises:
        UserError: a job did not end by itself, died on the way, or reported too little to be measured: nothing can be
            compared with such a run.
    """
    jobs: dict[str, _Job] = {}
    freed: dict[GpuId, float] = {}
    rounds_s: list[float] = []
    policy = ""
    for one in records:
        match one:
            case ev.JobSubmitted():
                jobs[one.job_id] = _Job(one)
            case ev.Tick():
                rounds_s.append(one.time_s)
            case ev.PlanDecided():
                policy = one.policy
            case ev.NodeDown() | ev.NodeUp():
                raise UserError("a node left service during the run", "record one without that")
            case _:
                jobs[one.job_id].take(one, freed)
    if not jobs:
        raise UserError("the log holds no job", "give the home of a finished run")
    origin_s = min(job.submitted.time_s for job in jobs.values())
    return Recording(
        jobs={job_id: job.recording(origin_s) for job_id, job in jobs.items()},
        policy=policy,
        first_round_s=(rounds_s[0] if rounds_s else origin_s) - origin_s,
    )


@dataclass(slots=True)
class _Attempt:
    """The attempt that holds GPUs."""

    number: int
    gpus: tuple[GpuId, ...]
    grant: ev.Grant
    up_s: float
    first: Interval | None = None
    reports: int = 0
    mixed: bool = False  # the present interval is of two grants: it measures neither


@dataclass(slots=True)
class _Job:
    """A job while the log is read."""

    submitted: ev.JobSubmitted
    begin_s: float | None = None
    finish: ev.JobFinished | None = None
    profile: Profile | None = None
    granted: ev.Start | ev.Resize | None = None
    attempt: _Attempt | None = None
    asked_s: float | None = None  # to leave
    since: tuple[float, float] = (0.0, 0.0)  # time and effective samples where the present interval began
    frozen_layers: int = 0
    psi: float = 1.0
    intervals: list[Interval] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    stops_s: list[float] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)

    def take(self, one: ev.JobRecord, freed: dict[GpuId, float]) -> None:
        """One more record of it; ``freed``: when a GPU was last let go."""
        match one:
            case ev.Start() | ev.Resize():
                self.granted = one
                self.begin_s = one.time_s if self.begin_s is None else self.begin_s
                self.asked_s = one.time_s if self.attempt is not None else None
            case ev.Preempt():
                self.asked_s = one.time_s
            case ev.JobStarted() if self.granted is not None:
                free_s = max((freed.get(gpu, 0.0) for gpu in self.granted.gpus), default=0.0)
                up_s = max(one.time_s - max(self.granted.time_s, free_s), 0.0)
                self.attempt = _Attempt(one.attempt, self.granted.gpus, self.granted.grant, up_s)
                self.since = (one.time_s, self.since[1])
                self.profile = one.profile or self.profile
            case ev.Regrant() if self.granted is not None:
                self.granted = self.granted.model_copy(update={"grant": one.grant})
                if self.attempt is not None and self.attempt.number == one.attempt:  # else it is not up yet
                    self.attempt.grant, self.attempt.mixed = one.grant, True
            case ev.ProgressReported() if self.attempt is not None:
                self._reported(one, self.attempt)
            case ev.JobStopped() | ev.JobFinished():
                self._left(one, freed)
            case ev.JobCrashed() | ev.JobFailed() | ev.Stop():
                raise UserError(
                    f"job {one.job_id} did not run to its end ({one.kind})", "record a run in which every job does"
                )

    def _reported(self, one: ev.ProgressReported, attempt: _Attempt) -> None:
        samples = (one.effective_samples - self.since[1]) / self.psi
        if samples <= 0.0 and attempt.reports == 0:  # it took so long to come up that it was counted as started before
            attempt.up_s += one.time_s - self.since[0]
        elif samples > 0.0:
            interval = Interval(attempt.grant, self.frozen_layers, samples, one.time_s - self.since[0])
            if attempt.reports == 0:
                attempt.first = None if attempt.mixed else interval
            elif not attempt.mixed:
                self.intervals.append(interval)
            attempt.reports += 1
        attempt.mixed = False
        self.since = (one.time_s, one.effective_samples)
        self.frozen_layers, self.psi = one.frozen_layers, one.psi
        self.profile = one.profile or self.profile
        if one.variance or one.signal:
            self.seen.append(Seen(one.effective_samples, one.variance or (), one.sqr_norm or (), one.signal or ()))

    def _left(self, one: ev.JobStopped | ev.JobFinished, freed: dict[GpuId, float]) -> None:
        if self.attempt is not None:
            self.starts.append(Start(self.attempt.grant.num_gpus, self.attempt.up_s, self.attempt.first))
            freed.update(dict.fromkeys(self.attempt.gpus, one.time_s))
        if isinstance(one, ev.JobFinished):
            self.finish = one
        else:
            if self.asked_s is not None and self.attempt is not None:
                self.stops_s.append(one.time_s - self.asked_s)
            done = self.since[1] if one.effective_samples is None else one.effective_samples
            self.since = (one.time_s, done)
        self.attempt, self.asked_s = None, None

    def recording(self, origin_s: float) -> JobRecording:
        """What was read, once the log is at its end."""
        job_id = self.submitted.job_id
        if self.finish is None or self.begin_s is None:
            raise UserError(f"job {job_id} is not finished", "let the run come to its end")
        profile = self.profile or self.submitted.profile
        if profile is None or not (self.intervals or any(start.first for start in self.starts)):
            raise UserError(
                f"nobody measured job {job_id}: no profile, or not one interval",
                "record jobs that use the runtime, of several epochs",
            )
        needed = self.finish.effective_samples
        return JobRecording(
            spec=self.submitted.job,
            submitted_profile=self.submitted.profile,
            submit_s=self.submitted.time_s - origin_s,
            finish_s=self.finish.time_s - origin_s,
            begin_s=self.begin_s - origin_s,
            needed_samples=self.since[1] if needed is None else needed,
            profile=profile,
            intervals=tuple(self.intervals),
            starts=tuple(self.starts),
            stops_s=tuple(self.stops_s),
            end_s=max(self.finish.time_s - self.since[0], 0.0),
            seen=tuple(self.seen),
        )


@dataclass(frozen=True, slots=True)
class StartCosts:
    """Medians over starts, by GPU count."""

    by_gpus: Mapping[int, float]

    @classmethod
    def of(cls, found: Sequence[tuple[int, float]]) -> StartCosts:
        """From (GPUs, seconds)."""
        counts = sorted({num_gpus for num_gpus, _ in found})
        return cls({a: float(np.median([seconds for n, seconds in found if n == a])) for a in counts})

    def seconds(self, num_gpus: int) -> float | None:
        """On so many GPUs, or on the nearest count that was seen; None: none was."""
        if not self.by_gpus:
            return None
        return self.by_gpus[min(self.by_gpus, key=lambda count: (abs(count - num_gpus), count))]


@dataclass(frozen=True, slots=True)
class _Course:
    """One statistic over progress, linear between reports; before the first as in it."""

    progress: FloatArray  # (R,), ascending
    rows: FloatArray  # (R, L)

    @classmethod
    def of(cls, found: Sequence[tuple[float, tuple[float, ...]]], num_layers: int) -> _Course:
        """From (progress, values); zeros where there is none."""
        told = [(progress, values) for progress, values in found if values] or [(0.0, (0.0,) * num_layers)]
        return cls(np.array([progress for progress, _ in told]), np.array([values for _, values in told]))

    def at(self, progress: float) -> FloatArray:
        """Shape (L,)."""
        return np.array([np.interp(progress, self.progress, column) for column in self.rows.T])


@dataclass(frozen=True, slots=True)
class RecordedCurves:
    """Gradient statistics over progress (effective samples / those that were needed), as reported.

    One run has one trajectory: what the suffix's variance would have been at another boundary is not known, so the boundary
    makes no difference here.
    """

    variances: _Course
    sqr_norms: _Course
    signals: _Course

    @classmethod
    def of(cls, job: JobRecording) -> RecordedCurves:
        """From what the job reported."""
        at = [(one.effective_samples / job.needed_samples, one) for one in job.seen]
        num_layers = job.profile.num_layers
        return cls(
            _Course.of([(progress, one.variance) for progress, one in at], num_layers),
            _Course.of([(progress, one.sqr_norm) for progress, one in at], num_layers),
            _Course.of([(progress, one.signal) for progress, one in at], num_layers),
        )

    def variance(self, progress: float, frozen_start: float | None = None, frozen_depth: float = 0.0) -> FloatArray:
        """V = S by layer, shape (L,)."""
        return self.variances.at(progress)

    def sqr_norm(self, progress: float) -> FloatArray:
        """|G|^2 by layer, shape (L,)."""
        return self.sqr_norms.at(progress)

    def signal(self, progress: float) -> FloatArray:
        """Shares of G . P G by layer, shape (L,)."""
        return self.signals.at(progress)
