"""Shortest predicted service first, without preemption, with cautious packing (Lucid); durations from an oracle so far."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

from pydantic import Field

from icefrog.estimate.sharing import MEM_SAFETY
from icefrog.policies import base
from icefrog.policies.rigid import Admission, Words
from icefrog.types import Candidate, Candidates, GpuId, JobView, Plan, Pricing, Snapshot

_WORDS = Words(runs="its turn came, and it runs until it ends", waits="jobs of less predicted service come first")


@dataclass(frozen=True, slots=True)
class _Host:
    """A running job beside which another may be packed."""

    job: JobView
    half: Candidate  # its shared configuration, with the batch it has
    score: int
    gpus: tuple[GpuId, ...]


class Lucid:
    """Jobs start in order of predicted service, duration x GPUs, and run to their end; in a queue, small jobs share GPUs.

    *Indolent packing*: each job has a sharing score, 0 (tiny), 1 (medium) or 2 (jumbo), here by its estimated utilisation.
    Two one-GPU jobs that accept sharing are packed on one GPU if the sum of their scores is at most the sharing capacity
    ``gss`` (2), and 1.1 x the sum of their memories fits; never more than two, never distributed jobs. A job is packed only
    when no GPU is free for it alone; its partner is the running job with the smallest score, then the lowest utilisation.
    The partner is not restarted, and has the GPU to itself again when the other has ended.

    An oracle so far: predicted durations are the logged ones, off by a factor exp(N(0, ``duration_noise``)). The paper
    predicts them by an additive model (GA2M) of user, name, GPUs and time; scores come there from a decision tree on
    measured utilisation and memory, here from round thresholds of ours. Left out: the profiler (estimates come with the
    jobs), and the forecast of load that lowers ``gss`` in quiet hours (packing only in a queue stands for it).
    """

    name: ClassVar[str] = "lucid"
    source: ClassVar[str] = "Lucid (ASPLOS'23): shortest predicted service, indolent packing; oracle durations"
    oracle: ClassVar[bool] = True
    pricing: ClassVar[Pricing] = Pricing(counts="requested", reads_progress=False)

    class Options(base.Options):
        """Knobs of ``lucid``."""

        pack: bool = Field(default=True, description="pack pairs of one-GPU jobs when others wait")
        gss: int = Field(default=2, ge=0, le=2, description="GPU sharing capacity: largest sum of two scores on a GPU")
        tiny_util_pct: float = Field(default=15.0, ge=0, le=100, description="score 0 up to this utilisation, percent")
        medium_util_pct: float = Field(default=50.0, ge=0, le=100, description="score 1 up to this one, else 2")
        duration_noise: float = Field(
            default=0.0, ge=0, le=3, description="error of predicted durations: standard deviation of the logarithm"
        )

    def __init__(self, options: Options) -> None:
        self.options = options

    def decide(self, snapshot: Snapshot, candidates: Candidates) -> Plan:
        """Start who fits, in order; pack who does not."""
        admission = Admission(snapshot, candidates, _WORDS)
        _part(admission, snapshot, candidates)
        pairs: list[tuple[str, str]] = []
        hosts: list[_Host] | None = None  # found out when first needed
        started: list[JobView] = []
        for job in sorted(snapshot.views.waiting, key=lambda job: (self._service(job, snapshot), job.submit_s)):
            if not admission.free.num_free and (hosts is not None and not hosts):
                break
            candidate = admission.option(job)
            if candidate is None:
                continue
            wanted = candidate.config.num_gpus
            gpus = admission.free.find(wanted, gpu_type=candidate.config.gpu_type)
            if gpus is not None:
                admission.start(job, candidate, gpus)
                started.append(job)
                continue
            admission.leave_out(job, wanted)
            if wanted == 1:
                if hosts is None:
                    hosts = self._hosts(snapshot, candidates, admission, started)
                if (host := self._pack(job, hosts, snapshot, candidates, admission)) is not None:
                    hosts.remove(host)
                    pairs.append((host.job.job_id, job.job_id))
        return admission.plan(pairs=tuple(pairs))

    def _service(self, job: JobView, snapshot: Snapshot) -> float:
        """Predicted GPU-seconds. The error is the job's own: the same at every decision, another with another seed."""
        service = (snapshot.oracle_remaining_s or {}).get(job.job_id, 0.0) * job.spec.requested_gpus
        if self.options.duration_noise:
            uniform = (zlib.crc32(f"{snapshot.seed}/{job.job_id}".encode()) + 0.5) / 2**32
            service *= math.exp(self.options.duration_noise * NormalDist().inv_cdf(uniform))
        return service

    def score(self, half: Candidate) -> int:
        """The sharing score of a shared configuration."""
        util_pct = half.estimate.util_pct
        return (util_pct > self.options.tiny_util_pct) + (util_pct > self.options.medium_util_pct)

    def _hosts(
        self, snapshot: Snapshot, candidates: Candidates, admission: Admission, started: list[JobView]
    ) -> list[_Host]:
        """One-GPU jobs that run alone and may share, the least busy first."""
        if not self.options.pack:
            return []
        alone = [job for job in snapshot.views.running if not job.shared or job.job_id in admission.choices]
        hosts = []
        for job in [*alone, *started]:
            gpus = admission.gpus.get(job.job_id, job.gpus)
            half = None if len(gpus) != 1 else _half(job, candidates)
            if half is not None and (score := self.score(half)) <= self.options.gss:
                hosts.append(_Host(job, half, score, gpus))
        return sorted(hosts, key=lambda host: (host.score, host.half.estimate.util_pct))

    def _pack(
        self, job: JobView, hosts: list[_Host], snapshot: Snapshot, candidates: Candidates, admission: Admission
    ) -> _Host | None:
        """Put the job beside the first host that it fits."""
        half = _half(job, candidates)
        if half is None:
            return None
        left = self.options.gss - self.score(half)
        mem_bytes = snapshot.cluster.gpu_mem_bytes / MEM_SAFETY - half.estimate.mem_bytes
        for host in hosts:
            if host.score > left:
                return None
            if host.half.estimate.mem_bytes <= mem_bytes:
                admission.choices |= {host.job.job_id: host.half, job.job_id: half}
                admission.gpus |= {host.job.job_id: host.gpus, job.job_id: host.gpus}
                admission.reasons[host.job.job_id] = f"shares its GPU with {job.job_id}, for which none was free"
                admission.reasons[job.job_id] = f"shares a GPU with {host.job.job_id}: none was free for it alone"
                return host
        return None


def _half(job: JobView, candidates: Candidates) -> Candidate | None:
    """The job's shared configuration: with the batch it has, if it runs (else it would have to restart); or None."""
    batch = (job.config.batch_per_gpu, job.config.accum_steps) if job.running and job.config is not None else None
    for candidate in candidates.get(job.job_id, ()):
        config = candidate.config
        if config.shared and batch in (None, (config.batch_per_gpu, config.accum_steps)):
            return candidate
    return None


def _part(admission: Admission, snapshot: Snapshot, candidates: Candidates) -> None:
    """A sharer whose partner has ended has its GPU to itself again."""
    sharers = [job for job in snapshot.views.running if job.shared]
    on_gpu = Counter(job.gpus for job in sharers)
    for job in sharers:
        candidate = base.exclusive(candidates, job.job_id, len(job.gpus))
        if on_gpu[job.gpus] == 1 and candidate is not None:
            admission.choices[job.job_id] = candidate
            admission.gpus[job.job_id] = job.gpus
            admission.reasons[job.job_id] = "has its GPU to itself again"
