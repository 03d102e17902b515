"""Optimus: GPUs one by one to the job whose remaining time they shorten most."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import ClassVar, Literal

from pydantic import Field

from icefrog.policies import base
from icefrog.policies.spreading import Spread
from icefrog.types import Candidate, Candidates, GpuId, JobView, Plan, Pricing, Snapshot

_WAITS = "waits: every job gets its fewest GPUs in order of submission, and they are all taken"


class Optimus:
    """Every job its fewest GPUs, in order of submission; then the next GPUs to the largest marginal gain, if there is one.

        gain = (remaining time at n - remaining time at n') / (n' - n),    remaining time = remaining steps x step time at n

    where n' is the next GPU count that the job accepts (n + 1 where it accepts all). Of equal gains the earlier job's comes
    first. Remaining times are the estimates of the candidates: in the IceFrog world and live those of the job's own profile,
    in the Pollux world the artifact's oracle of measured step times and remaining iterations. (The paper fits convergence
    curves online, and divides by the dominant resource, which is the GPU here.)

    The plan stands until a job reports, or for good while every job has as many GPUs as make it faster. Jobs whose count
    stays keep their GPUs. Placement: ``packed`` keeps a job within a node where it fits in one; ``spread`` takes GPUs from
    the emptiest nodes, small jobs first, as the Pollux artifact's version does.
    """

    name: ClassVar[str] = "optimus"
    source: ClassVar[str] = (
        "Optimus (Peng et al., EuroSys'18): marginal gain, on the world's estimates (Pollux world: an oracle)"
    )
    oracle: ClassVar[bool] = False
    pricing: ClassVar[Pricing] = Pricing()

    class Options(base.Options):
        """Knobs of ``optimus``."""

        placement: Literal["packed", "spread"] = Field(default="packed", description="where jobs go: packed, spread")

    def __init__(self, options: Options) -> None:
        self.options = options

    def decide(self, snapshot: Snapshot, candidates: Candidates) -> Plan:
        """Counts by marginal gain, then places; the plan names what changes."""
        now_s = snapshot.now_s
        jobs: list[JobView] = []
        curves: list[Sequence[Candidate]] = []
        for job in snapshot.jobs:
            options = candidates.get(job.job_id, ())
            if job.spec.share:
                options = [option for option in options if not option.config.shared]
            if options:
                jobs.append(job)
                curves.append(options)
        chosen, satisfied = marginal_gain(
            curves, lambda at, option: base.remaining_s(option, jobs[at], now_s), snapshot.num_gpus
        )
        plan = _Planned({job.job_id for job in snapshot.views.running})
        for job, curve, at in zip(jobs, curves, chosen, strict=True):
            if at is not None:
                plan.give(job, curve[at], at + 1 == len(curve), snapshot)
        made = plan.spread(snapshot) if self.options.placement == "spread" else plan.packed(snapshot)
        # Whether one more GPU makes a job faster at all does not depend on how much of it is left; by how much, does.
        return replace(made, stands_until_s=math.inf, until_report=not satisfied)


def marginal_gain(
    curves: Sequence[Sequence[Candidate]], remaining_s: Callable[[int, Candidate], float], num_gpus: int
) -> tuple[list[int | None], bool]:
    """For each job the index of its option, or None where it waits; and whether all have as many GPUs as help them.

    Args:
        curves: exclusive options by rising GPU count of the jobs, in order of submission; none is empty.
        remaining_s: estimated remaining time of the job of an index with an option, s.
        num_gpus: to be shared out.
    """
    left = num_gpus
    chosen: list[int | None] = []
    held: list[int] = []  # GPUs by job
    heap: list[tuple[float, int, int, float]] = []  # (-gain, job, GPUs then, remaining time with them)
    lengths = [len(curve) for curve in curves]

    def offer(job: int, at: int, now_s: float) -> None:
        """Put the option ``at`` on the heap, if there is one and it helps. Called for every GPU that is handed out."""
        if at < lengths[job]:
            option = curves[job][at]
            count = option.config.num_gpus
            then_s = remaining_s(job, option)
            gain = (now_s - then_s) / (count - held[job])
            if gain > 0.0:
                heappush(heap, (-gain, job, count, then_s))

    for curve in curves:
        fewest = curve[0].config.num_gpus
        fits = fewest <= left
        chosen.append(0 if fits else None)
        held.append(fewest)
        if fits:
            left -= fewest
    if left:
        for job, curve in enumerate(curves):
            if chosen[job] == 0:
                offer(job, 1, remaining_s(job, curve[0]))
    satisfied = left > 0 and None not in chosen
    while left and heap:
        _, job, count, then_s = heappop(heap)
        at = chosen[job]
        more = count - held[job]
        if more <= left and at is not None:
            left -= more
            chosen[job], held[job] = at + 1, count
            offer(job, at + 2, then_s)
        else:
            satisfied = False
    return chosen, satisfied and not heap


class _Planned:
    """A plan in the making, told from what runs."""

    def __init__(self, running: set[str]) -> None:
        self._leaving = running
        self._kept: dict[str, tuple[Candidate, JobView]] = {}
        self._choices: dict[str, Candidate] = {}
        self._reasons: dict[str, str] = {}

    def give(self, job: JobView, choice: Candidate, is_last: bool, snapshot: Snapshot) -> None:
        """A job gets a count; it keeps its GPUs if that is the one it has."""
        job_id, count = job.job_id, choice.config.num_gpus
        self._leaving.discard(job_id)
        if job.running and job.num_gpus == count and not job.shared and _in_service(job, snapshot):
            self._kept[job_id] = choice, job
            return
        self._choices[job_id] = choice
        text = f"{count} GPU{'s' if count > 1 else ''}: "
        self._reasons[job_id] = text + (
            "the most it can use" if is_last else "more would shorten other jobs more, or none"
        )

    def spread(self, snapshot: Snapshot) -> Plan:
        """Those that change are placed on the emptiest nodes, by rising count; the others stay."""
        gpus: dict[str, tuple[GpuId, ...]] = {}
        if self._choices:
            places = Spread(snapshot.node_gpus, [job.gpus for _, job in self._kept.values()])
            for job_id in sorted(self._choices, key=lambda job_id: self._choices[job_id].config.num_gpus):
                found = places.take(self._choices[job_id].config.num_gpus)
                assert found is not None  # the counts add up to no more than there are
                gpus[job_id] = found
        return Plan(
            self._choices,
            reasons=self._reasons | dict.fromkeys(self._leaving, _WAITS),
            keeps=True,
            preempted=frozenset(self._leaving),
            waiting_reason=_WAITS,
            gpus=gpus,
        )

    def packed(self, snapshot: Snapshot) -> Plan:
        """All are named, so that those that stay may be moved where others find no place."""
        kept = {job_id: choice for job_id, (choice, _) in self._kept.items()}
        stays = dict.fromkeys(kept, "keeps its GPUs: no other count shortens the remaining times more")
        return Plan(kept | self._choices, reasons=stays | self._reasons, waiting_reason=_WAITS)


def _in_service(job: JobView, snapshot: Snapshot) -> bool:
    return not snapshot.down or snapshot.down.isdisjoint(gpu.node for gpu in job.gpus)
