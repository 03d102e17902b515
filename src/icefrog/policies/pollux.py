"""Pollux: GPU counts and batches together, by goodput and a fair power mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from icefrog.policies import base
from icefrog.policies.packing import Packer
from icefrog.profile import FloatArray
from icefrog.types import Candidate, Candidates, GpuId, JobView, Json, Plan, Pricing, Snapshot

IntArray = npt.NDArray[np.int64]

TINY_SPEEDUP = 1e-3
"""Added to every job's speed-up, so that one that waits does not make the mean of all zero."""
_TRIES = 3
_WAITS = "waits: by the fitness of all jobs together others make more of the GPUs"
_NO_OPTION = "waits: no configuration of it fits this cluster"
_LEAST_AGE_S = 1.0


class Pollux:
    """The GPU counts that maximise the cluster's fitness; each job runs its batch of the best goodput.

        FITNESS = (1/J sum_j u_j^p)^(1/p),  p = -1,   u_j = SPEEDUP_j(n) x RESTART_j x nodes / GPUs + 1e-3
        SPEEDUP_j(n) = GOODPUT_j(n) / GOODPUT_j(fair share),   fair share = ceil(GPUs / jobs)
        RESTART_j = max(age - restart time x restarts, 0) / (age + restart time) where n changes, else 1

    GOODPUT is the candidates' effective progress, at the best batch of each count. A job gets at most ``max_growth`` times
    the most GPUs it has ever had, beginning with its fewest: its model says little of what it has not tried. Counts above a
    node are whole nodes. The paper searches allocations by a genetic algorithm; here the counts are a knapsack, solved
    exactly (u_j depends on the job's own count alone), and placed: jobs whose count stays keep their GPUs, the others go
    to one node, or over nodes that no other job spans, or shrink.
    """

    name: ClassVar[str] = "pollux"
    source: ClassVar[str] = (
        "Pollux (Qiao et al., OSDI'21): goodput, elastic batch; fitness maximised exactly over GPU counts"
    )
    oracle: ClassVar[bool] = False
    pricing: ClassVar[Pricing] = Pricing(batch="elastic")

    class Options(base.Options):
        """Knobs of ``pollux``."""

        max_growth: float = Field(
            default=2.0, ge=1.0, description="a job gets at most so many times the most GPUs it has had; inf: no limit"
        )

    def __init__(self, options: Options) -> None:
        self.options = options

    def decide(self, snapshot: Snapshot, candidates: Candidates) -> Plan:
        """Price every count of every job, solve, place, explain."""
        most = _most_gpus(snapshot)
        num_nodes = sum(size > 0 for size in snapshot.node_gpus)
        scale = num_nodes / max(snapshot.num_gpus, 1)
        fair = math.ceil(snapshot.num_gpus / max(len(snapshot.jobs), 1))
        offers = []
        for job in snapshot.jobs:
            options = _tidy(candidates.get(job.job_id, ()), max(snapshot.node_gpus, default=0))
            if options:
                offers.append(self._offer(job, options, snapshot.now_s, fair, scale, most.get(job.job_id, 0)))
        gpus = _allocate(offers, snapshot)
        reasons = dict.fromkeys((job.job_id for job in snapshot.jobs), _NO_OPTION)
        choices: dict[str, Candidate] = {}
        for offer in offers:
            job_id = offer.job.job_id
            if job_id in gpus:
                at = offer.at(len(gpus[job_id])) - 1
                choices[job_id] = offer.options[at]
                reasons[job_id] = _why(choices[job_id], offer.speedups[at])
            else:
                reasons[job_id] = _WAITS
        return Plan(choices, reasons=reasons, memory={"most": most}, gpus=gpus)

    def _offer(
        self, job: JobView, options: Sequence[Candidate], now_s: float, fair: int, scale: float, most: int
    ) -> _Offer:
        goodputs = [option.estimate.effective_progress for option in options]
        counts = [option.config.num_gpus for option in options]
        base_goodput = float(np.interp(fair, counts, goodputs))
        limit = max(self.options.max_growth * most, counts[0]) if most else counts[0]
        allowed = [at for at, count in enumerate(counts) if count <= limit or (job.running and count == job.num_gpus)]
        # Decided on at the very moment of its arrival a job would be worth nothing, and wait beside idle GPUs.
        penalty = restart_penalty(max(now_s - job.submit_s, _LEAST_AGE_S), job.restart_s, job.num_restarts)
        held = job.num_gpus if job.running and not job.shared else 0
        speedups = [goodputs[at] / base_goodput for at in allowed]
        utilities = [
            speedup * scale * (1.0 if counts[at] == held else penalty)
            for at, speedup in zip(allowed, speedups, strict=True)
        ]
        return _Offer(
            job,
            [options[at] for at in allowed],
            speedups,
            np.array([0, *(counts[at] for at in allowed)]),
            1.0 / (np.array([0.0, *utilities]) + TINY_SPEEDUP),
            dict(zip(counts, goodputs, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class _Offer:
    """One job in a decision. Entry 0 of ``counts`` and ``costs`` is to wait; the others are the options."""

    job: JobView
    options: Sequence[Candidate]
    speedups: Sequence[float]
    counts: IntArray
    costs: FloatArray
    priced: Mapping[int, float]
    """Goodput by count, those it may not have yet included."""

    def at(self, count: int) -> int:
        """The entry with so many GPUs."""
        return int(np.searchsorted(self.counts, count))

    def below(self, count: int) -> int | None:
        """The next count below, None if there is none."""
        less = self.counts[(self.counts < count) & (self.counts > 0)]
        return int(less.max()) if less.size else None

    def spans(self, count: int, together: int, node_gpus: int) -> bool:
        """Whether ``count`` GPUs over two nodes promise more than ``together`` on one.

        Candidates price counts of a node on one node. What a second node costs is read off the first count that needs one:
        the part of twice a node's goodput that two nodes reach.
        """
        several = next((n for n in self.priced if n > node_gpus), None)
        if several is None or node_gpus not in self.priced:
            return True
        kept = min(self.priced[several] / (self.priced[node_gpus] * several / node_gpus), 1.0)
        best = max((goodput for n, goodput in self.priced.items() if n <= together), default=0.0)
        return self.priced[count] * kept > best


def restart_penalty(age_s: float, restart_s: float, num_restarts: int) -> float:
    """RESTART_j: the share of its life that a job will have spent computing once it has restarted again."""
    return max(age_s - num_restarts * restart_s, 0.0) / (age_s + restart_s) if age_s + restart_s > 0 else 1.0


def fitness(utilities: Sequence[float]) -> float:
    """Power mean with p = -1 of (utility + 1e-3)."""
    return len(utilities) / sum(1.0 / (utility + TINY_SPEEDUP) for utility in utilities)


def knapsack(jobs: Sequence[tuple[IntArray, FloatArray]], num_gpus: int) -> list[int]:
    """For each job the index of its option, such that the sum of costs is least and the counts fit.

    Args:
        jobs: (GPU counts, costs) of each, arrays of shape (options,); one option takes no GPU.
        num_gpus: the capacity.

    Returns:
        Of equal sums one that uses the fewest GPUs.
    """
    best = np.zeros(num_gpus + 1)
    picks = []
    space = np.arange(num_gpus + 1)
    for counts, costs in jobs:
        rest = space - counts[:, None]
        values = np.where(rest >= 0, best[np.maximum(rest, 0)] + costs[:, None], np.inf)
        pick = values.argmin(axis=0)
        picks.append(pick)
        best = values[pick, space]
    left = int(best.argmin())
    chosen = []
    for (counts, _), pick in zip(reversed(jobs), reversed(picks), strict=True):
        at = int(pick[left])
        chosen.append(at)
        left -= int(counts[at])
    return chosen[::-1]


def _allocate(offers: Sequence[_Offer], snapshot: Snapshot) -> Mapping[str, tuple[GpuId, ...]]:
    """Solve and place; where jobs had to shrink, again with what they got as their most, so that others use what is left."""
    limits = [len(offer.counts) for offer in offers]
    best: tuple[float, Mapping[str, tuple[GpuId, ...]]] = (math.inf, {})
    for _ in range(_TRIES):
        problem = [(o.counts[:limit], o.costs[:limit]) for o, limit in zip(offers, limits, strict=True)]
        chosen = knapsack(problem, snapshot.num_gpus)
        gpus = _places(offers, chosen, snapshot)
        placed = [offer.at(len(gpus.get(offer.job.job_id, ()))) for offer in offers]
        cost = sum(float(offer.costs[at]) for offer, at in zip(offers, placed, strict=True))
        if cost < best[0]:
            best = cost, gpus
        if placed == chosen:
            break
        limits = [at + 1 if at != wanted else limit for at, wanted, limit in zip(placed, chosen, limits, strict=True)]
    return best[1]


def _places(offers: Sequence[_Offer], chosen: Sequence[int], snapshot: Snapshot) -> Mapping[str, tuple[GpuId, ...]]:
    packer = Packer(snapshot.node_gpus)
    moving: dict[str, int] = {}
    for offer, at in zip(offers, chosen, strict=True):
        job, count = offer.job, int(offer.counts[at])
        stays = job.running and not job.shared and job.num_gpus == count and packer.keep(job.job_id, job.gpus)
        if count and not stays:
            moving[job.job_id] = count
    by_id = {offer.job.job_id: offer for offer in offers}
    node_gpus = max(snapshot.node_gpus, default=0)
    packer.place_all(
        moving,
        lambda job_id, count: by_id[job_id].below(count),
        lambda job_id, count, together: by_id[job_id].spans(count, together, node_gpus),
    )
    return packer.gpus


def _tidy(options: Sequence[Candidate], node_gpus: int) -> list[Candidate]:
    """Exclusive options by rising count; above a node only whole nodes, unless the job has nothing else."""
    alone = sorted((c for c in options if not c.config.shared), key=lambda c: c.config.num_gpus)
    tidy = [c for c in alone if c.config.num_gpus <= node_gpus or (node_gpus and c.config.num_gpus % node_gpus == 0)]
    return tidy or alone


def _most_gpus(snapshot: Snapshot) -> dict[str, int]:
    """The most GPUs that each unfinished job has ever had, as remembered and as it is now."""
    memory: Json = snapshot.memory
    found: Mapping[str, Any] = memory.get("most", {}) if isinstance(memory, dict) else {}
    most = {job.job_id: max(int(found.get(job.job_id, 0)), job.num_gpus) for job in snapshot.jobs}
    return {job_id: count for job_id, count in most.items() if count}


def _why(choice: Candidate, speedup: float) -> str:
    count = choice.config.num_gpus
    return f"{count} GPU{'s' if count > 1 else ''}: {speedup:.1f} x its goodput on a fair share"
