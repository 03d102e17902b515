"""Optimus: GPUs one by one to the job whose remaining time they shorten most."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from icefrog.policies import base
from icefrog.policies.spreading import Spread
from icefrog.types import Candidate, Candidates, GpuId, JobView, Plan, Pricing, Snapshot

Curve = Sequence[tuple[int, Candidate, float]]
"""(GPUs, candidate, estimated remaining time in s) by rising GPU count."""

_WAITS = "waits: every job gets its fewest GPUs in order of submission, and they are all taken"


class Optimus:
    """Every job its fewest GPUs, in order of submission; then the next GPUs to the largest marginal gain, if there is one.

        gain = (remaining time at n - remaining time at n') / (n' - n),    remaining time = remaining steps x step time at n

    where n' is the next GPU count that the job accepts (n + 1 where it accepts all). Of equal gains the earlier job's comes
    first. Remaining times are the estimates of the candidates: in the IceFrog world and live those of the job's own profile,
    in the Pollux world the artifact's oracle of measured step times and remaining iterations. (The paper fits convergence
    curves online, and divides by the dominant resource, which is the GPU here.)

    Jobs whose count stays keep their GPUs. Placement: ``packed`` keeps a job within a node where it fits in one; ``spread``
    takes GPUs from the emptiest nodes, small jobs first, as the Pollux artifact's version does.
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
        """Counts by marginal gain, then places."""
        jobs = [job for job in snapshot.jobs if candidates.get(job.job_id)]
        curves = [_curve(job, candidates[job.job_id], snapshot.now_s) for job in jobs]
        chosen = marginal_gain(curves, snapshot.num_gpus)
        choices: dict[str, Candidate] = {}
        reasons: dict[str, str] = dict.fromkeys(
            (job.job_id for job in snapshot.jobs), "no GPU count that it accepts fits"
        )
        for job, curve, at in zip(jobs, curves, chosen, strict=True):
            if at is None:
                reasons[job.job_id] = _WAITS
            else:
                choices[job.job_id] = curve[at][1]
                reasons[job.job_id] = _why(curve, at)
        gpus = _spread(snapshot, choices) if self.options.placement == "spread" else None
        return Plan(choices, reasons=reasons, gpus=gpus)


def marginal_gain(curves: Sequence[Curve], num_gpus: int) -> list[int | None]:
    """For each job the index of its option, or None where it waits.

    Args:
        curves: of the jobs, in order of submission; none is empty.
        num_gpus: to be shared out.
    """
    left = num_gpus
    chosen: list[int | None] = []
    heap: list[tuple[float, int]] = []
    for index, curve in enumerate(curves):
        fits = curve[0][0] <= left
        chosen.append(0 if fits else None)
        if fits:
            left -= curve[0][0]
            _push(heap, curve, index, 0)
    heapq.heapify(heap)
    while left and heap:
        _, index = heap[0]
        at = chosen[index]
        assert at is not None
        curve = curves[index]
        more = curve[at + 1][0] - curve[at][0]
        heapq.heappop(heap)
        if more <= left:
            left -= more
            chosen[index] = at + 1
            _push(heap, curve, index, at + 1)
    return chosen


def _push(heap: list[tuple[float, int]], curve: Curve, index: int, at: int) -> None:
    if at + 1 < len(curve):
        (n, _, now_s), (more, _, then_s) = curve[at], curve[at + 1]
        gain = (now_s - then_s) / (more - n)
        if gain > 0.0:
            heapq.heappush(heap, (-gain, index))


def _curve(job: JobView, options: Sequence[Candidate], now_s: float) -> Curve:
    alone = (option for option in options if not option.config.shared)
    return [(option.config.num_gpus, option, base.remaining_s(option, job, now_s)) for option in alone]


def _why(curve: Curve, at: int) -> str:
    count = curve[at][0]
    text = f"{count} GPU{'s' if count > 1 else ''}"
    if at + 1 == len(curve):
        return f"{text}: the most it can use"
    return (
        f"{text}: the next would shorten other jobs more"
        if curve[at + 1][2] < curve[at][2]
        else f"{text}: more do not help"
    )


def _spread(snapshot: Snapshot, choices: Mapping[str, Candidate]) -> dict[str, tuple[GpuId, ...]]:
    """Jobs whose count stays keep their GPUs; the others by rising count."""
    kept = {
        job.job_id: job.gpus
        for job in snapshot.views.running
        if job.job_id in choices
        and choices[job.job_id].config.num_gpus == job.num_gpus
        and not job.shared
        and snapshot.down.isdisjoint(gpu.node for gpu in job.gpus)
    }
    places = Spread(snapshot.node_gpus, kept.values())
    moving = [(choice.config.num_gpus, job_id) for job_id, choice in choices.items() if job_id not in kept]
    gpus = dict(kept)
    for count, job_id in sorted(moving, key=lambda one: one[0]):
        found = places.take(count)
        assert found is not None  # the counts add up to no more than there are
        gpus[job_id] = found
    return gpus
