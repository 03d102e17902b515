"""Logs for the tests of reports: a builder for hand-written ones, and a seeded generator of long legal ones.

The generator drives a ClusterState like a controller and an executor would, so every log it makes can be folded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from icefrog import events as ev
from icefrog.spec import BatchRule, ClusterSpec, JobSpec, NodeSpec, Target
from icefrog.state import ClusterState, Phase
from icefrog.types import GpuId

CLUSTER = ClusterSpec(nodes=(NodeSpec(gpus=2, count=2),))


def spec(name: str, *, target: Target | None = None, labels: dict[str, str] | None = None) -> JobSpec:
    return JobSpec(
        name=name,
        workload="resnet18",
        gpus=(1, 2, 4),
        batch=BatchRule.model_validate({"global": 64}),
        max_epochs=10,
        share=True,
        target=target,
        labels=labels or {},
    )


class Log:
    """Writes records by hand: ``log.submit(0, "a"); log.start(5, "a", [(0, 0)]); log.finish(50, "a")``."""

    def __init__(self) -> None:
        self.records: list[ev.AnyRecord] = []
        self.attempt: dict[str, int] = {}

    def submit(self, time_s: float, name: str, **kwargs: object) -> None:
        self.records.append(ev.JobSubmitted(time_s=time_s, job=spec(name, **kwargs)))  # type: ignore[arg-type]
        self.attempt[name] = 0

    def grant(
        self, time_s: float, name: str, gpus: Sequence[tuple[int, int]], *, shared: bool = False, resize: bool = False
    ) -> None:
        self.attempt[name] += 1
        grant = ev.Grant(num_gpus=len(gpus), batch_per_gpu=64, shared=shared)
        kind = ev.Resize if resize else ev.Start
        where = tuple(GpuId(*gpu) for gpu in gpus)
        self.records.append(kind(time_s=time_s, job_id=name, attempt=self.attempt[name], gpus=where, grant=grant))

    def up(self, time_s: float, name: str) -> None:
        self._attempt(ev.JobStarted, time_s, name)

    def start(self, time_s: float, name: str, gpus: Sequence[tuple[int, int]], *, shared: bool = False) -> None:
        self.grant(time_s, name, gpus, shared=shared)
        self.up(time_s, name)

    def resize(self, time_s: float, name: str, gpus: Sequence[tuple[int, int]], *, gap_s: float) -> None:
        old = self.attempt[name]
        self.grant(time_s, name, gpus, resize=True)
        self.records.append(ev.JobStopped(time_s=time_s, job_id=name, attempt=old))
        self.up(time_s + gap_s, name)

    def regrant(self, time_s: float, name: str, *, shared: bool) -> None:
        grant = ev.Grant(num_gpus=1, batch_per_gpu=64, shared=shared)
        self.records.append(ev.Regrant(time_s=time_s, job_id=name, attempt=self.attempt[name], grant=grant))

    def progress(self, time_s: float, name: str, **kwargs: object) -> None:
        values = {"epoch": 1, "effective_samples": 100.0, **kwargs}
        self._attempt(ev.ProgressReported, time_s, name, **values)

    def crash(self, time_s: float, name: str, reason: str = "out of memory") -> None:
        self._attempt(ev.JobCrashed, time_s, name, reason=reason)

    def finish(self, time_s: float, name: str, outcome: str = "completed", **kwargs: object) -> None:
        self._attempt(ev.JobFinished, time_s, name, outcome=outcome, **kwargs)

    def fail(self, time_s: float, name: str) -> None:
        self.records.append(ev.JobFailed(time_s=time_s, job_id=name, reason="needs 8 GPUs"))

    def cancel(self, time_s: float, name: str) -> None:
        self.records.append(ev.CancelRequested(time_s=time_s, job_id=name))

    def _attempt(self, kind: type[ev.AttemptEvent], time_s: float, name: str, **kwargs: object) -> None:
        self.records.append(kind(time_s=time_s, job_id=name, attempt=self.attempt[name], **kwargs))  # type: ignore[arg-type]


LAYERS = (12, 20, 34, 54)


def generate(
    *,
    seed: int,
    jobs: int,
    cluster: ClusterSpec,
    policy: str = "icefrog",
    freezes: bool = True,
    target: Target | None = None,
    origin_s: float = 0.0,
    gap_s: float = 120.0,
    finish: bool = True,
) -> list[ev.AnyRecord]:
    """A legal log of an elastic, sharing, freezing run; a few jobs crash, fail, are cancelled or miss their target.

    It is a shape, not a simulation: nobody may read performance out of it.
    """
    return _Generator(seed, jobs, cluster, policy, freezes, target, origin_s, gap_s, finish).run()


class _Generator:
    def __init__(
        self,
        seed: int,
        jobs: int,
        cluster: ClusterSpec,
        policy: str,
        freezes: bool,
        target: Target | None,
        origin_s: float,
        gap_s: float,
        finish: bool,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.cluster, self.policy, self.freezes, self.target, self.finish = cluster, policy, freezes, target, finish
        self.state = ClusterState(cluster)
        self.out: list[ev.AnyRecord] = []
        self.now_s = origin_s
        self.gap_s = gap_s
        self.arrivals = origin_s + np.cumsum(self.rng.exponential(gap_s, jobs))
        self.work = {f"job-{i:04d}": float(self.rng.lognormal(7.5, 1.0)) for i in range(jobs)}  # GPU-seconds
        self.depth = {name: int(self.rng.choice(LAYERS)) for name in self.work}
        self.limit_s = float(self.arrivals[-1]) if jobs else origin_s

    def emit(self, record: ev.AnyRecord) -> None:
        self.state.apply(record)
        self.out.append(record)

    def run(self) -> list[ev.AnyRecord]:
        names = list(self.work)
        submitted = 0
        while submitted < len(names) or (self.finish and self.state.active):
            self.now_s += self.gap_s / 2
            while submitted < len(names) and self.arrivals[submitted] <= self.now_s:
                labels = {"user": f"u{submitted % 7}", "vc": "a<b>&" if submitted % 5 == 0 else "plain"}
                job = spec(names[submitted], target=self.target, labels=labels)
                self.emit(ev.JobSubmitted(time_s=float(self.arrivals[submitted]), job=job))
                submitted += 1
            for job_id in list(self.state.active):
                self._advance(job_id)
            self._decide()
        return self.out

    def _advance(self, job_id: str) -> None:
        job = self.state.jobs[job_id]
        if job.holding is None:
            return
        common = {"time_s": self.now_s, "job_id": job_id, "attempt": job.holding.attempt}
        chance = self.rng.random()
        done = min(1.0, job.attained_s(self.now_s) / self.work[job_id])
        if chance < 0.001:
            self.emit(ev.JobCrashed(**common, reason="CUDA out of memory"))
        elif chance < 0.0015:
            self.emit(ev.CancelRequested(time_s=self.now_s, job_id=job_id))
            self.emit(ev.Stop(time_s=self.now_s, job_id=job_id, attempt=job.attempt))
            self.emit(ev.JobStopped(**common))
        elif done >= 1.0:
            missed = chance > 0.97
            metric = None if self.target is None else self.target.value + (-0.02 if missed else 0.004)
            self.emit(ev.JobFinished(**common, outcome="target_missed" if missed else "completed", metric=metric))
        else:
            deep = int(self.depth[job_id] * 0.9 * done * self.rng.uniform(0.6, 1.0)) if self.freezes else 0
            metric = None if self.target is None else float(self.target.value * (1 - 0.5 * np.exp(-5 * done)) - 0.01)
            self.emit(
                ev.ProgressReported(
                    **common,
                    epoch=job.epoch + 1,
                    effective_samples=1e4 * done,
                    frozen_layers=deep,
                    variance=(1.0,) * self.depth[job_id],
                    metric=metric,
                )
            )

    def _decide(self) -> None:
        free = [GpuId(n, d) for n, size in enumerate(self.cluster.gpus_per_node) for d in range(size)]
        for job in self.state.active.values():
            free = [gpu for gpu in free if gpu not in job.gpus]
        pending = [job for job in self.state.active.values() if job.phase is Phase.PENDING]
        while pending and free:
            if self.freezes and len(pending) >= 2 and self.rng.random() < 0.2:
                gpu = free.pop()
                for job in (pending.pop(0), pending.pop(0)):
                    self._start(job.job_id, (gpu,), shared=True)
                continue
            count = int(self.rng.choice([n for n in (1, 2, 4) if n <= len(free)]))
            self._start(pending.pop(0).job_id, tuple(free[:count]), shared=False)
            free = free[count:]
        if free and self.freezes:
            grown = next((j for j in self.state.active.values() if j.phase is Phase.RUNNING and not j.shared), None)
            if grown is not None and grown.gpus and len(free) >= len(grown.gpus) and len(grown.gpus) < 4:
                gpus = (*grown.gpus, *free[: len(grown.gpus)])
                self._resize(grown.job_id, gpus)
        self.emit(
            ev.PlanDecided(time_s=self.now_s, policy=self.policy, gpus_granted=0, waiting=len(pending), reasons={})
        )

    def _start(self, job_id: str, gpus: tuple[GpuId, ...], *, shared: bool) -> None:
        attempt = self.state.jobs[job_id].attempt + 1
        grant = ev.Grant(num_gpus=len(gpus), batch_per_gpu=64, shared=shared)
        self.emit(ev.Start(time_s=self.now_s, job_id=job_id, attempt=attempt, gpus=gpus, grant=grant))
        self.emit(ev.JobStarted(time_s=self.now_s, job_id=job_id, attempt=attempt))

    def _resize(self, job_id: str, gpus: tuple[GpuId, ...]) -> None:
        attempt = self.state.jobs[job_id].attempt
        grant = ev.Grant(num_gpus=len(gpus), batch_per_gpu=64)
        self.emit(ev.Resize(time_s=self.now_s, job_id=job_id, attempt=attempt + 1, gpus=gpus, grant=grant))
        self.emit(ev.JobStopped(time_s=self.now_s, job_id=job_id, attempt=attempt))
        self.emit(ev.JobStarted(time_s=self.now_s, job_id=job_id, attempt=attempt + 1))
