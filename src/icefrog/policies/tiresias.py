"""Tiresias: priority by attained service in space and time, in discrete queues."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator

from icefrog.changes import free_gpus
from icefrog.policies import base
from icefrog.policies.gittins import GittinsIndex
from icefrog.policies.spreading import Spread
from icefrog.types import Candidate, Candidates, Config, GpuId, JobView, Json, Plan, Pricing, Snapshot

PHILLY_SERVICES_GPU_H = (
    0.00778, 0.0125, 0.0147, 0.0164, 0.0175, 0.0183, 0.0192, 0.0203, 0.0219, 0.0281, 0.0414, 0.0547, 0.0739, 0.0953,
    0.139, 0.161, 0.19, 0.23, 0.262, 0.307, 0.354, 0.403, 0.431, 0.489, 0.54, 0.581, 0.654, 0.699, 0.733, 0.78, 0.97,
    1.12, 1.42, 1.6, 2.08, 2.95, 4.45, 10.7, 31.2, 210.0,
)  # fmt: skip
"""GPU-hours of the 82,247 jobs of the Philly log (ATC'19, CC-BY 4.0): 40 quantiles at (i + 1/2) / 40."""

_S_PER_H = 3600.0
_WAITS = "waits: jobs with less attained service, or earlier in its queue, hold the GPUs it needs"


def _numbers(value: object) -> object:
    """``1,4,16`` as the command line gives it."""
    return tuple(part for part in value.split(",") if part.strip()) if isinstance(value, str) else value


Numbers = Annotated[tuple[float, ...], BeforeValidator(_numbers)]


class Tiresias:
    """Jobs run at the GPU count they asked for; those with the least attained service (GPUs x time) first (2D-LAS).

    Service is made discrete: queue i holds the jobs whose attained service is below the i-th threshold. Queues are served in
    order, and within a queue jobs in order of their coming (or, with ``index=gittins``, by falling Gittins index over the
    quantum that is left of the queue: 2D-Gittins, for which the distribution of total service must be known). A job that is
    not reached leaves its GPUs. Starvation: a job that has waited ``promote`` times as long as it ran goes back to the first
    queue, what it attained before being forgiven.

    Placement: ``packed`` keeps a job within a node where it fits in one; ``spread`` takes GPUs from the emptiest nodes, as
    the Pollux artifact's version does.
    """

    name: ClassVar[str] = "tiresias"
    source: ClassVar[str] = "Tiresias (Gu et al., NSDI'19): discretised 2D-LAS, 2D-Gittins"
    oracle: ClassVar[bool] = False
    pricing: ClassVar[Pricing] = Pricing(counts="requested", shares=False, reads_progress=False)

    class Options(base.Options):
        """Knobs of ``tiresias``."""

        thresholds_gpu_h: Numbers = Field(
            default=(16.0,),
            description="GPU-hours at which a job goes on to the next queue, ascending: 16 or 1,4,16",
            min_length=1,
        )
        index: Literal["las", "gittins"] = Field(
            default="las", description="order within a queue: las (arrival), gittins"
        )
        services_gpu_h: Numbers = Field(
            default=PHILLY_SERVICES_GPU_H,
            description="sample of jobs' total GPU-hours, for gittins",
            min_length=1,
        )
        promote: float = Field(
            default=math.inf,
            gt=0,
            description="PROMOTEKNOB: back to the first queue after waiting so many times its run",
        )
        placement: Literal["packed", "spread"] = Field(default="packed", description="where jobs go: packed, spread")

        @field_validator("thresholds_gpu_h", "services_gpu_h")
        @classmethod
        def _positive(cls, values: tuple[float, ...]) -> tuple[float, ...]:
            if not all(0 < value < math.inf for value in values):
                raise ValueError("positive numbers are needed")
            return values

        @field_validator("thresholds_gpu_h")
        @classmethod
        def _ascending(cls, values: tuple[float, ...]) -> tuple[float, ...]:
            if list(values) != sorted(set(values)):
                raise ValueError("ascending numbers are needed")
            return values

    def __init__(self, options: Options) -> None:
        self.options = options
        self._thresholds = tuple(hours * _S_PER_H for hours in options.thresholds_gpu_h)
        self._gittins = GittinsIndex([hours * _S_PER_H for hours in options.services_gpu_h])

    def decide(self, snapshot: Snapshot, candidates: Candidates) -> Plan:
        """Update the queues, then serve them in order."""
        if (same := self._as_before(snapshot)) is not None:
            return same
        queues = _Queues.of(snapshot.memory, len(self._thresholds), snapshot.views.by_id)
        self._promote(queues, snapshot)
        # Of those that run, nobody comes to a threshold before that time.
        due = snapshot.now_s >= _until_s(snapshot.memory)
        self._demote(queues, snapshot, snapshot.jobs if due else snapshot.views.waiting)
        serving = _Serving(lambda among: self._ordered(among, queues, snapshot.now_s), snapshot)
        serving.admit(candidates)
        if self.options.placement == "spread":
            serving.spread()
        else:
            serving.pack(candidates)
        reasons = dict.fromkeys(serving.preempted, _WAITS)
        for job_id in serving.choices:
            reasons[job_id] = f"its turn in queue {queues.level(job_id) + 1} of {len(queues.later) + 1}"
        stands_until_s = self._stands_until_s(snapshot, queues, serving)
        return Plan(
            serving.choices,
            reasons=reasons,
            keeps=True,
            preempted=serving.preempted,
            waiting_reason=_WAITS,
            gpus=serving.gpus,
            memory={**queues.memory(), "until_s": None if math.isinf(stands_until_s) else stands_until_s},
            stands_until_s=stands_until_s,
            content=not serving.preempted and all(job.job_id in serving.choices for job in snapshot.views.waiting),
        )

    def _as_before(self, snapshot: Snapshot) -> Plan | None:
        """Where everybody runs and no job has come to a threshold since the last plan, only to say so."""
        until_s = _until_s(snapshot.memory)
        if snapshot.views.waiting or snapshot.now_s >= until_s:
            return None
        return Plan({}, keeps=True, content=True, waiting_reason=_WAITS, memory=snapshot.memory, stands_until_s=until_s)

    # -- the queues --------------------------------------------------------------------------------------------------------

    def _demote(self, queues: _Queues, snapshot: Snapshot, among: Sequence[JobView]) -> None:
        """Whoever has reached a threshold goes to the end of a later queue; in the order of the queues."""
        now_s = snapshot.now_s
        lowest = self._thresholds[0]
        due: list[tuple[int, JobView]] = []
        for job in among:
            if job.holding_since_s is None and job.attained_gpu_s < lowest:
                continue
            level = bisect_right(self._thresholds, queues.service(job, now_s))
            if level > queues.level(job.job_id):
                due.append((level, job))
        if not due:
            return
        in_order = [job for jobs in queues.jobs(snapshot.jobs) for job in jobs]
        place = {job.job_id: at for at, job in enumerate(in_order)}
        for level, job in sorted(due, key=lambda one: place[one[1].job_id]):
            queues.move(job.job_id, level)

    def _promote(self, queues: _Queues, snapshot: Snapshot) -> None:
        if math.isinf(self.options.promote):
            return
        for jobs in queues.jobs(snapshot.jobs)[1:]:
            for job in jobs:
                if snapshot.now_s >= self._promoted_s(job, queues, snapshot.now_s):
                    queues.forgive(job, snapshot.now_s)

    def _promoted_s(self, job: JobView, queues: _Queues, now_s: float) -> float:
        """When a job of a later queue will have waited too long; infinite while it runs."""
        if job.running or job.waiting_since_s is None:
            return math.inf
        return job.waiting_since_s + self.options.promote * queues.service(job, now_s) / job.spec.requested_gpus

    def _ordered(self, among: Sequence[JobView], queues: _Queues, now_s: float) -> list[JobView]:
        """Some of the jobs, in the order in which they are served."""
        by_queue = enumerate(queues.jobs(among))
        return [job for level, jobs in by_queue for job in self._sorted(level, jobs, queues, now_s)]

    def _sorted(self, level: int, jobs: list[JobView], queues: _Queues, now_s: float) -> list[JobView]:
        if self.options.index == "las":
            return jobs
        end = self._thresholds[level] if level < len(self._thresholds) else math.inf

        def index(job: JobView) -> float:
            service = queues.service(job, now_s)
            return self._gittins(service, end - service)

        return sorted(jobs, key=index, reverse=True)

    def _stands_until_s(self, snapshot: Snapshot, queues: _Queues, serving: _Serving) -> float:
        """Until a running job reaches its next threshold, or a waiting one the end of its patience."""
        if self.options.index == "gittins":
            return 0.0  # indices change all the time
        now_s, times = snapshot.now_s, [math.inf]
        # Looked at in every decision are only those that go on where they are, and not the last queue.
        service = queues.service if queues.forgiven else JobView.attained_service_s
        for threshold, jobs in zip(self._thresholds, queues.before_the_last(snapshot.views.by_id), strict=True):
            going_on = [job for job in jobs if job.running and job.job_id not in serving.leaving]
            times += [now_s + (threshold - service(job, now_s)) / len(job.gpus) for job in going_on]
        next_threshold = dict(enumerate(self._thresholds))
        for job_id in serving.choices:
            threshold = next_threshold.get(queues.level(job_id), math.inf)
            job = snapshot.views.by_id[job_id]
            times.append(now_s + (threshold - service(job, now_s)) / job.spec.requested_gpus)
        if not math.isinf(self.options.promote):
            times += [self._promoted_s(job, queues, now_s) for jobs in queues.jobs(snapshot.jobs)[1:] for job in jobs]
        return min(times)


def _until_s(memory: Json) -> float:
    """Until when, by the last plan, no job that runs changes its queue; -inf: there was none."""
    if not isinstance(memory, dict) or "until_s" not in memory:
        return -math.inf
    return math.inf if memory["until_s"] is None else float(memory["until_s"])


class _Serving:
    """A decision in the making; lists are in the order of the queues.

    Args:
        ordered: puts jobs in the order in which they are served.
        snapshot: of the decision.
    """

    def __init__(self, ordered: Callable[[Sequence[JobView]], list[JobView]], snapshot: Snapshot) -> None:
        self._ordered = ordered
        self._snapshot = snapshot
        self.starting: list[tuple[JobView, Candidate]] = []
        self.free = free_gpus(snapshot)
        self.leaving: dict[str, JobView] = {}  # run, and cannot go on as they are
        self.choices: dict[str, Candidate] = {}
        self.gpus: dict[str, tuple[GpuId, ...]] = {}

    @cached_property
    def order(self) -> list[JobView]:
        """Everybody."""
        return self._ordered(self._snapshot.jobs)

    @cached_property
    def kept(self) -> list[JobView]:
        """Those that go on where they are, as far as is known."""
        return [job for job in self.order if job.running and job.job_id not in self.leaving]

    @cached_property
    def rank(self) -> dict[str, int]:
        """The place of each job in the order."""
        return {job.job_id: at for at, job in enumerate(self.order)}

    def admit(self, candidates: Candidates) -> None:
        """By counts alone: whoever's request fits in what those before leave of the cluster runs."""
        if self._all_fit():  # then the order of those that run matters only where one of them is in the way
            for job in self._ordered(self._snapshot.views.waiting):
                self._admit(job, candidates)
            return
        left = self._snapshot.num_gpus
        for job in self.order:
            wanted = job.spec.requested_gpus
            if job.running and job.as_requested and wanted <= left:
                left -= wanted
                continue
            if job.running:
                self.leaving[job.job_id] = job
            if wanted <= left and self._admit(job, candidates):
                left -= wanted

    def _all_fit(self) -> bool:
        """Whether there are enough GPUs for all that wait, beside those that run as they asked to."""
        views = self._snapshot.views
        wanted = sum([job.spec.requested_gpus for job in views.waiting])
        return not views.unlike_requested and not self._snapshot.down and wanted <= self.free.num_free

    def _admit(self, job: JobView, candidates: Candidates) -> bool:
        candidate = base.exclusive(candidates, job.job_id, job.spec.requested_gpus)
        if candidate is None:
            return False
        self.starting.append((job, candidate))
        return True

    @property
    def preempted(self) -> frozenset[str]:
        """Running jobs that get nothing."""
        return frozenset(self.leaving.keys() - self.choices.keys())

    def spread(self) -> None:
        """Places on the emptiest nodes."""
        if self.starting:
            places = Spread(self._snapshot.node_gpus, [job.gpus for job in self.kept])
            for job, candidate in self.starting:
                self._settle(job, candidate, places.take(candidate.config.num_gpus))

    def pack(self, candidates: Candidates) -> None:
        """Places that lie together. Where there is none, jobs later in the order make room: they move, or leave."""
        if not self.starting:
            return
        free = self.free
        for gpus in {job.gpus for job in self.leaving.values()}:
            free.release(gpus)
        displaced: list[JobView] = []
        for job, candidate in self.starting:
            found = free.find(candidate.config.num_gpus, gpu_type=candidate.config.gpu_type) or self._make_room(
                job, candidate.config, displaced
            )
            if self._settle(job, candidate, found):
                free.hold(self.gpus[job.job_id])
        for job in displaced:
            moved = base.exclusive(candidates, job.job_id, job.num_gpus)
            if moved is None:
                continue
            if self._settle(job, moved, free.find(job.num_gpus, gpu_type=moved.config.gpu_type)):
                free.hold(self.gpus[job.job_id])
        self.leaving |= {job.job_id: job for job in displaced}

    def _settle(self, job: JobView, candidate: Candidate, gpus: tuple[GpuId, ...] | None) -> bool:
        if gpus is None:
            return False
        self.choices[job.job_id], self.gpus[job.job_id] = candidate, gpus
        return True

    def _make_room(self, job: JobView, config: Config, displaced: list[JobView]) -> tuple[GpuId, ...] | None:
        """Let jobs go, the last first, until there is a place; who was not in the way stays."""
        gone: list[JobView] = []
        found: tuple[GpuId, ...] | None = None
        free = self.free
        while found is None and self.kept and self.rank[self.kept[-1].job_id] > self.rank[job.job_id]:
            gone.append(self.kept.pop())
            free.release(gone[-1].gpus)
            found = free.find(config.num_gpus, gpu_type=config.gpu_type)
        wanted = set(found or ())
        for other in reversed(gone):
            if wanted.isdisjoint(other.gpus):
                self.kept.append(other)
                free.hold(other.gpus)
            else:
                displaced.append(other)
        return found


@dataclass(slots=True)
class _Queues:
    """Who stands where. The first queue is implicit: whoever is in no later one, in order of coming."""

    later: list[list[str]]
    """Job ids of the second queue, the third, ..."""
    forgiven: dict[str, tuple[float, float]]
    """Promoted jobs: (when it came back to the first queue, s; service attained before, GPU-seconds)."""
    levels: dict[str, int]

    @classmethod
    def of(cls, memory: Json, num_thresholds: int, known: Mapping[str, JobView]) -> _Queues:
        """From what a plan remembered; of another policy or another number of queues, nothing is known.

        Jobs that are not ``known`` have left the system and are struck out: what is remembered is logged again and again.
        """
        found: Mapping[str, Any] = memory if isinstance(memory, dict) else {}
        later = [[job_id for job_id in queue if job_id in known] for queue in found.get("later", ())]
        if len(later) != num_thresholds:
            later = [[] for _ in range(num_thresholds)]
        entries = found.get("forgiven", {}).items()
        forgiven = {job_id: (float(at), float(past)) for job_id, (at, past) in entries if job_id in known}
        return cls(later, forgiven, {job_id: level for level, queue in enumerate(later, 1) for job_id in queue})

    def memory(self) -> Json:
        """For the plan."""
        return {"later": self.later, "forgiven": {job_id: list(entry) for job_id, entry in self.forgiven.items()}}

    def level(self, job_id: str) -> int:
        """Its queue, from 0."""
        return self.levels.get(job_id, 0)

    def service(self, job: JobView, now_s: float) -> float:
        """Attained service that counts, GPU-seconds."""
        attained = job.attained_service_s(now_s)
        if not self.forgiven:
            return attained
        return attained - self.forgiven[job.job_id][1] if job.job_id in self.forgiven else attained

    def jobs(self, among: Sequence[JobView]) -> list[list[JobView]]:
        """Of some of the jobs, given in order of submission: those of every queue, in order."""
        first = [job for job in among if job.job_id not in self.levels]
        if self.forgiven:
            first.sort(key=lambda job: self.forgiven.get(job.job_id, (job.submit_s,))[0])
        others = {job.job_id: job for job in among if job.job_id in self.levels}
        return [first, *([others[job_id] for job_id in queue if job_id in others] for queue in self.later)]

    def before_the_last(self, known: Mapping[str, JobView]) -> Iterator[list[JobView]]:
        """The jobs of every queue but the last, in no order."""
        for job_ids in (known.keys() - self.levels.keys(), *self.later[:-1]):
            yield [known[job_id] for job_id in job_ids]

    def move(self, job_id: str, level: int) -> None:
        """To the end of a later queue."""
        if job_id in self.levels:
            self.later[self.levels[job_id] - 1].remove(job_id)
        self.later[level - 1].append(job_id)
        self.levels[job_id] = level

    def forgive(self, job: JobView, now_s: float) -> None:
        """Back to the end of the first queue."""
        self.later[self.levels.pop(job.job_id) - 1].remove(job.job_id)
        self.forgiven[job.job_id] = (now_s, job.attained_service_s(now_s))
