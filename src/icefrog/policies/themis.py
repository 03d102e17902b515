"""Finish-time fairness with leases and partial allocation auctions (Themis)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from icefrog.changes import free_gpus
from icefrog.policies import base
from icefrog.policies.rigid import Words, admit
from icefrog.types import Candidate, Candidates, JobView, Json, Plan, Pricing, Snapshot

_WORDS = Words(
    runs="has a lease", waits="all GPUs are leased to jobs that finish later than their fair share lets them"
)


@dataclass(frozen=True, slots=True)
class Bid:
    """What a job says of itself in an auction."""

    age_s: float
    remaining_s: float
    independent_s: float  # T_id
    num_gpus: int

    def rho(self, delay_s: float = 0.0) -> float:
        """Finish-time fairness, T_sh / T_id, if the job runs from ``delay_s`` on."""
        return (self.age_s + delay_s + self.remaining_s) / self.independent_s

    def gain(self, lease_s: float) -> float:
        """What winning is worth a GPU: the logarithm of rho(next lease) / rho(now), over the GPUs it takes."""
        return math.log(self.rho(lease_s) / self.rho()) / self.num_gpus


class Themis:
    """GPUs are leased; when a lease ends, they are auctioned among the jobs that are treated worst.

        rho = T_sh / T_id
        T_sh = age + remaining time                              in the shared cluster, running from now on
        T_id = total time x max(1, requested GPUs x N / GPUs)    alone on 1/N of the cluster, N: unfinished jobs now

    (times at the requested GPU count, by the estimates). An auction offers all free GPUs, and those whose leases have
    ended, to the fraction 1 - f of the bidders with the largest rho, f the fairness knob. Among them it goes for the
    largest product of valuations 1/rho (Nash), where a loser's rho is that of running one lease later; greedily, by gain a
    GPU. What is left goes to the others, the largest rho first, so no GPU is idle that anybody could use. f = 1: the
    worst-off first, whatever it costs; f = 0: everybody bids. A lease that is won again goes on without a restart.

    Differences from the paper: a job bids for all the GPUs it asked for or for none (a gang), not for every subset. There
    are no hidden payments: bids are computed by the scheduler, so nobody can lie. N is the present number of jobs, not its
    average over the job's life.
    """

    name: ClassVar[str] = "themis"
    source: ClassVar[str] = "Themis (NSDI'20): finish-time fairness, leases, partial allocation auctions"
    oracle: ClassVar[bool] = False
    pricing: ClassVar[Pricing] = Pricing(counts="requested")

    class Options(base.Options):
        """Knobs of ``themis``; the defaults are the paper's."""

        fairness: float = Field(
            default=0.8,
            ge=0.0,
            le=1.0,
            description="f: auctions are for the fraction 1 - f of the jobs that is worst off",
        )
        lease_s: float = Field(
            default=1200.0, gt=0, description="a job keeps its GPUs for so long, then they are offered"
        )

    def __init__(self, options: Options) -> None:
        self.options = options

    def decide(self, snapshot: Snapshot, candidates: Candidates) -> Plan:
        """One auction, if there is anything to offer."""
        now_s, views, last_s = snapshot.now_s, snapshot.views, _last_auction_s(snapshot.memory)
        if not views.waiting:
            return admit(snapshot, candidates, (), _WORDS).plan(memory={"auction_s": None})
        over = [] if last_s is None else [job for job in views.running if now_s >= self._lease_end_s(job, last_s)]
        line: list[JobView] = []
        bids: dict[str, Bid] = {}
        if over or free_gpus(snapshot).num_free:
            line = [*over, *views.waiting]
            bids = _bids(line, snapshot, candidates)
        admission = admit(snapshot, candidates, self._in_line(line, bids), _WORDS)
        for job_id in admission.choices:
            admission.reasons[job_id] += f" (finish-time fairness {bids[job_id].rho():.2f})"
        ends = [self._lease_end_s(job, now_s) for job in views.running if job.job_id not in admission.preempted]
        ends += [now_s + self.options.lease_s for job in views.waiting if job.job_id in admission.choices]
        memory = {"auction_s": now_s if admission.waits else None}
        return admission.plan(stands_until_s=min(ends, default=math.inf), memory=memory)

    def _lease_end_s(self, job: JobView, after_s: float) -> float:
        """When the lease ends that the running job had at ``after_s``. Leases follow one another from when it started."""
        since_s = after_s if job.holding_since_s is None else job.holding_since_s
        return since_s + (math.floor((after_s - since_s) / self.options.lease_s) + 1) * self.options.lease_s

    def _in_line(self, jobs: list[JobView], bids: dict[str, Bid]) -> list[JobView]:
        """Those that take part in the auction, the best bid first; then the others; those without a bid at the end."""
        bidders = sorted(
            (job for job in jobs if job.job_id in bids), key=lambda job: (-bids[job.job_id].rho(), job.submit_s)
        )
        seats = max(1, math.ceil((1.0 - self.options.fairness) * len(bidders)))
        lease_s = self.options.lease_s
        inside = sorted(bidders[:seats], key=lambda job: -bids[job.job_id].gain(lease_s))
        return [*inside, *bidders[seats:], *(job for job in jobs if job.job_id not in bids)]


def _bids(jobs: Iterable[JobView], snapshot: Snapshot, candidates: Candidates) -> dict[str, Bid]:
    bids = {}
    for job in jobs:
        candidate = base.exclusive(candidates, job.job_id, job.spec.requested_gpus)
        if candidate is not None:
            bids[job.job_id] = bid(job, candidate, snapshot)
    return bids


def bid(job: JobView, candidate: Candidate, snapshot: Snapshot) -> Bid:
    """The job's bid for the GPUs it asked for, ``candidate`` being its configuration there."""
    left_s = max(base.remaining_s(candidate, job, snapshot.now_s), 1e-3)
    total_s = left_s
    if job.remaining_samples:
        total_s *= (job.effective_samples + job.remaining_samples) / job.remaining_samples
    num_gpus = candidate.config.num_gpus
    slower = max(1.0, num_gpus * len(snapshot.jobs) / max(snapshot.num_gpus, 1))
    return Bid(max(snapshot.now_s - job.submit_s, 0.0), left_s, total_s * slower, num_gpus)


def _last_auction_s(memory: Json) -> float | None:
    """When the last auction was; None: nobody waited after it, so every lease that ended since then was renewed."""
    found = memory.get("auction_s") if isinstance(memory, dict) else None
    return None if found is None else float(found)
