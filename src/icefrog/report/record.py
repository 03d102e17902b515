"""One run, as the event log tells it: the fold behind every metric, table and plot.

The fold is :class:`icefrog.state.ClusterState` itself, watched by a collector for what the state does not keep: how the
values changed over time. Nothing else is an input, so a report can be made of any log at any time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np

from icefrog import events as ev
from icefrog.profile import FloatArray
from icefrog.spec import ClusterSpec, Target
from icefrog.state import ClusterState, IllegalTransitionError, JobState, Phase
from icefrog.types import GpuId

StepSeries: TypeAlias = tuple[tuple[float, float], ...]
"""(time in s, value from then on), ascending in time."""

Status: TypeAlias = Literal["completed", "target_missed", "failed", "cancelled", "unfinished"]

STATUS: dict[Phase, Status] = {
    Phase.COMPLETED: "completed",
    Phase.TARGET_MISSED: "target_missed",
    Phase.FAILED: "failed",
    Phase.CANCELLED: "cancelled",
}

_EPOCH_S = 3e8
"""Times past this (mid 1979) are since the Unix epoch; no trace lasts nine years."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """An interval in which two jobs were on the same GPU."""

    start_s: float
    end_s: float
    partner: str


@dataclass(frozen=True, slots=True)
class Segment:
    """An interval of one job with a constant number of GPUs and a constant boundary. ``gpus`` is 0 while it waits."""

    start_s: float
    end_s: float
    gpus: float
    frozen_layers: int


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One job's life. Times in seconds from the run's zero; a sharer holds half a GPU."""

    job_id: str
    workload: str
    labels: dict[str, str]
    target: Target | None
    status: Status
    reason: str
    submit_s: float
    start_s: float | None
    finish_s: float | None
    queue_s: float
    """Seconds without a GPU, until it left or the log ends."""
    gpu_s: float
    """GPU-seconds held, until it left or the log ends."""
    restarts: int
    crashes: int
    requested_gpus: int
    """What the user asked for."""
    logged_s: float | None
    """Service time at the requested GPUs by the job log that is replayed; None of a live job."""
    restarted_s: tuple[float, ...]
    """When attempts other than the first were up."""
    reserved_gpu_s: float
    """GPU-seconds kept for attempts other than the first before they were up; a sharer counts half."""
    effective_samples: float
    num_layers: int | None
    """L, if the log says it."""
    gpus: StepSeries
    frozen: StepSeries
    """Frozen layers, from the first start on."""
    metric: StepSeries
    """The validation metric as reported."""
    sharing: tuple[Sharing, ...]
    warnings: tuple[tuple[float, str], ...]
    """What it warned of itself."""
    deaths: tuple[tuple[float, str], ...]
    """When attempts died, and of what."""

    @property
    def jct_s(self) -> float | None:
        """Job completion time: of a job that ran to its end (target reached, or samples used up), else None."""
        if self.finish_s is None or self.status not in ("completed", "target_missed"):
            return None
        return self.finish_s - self.submit_s

    @property
    def time_to_target_s(self) -> float | None:
        """From submission to the first report that met the target; None without a target, or if it never did.

        A job that completed and never reported a metric met its target when it finished.
        """
        if self.target is None:
            return None
        if not self.metric and self.status == "completed":
            return self.jct_s
        return next((t - self.submit_s for t, value in self.metric if self.target.reached(value)), None)

    @property
    def shared_s(self) -> float:
        """Seconds beside a partner."""
        return sum(s.end_s - s.start_s for s in self.sharing)

    def frozen_fraction(self, frozen_layers: float) -> float | None:
        """Share of the layers that ``frozen_layers`` are; None if it takes L, and L is unknown."""
        if frozen_layers == 0:
            return 0.0
        return frozen_layers / self.num_layers if self.num_layers else None

    def segments(self, end_s: float) -> list[Segment]:
        """The job's life cut wherever its GPUs or its boundary changed, waiting included, until it left or ``end_s``."""
        end_s = self.finish_s if self.finish_s is not None else end_s
        cuts = sorted({t for t, _ in (*self.gpus, *self.frozen) if t < end_s} | {self.submit_s, end_s})
        out: list[Segment] = []
        gpus, frozen, i, j = 0.0, 0.0, 0, 0
        for start_s, stop_s in pairwise(cuts):
            while i < len(self.gpus) and self.gpus[i][0] <= start_s:
                gpus, i = self.gpus[i][1], i + 1
            while j < len(self.frozen) and self.frozen[j][0] <= start_s:
                frozen, j = self.frozen[j][1], j + 1
            last = out[-1] if out else None
            if last is not None and last.gpus == gpus and (gpus == 0 or last.frozen_layers == frozen):
                out[-1] = Segment(last.start_s, stop_s, gpus, last.frozen_layers)
            else:
                out.append(Segment(start_s, stop_s, gpus, int(frozen)))
        return out


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run of one policy on one cluster. Jobs are in order of submission."""

    cluster: ClusterSpec
    policy: str
    """As the log names it; empty if no decision was taken."""
    jobs: tuple[JobRecord, ...]
    in_use: StepSeries
    """GPUs held."""
    waiting: StepSeries
    """Jobs that hold no GPU."""
    start_s: float
    """First submission."""
    end_s: float
    """Last finish; the end of the log while a job is unfinished."""
    decisions: int
    origin_s: float
    """What was subtracted from the log's times: 0 in a simulation, the first submission on a live cluster."""
    in_service: StepSeries = ()
    """GPUs in service, from the first change on; before it all are. Empty: no node ever left."""
    node_outages: int = 0
    """How often a node left service, until the end."""

    @property
    def capacity(self) -> StepSeries:
        """GPUs in service from the start to the end."""
        before = [(self.start_s, float(self.cluster.num_gpus))]
        for time_s, gpus in self.in_service:
            if time_s <= self.start_s:
                before = [(self.start_s, gpus)]
            elif time_s < self.end_s:
                before.append((time_s, gpus))
        return tuple(before)

    @property
    def live(self) -> bool:
        """Whether the log's times were Unix time."""
        return self.origin_s != 0.0

    @property
    def unfinished(self) -> int:
        """Jobs that had not left when the log ends."""
        return sum(job.status == "unfinished" for job in self.jobs)


def fold(records: Iterable[ev.AnyRecord], cluster: ClusterSpec, *, live: bool | None = None) -> RunRecord:
    """Fold a log into a run.

    Times of a live log (since the epoch) are counted from the first submission; those of a simulation stay as they are.
    ``live`` None: told by the size of the times.
    Raises :class:`icefrog.state.IllegalTransitionError` on a log that cannot be true.
    """
    folder = Folder(cluster, live=live)
    folder.append(records)
    return folder.run()


class Folder:
    """A fold under way. It is a log to write to (:class:`icefrog.driver.LogWriter`): a run can be folded while it happens.

    Arguments and errors as in :func:`fold`.
    """

    def __init__(self, cluster: ClusterSpec, *, live: bool | None = None) -> None:
        self._state = ClusterState(cluster)
        self._collector = _Collector()
        self._live = live
        self._sizes = cluster.gpus_per_node

    def append(self, records: Iterable[ev.AnyRecord]) -> None:
        """Fold records in, in order."""
        apply, see, state = self._state.apply, self._collector.see, self._state
        for record in records:
            apply(record)
            # A live cluster may have been larger in an earlier life; a simulation's is what its summary says.
            if self._live is False and isinstance(record, ev.Start | ev.Resize | ev.NodeDown | ev.NodeUp):
                self._check(record)
            see(record, state)

    def _check(self, record: ev.Start | ev.Resize | ev.NodeDown | ev.NodeUp) -> None:
        if isinstance(record, ev.NodeDown | ev.NodeUp):
            if record.node >= len(self._sizes):
                label = self._state.cluster.label()
                raise IllegalTransitionError(f"{record.kind} of node {record.node}, which the cluster {label} lacks")
            return
        for gpu in record.gpus:
            if not (0 <= gpu.node < len(self._sizes) and 0 <= gpu.device < self._sizes[gpu.node]):
                label = self._state.cluster.label()
                raise IllegalTransitionError(f"{record.job_id} uses {gpu}, which the cluster {label} lacks")

    def run(self) -> RunRecord:
        """What the records so far tell."""
        return self._collector.run(self._state, self._live)


def area_until(times: FloatArray, values: FloatArray, edges: FloatArray) -> FloatArray:
    """Integral of a step function (``values[i]`` from ``times[i]`` on, 0 before) up to each of ``edges``.

    ``times`` is sorted and not empty; the result has the shape of ``edges``.
    """
    area = np.concatenate(([0.0], np.cumsum(values[:-1] * np.diff(times))))
    at = np.searchsorted(times, edges, side="right") - 1
    return np.where(at >= 0, area[at] + values[at] * (edges - times[at]), 0.0)


@dataclass(slots=True)
class _Trail:
    """What changed over one job's life; times as in the log."""

    gpus: list[tuple[float, float]] = field(default_factory=list)
    frozen: list[tuple[float, float]] = field(default_factory=list)
    metric: list[tuple[float, float]] = field(default_factory=list)
    sharing: list[Sharing] = field(default_factory=list)
    warnings: list[tuple[float, str]] = field(default_factory=list)
    deaths: list[tuple[float, str]] = field(default_factory=list)
    restarted: list[float] = field(default_factory=list)
    reserved_gpu_s: float = 0.0
    asked_s: float = 0.0  # of the last start or resize
    freed_s: float = 0.0  # when it last left its GPUs
    held: tuple[GpuId, ...] = ()
    share: float = 0.0  # GPUs held, a sharer half
    waiting: bool = False
    partner: str | None = None
    partner_since_s: float = 0.0
    num_layers: int | None = None


class _Collector:
    """Compares the state before and after each record, for the one job that the record is about."""

    def __init__(self) -> None:
        self.trails: dict[str, _Trail] = {}
        self.on_gpu: dict[GpuId, list[str]] = {}
        self.in_use: list[tuple[float, float]] = []
        self.waiting: list[tuple[float, float]] = []
        self.in_service: list[tuple[float, float]] = []
        self.outages: list[float] = []  # when a node left
        self.policy = ""
        self.decisions = 0

    def see(self, record: ev.AnyRecord, state: ClusterState) -> None:
        """Take note of what ``record``, just applied, changed."""
        if isinstance(record, ev.ProgressReported):  # most of a log; it changes neither GPUs nor waiting
            self._progress(record, state.jobs[record.job_id], self.trails[record.job_id])
            return
        if isinstance(record, ev.PlanDecided):
            self.policy, self.decisions = record.policy, self.decisions + 1
            return
        if isinstance(record, ev.NodeDown | ev.NodeUp):
            self._node(record, state)
            return
        job_id: str | None = getattr(record, "job_id", None)
        if job_id is None:  # of no job: ticks
            return
        job = state.jobs[job_id]
        trail = self.trails.get(job_id)
        if trail is None:
            trail = self.trails[job_id] = _Trail()
        self._reports(record, job, trail)
        self._held(record.time_s, job, trail)
        waits = job.waiting_since_s is not None
        if waits != trail.waiting:
            trail.waiting = waits
            _step(self.waiting, record.time_s, 1.0 if waits else -1.0)

    def _node(self, record: ev.NodeDown | ev.NodeUp, state: ClusterState) -> None:
        gpus = sum(size for node, size in enumerate(state.cluster.gpus_per_node) if node not in state.down)
        _set(self.in_service, record.time_s, float(gpus))
        if isinstance(record, ev.NodeDown):
            self.outages.append(record.time_s)

    def _progress(self, record: ev.ProgressReported, job: JobState, trail: _Trail) -> None:
        if job.profile is not None:
            trail.num_layers = job.profile.num_layers
        elif by_layer := record.variance or record.signal:
            trail.num_layers = len(by_layer)
        if not trail.frozen or trail.frozen[-1][1] != job.frozen_layers:
            trail.frozen.append((record.time_s, float(job.frozen_layers)))
        if record.metric is not None:
            trail.metric.append((record.time_s, record.metric))

    def _reports(self, record: ev.AnyRecord, job: JobState, trail: _Trail) -> None:
        now_s = record.time_s
        match record:
            case ev.Start() | ev.Resize():
                trail.asked_s = now_s
            case ev.JobStarted():
                self._started(now_s, job, trail)
            case ev.JobStopped():
                trail.freed_s = now_s
            case ev.JobCrashed():
                trail.freed_s = now_s
                trail.deaths.append((now_s, f"attempt {record.attempt} died: {record.reason}"))
            case ev.JobFinished() if record.metric is not None:
                trail.metric.append((now_s, record.metric))
            case ev.JobWarned():
                trail.warnings.append((now_s, record.message))
            case _:
                pass

    def _started(self, now_s: float, job: JobState, trail: _Trail) -> None:
        if job.profile is not None:
            trail.num_layers = job.profile.num_layers
        if not trail.frozen or trail.frozen[-1][1] != job.frozen_layers:
            trail.frozen.append((now_s, float(job.frozen_layers)))
        if job.num_restarts > len(trail.restarted):  # the state does not count the first
            trail.restarted.append(now_s)
            if job.holding is not None:
                kept_s = now_s - max(trail.asked_s, trail.freed_s)
                trail.reserved_gpu_s += kept_s * len(job.holding.gpus) * (0.5 if job.holding.shared else 1.0)

    def _held(self, now_s: float, job: JobState, trail: _Trail) -> None:
        held: tuple[GpuId, ...] = ()
        share = 0.0
        if job.holding is not None:
            held = job.holding.gpus
            share = len(held) * (0.5 if job.holding.shared else 1.0)
        if share != trail.share:
            _step(self.in_use, now_s, share - trail.share)
            _set(trail.gpus, now_s, share)
            trail.share = share
        if held != trail.held:
            touched = {*trail.held, *held}
            for gpu in trail.held:
                self.on_gpu[gpu].remove(job.job_id)
            for gpu in held:
                self.on_gpu.setdefault(gpu, []).append(job.job_id)
            trail.held = held
            for other in {job.job_id, *(j for gpu in touched for j in self.on_gpu[gpu])}:
                self._partner(now_s, other)

    def _partner(self, now_s: float, job_id: str) -> None:
        trail = self.trails[job_id]
        partner = next((j for gpu in trail.held for j in self.on_gpu[gpu] if j != job_id), None)
        if partner != trail.partner:
            if trail.partner is not None and now_s > trail.partner_since_s:
                trail.sharing.append(Sharing(trail.partner_since_s, now_s, trail.partner))
            trail.partner, trail.partner_since_s = partner, now_s

    def run(self, state: ClusterState, live: bool | None) -> RunRecord:
        """The record of what was seen."""
        jobs = list(state.jobs.values())
        first_s = min((job.submit_s for job in jobs), default=0.0)
        origin_s = first_s if (first_s > _EPOCH_S if live is None else live) else 0.0
        ends = [job.finish_s for job in jobs if job.finish_s is not None]
        end_s = max(ends, default=first_s) if not state.active else max(state.now_s, first_s)
        return RunRecord(
            cluster=state.cluster,
            policy=self.policy,
            jobs=tuple(_job_record(job, self.trails[job.job_id], end_s, origin_s) for job in jobs),
            in_use=_shift(self.in_use, origin_s),
            waiting=_shift(self.waiting, origin_s),
            start_s=first_s - origin_s,
            end_s=end_s - origin_s,
            decisions=self.decisions,
            origin_s=origin_s,
            in_service=_shift(self.in_service, origin_s),
            node_outages=sum(time_s <= end_s for time_s in self.outages),
        )


def _job_record(job: JobState, trail: _Trail, end_s: float, origin_s: float) -> JobRecord:
    sharing = list(trail.sharing)
    if trail.partner is not None and end_s > trail.partner_since_s:
        sharing.append(Sharing(trail.partner_since_s, end_s, trail.partner))
    still_waiting_s = end_s - job.waiting_since_s if job.waiting_since_s is not None else 0.0
    return JobRecord(
        job_id=job.job_id,
        workload=job.spec.workload or "",
        labels=dict(job.spec.labels),
        target=job.spec.target,
        status=STATUS.get(job.phase, "unfinished"),
        reason=job.reason,
        submit_s=job.submit_s - origin_s,
        start_s=None if job.first_start_s is None else job.first_start_s - origin_s,
        finish_s=None if job.finish_s is None else job.finish_s - origin_s,
        queue_s=job.queue_s + still_waiting_s,
        gpu_s=job.attained_s(end_s),
        restarts=job.num_restarts,
        crashes=job.num_crashes,
        requested_gpus=job.spec.requested_gpus,
        logged_s=job.oracle_duration_s,
        restarted_s=tuple(t - origin_s for t in trail.restarted),
        reserved_gpu_s=trail.reserved_gpu_s,
        effective_samples=job.effective_samples,
        num_layers=trail.num_layers,
        gpus=_shift(trail.gpus, origin_s),
        frozen=_shift(trail.frozen, origin_s),
        metric=_shift(trail.metric, origin_s),
        sharing=tuple(Sharing(s.start_s - origin_s, s.end_s - origin_s, s.partner) for s in sharing),
        warnings=tuple((t - origin_s, text) for t, text in trail.warnings),
        deaths=tuple((t - origin_s, text) for t, text in trail.deaths),
    )


def _step(series: list[tuple[float, float]], time_s: float, delta: float) -> None:
    _set(series, time_s, (series[-1][1] if series else 0.0) + delta)


def _set(series: list[tuple[float, float]], time_s: float, value: float) -> None:
    """The series has ``value`` from ``time_s`` on; what it had at the same instant before is forgotten."""
    if series and series[-1][0] >= time_s:
        time_s = series[-1][0]
        series.pop()
    if not series or series[-1][1] != value:
        series.append((time_s, value))


def _shift(series: list[tuple[float, float]], origin_s: float) -> StepSeries:
    if origin_s == 0.0:
        return tuple(series)
    return tuple((t - origin_s, value) for t, value in series)
