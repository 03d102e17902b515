"""Optimus with packing first and the tuned FreezeOut schedule: one of the paper's baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from icefrog.estimate.sharing import may_share
from icefrog.policies import base
from icefrog.policies.optimus import marginal_gain
from icefrog.types import Candidate, Candidates, JobView, Plan, Pricing, Snapshot

_WAITS = "waits: every job gets its fewest GPUs in order of submission, and they are all taken"
_NO_OPTION = "no configuration of it fits this cluster"


@dataclass(frozen=True, slots=True)
class _Unit:
    """A job with its exclusive options, or a pair with one shared option each: what marginal gain deals GPUs to."""

    jobs: tuple[JobView, ...]
    curve: Sequence[Candidate]
    halves: tuple[Candidate, ...] = ()


class OptimusPlus:
    """First pairs are packed by IceFrog's predictor, then GPUs are dealt out as Optimus does; jobs freeze by FreezeOut.

    The paper packs all pairs that fit, and deals out what is left. ``pack=short`` packs them only while not every job could
    have its fewest GPUs otherwise, and no more than that takes. Two jobs may share where the predicted memory and
    utilisation of both fit one GPU (Eq. 8); running pairs come first, then the earliest submitted job with the busiest
    partner that fits beside it. A pair counts as one job of one GPU.
    """

    name: ClassVar[str] = "optimus+"
    source: ClassVar[str] = "Optimus (EuroSys'18) with packing and tuned FreezeOut, as IceFrog's paper compares it"
    oracle: ClassVar[bool] = False
    pricing: ClassVar[Pricing] = Pricing(freezing="freezeout")

    class Options(base.Options):
        """Knobs of ``optimus+``."""

        share: bool = Field(default=True, description="pack pairs before GPUs are dealt out")
        pack: Literal["first", "short"] = Field(
            default="first", description="all pairs that fit (the paper), or as many as it takes where GPUs run short"
        )

    def __init__(self, options: Options) -> None:
        self.options = options

    def decide(self, snapshot: Snapshot, candidates: Candidates) -> Plan:
        """Pack, deal out, explain."""
        alone: dict[str, Sequence[Candidate]] = {}
        shared: dict[str, Sequence[Candidate]] = {}
        for job in snapshot.jobs:
            options = candidates.get(job.job_id, ())
            if exclusive := [option for option in options if not option.config.shared]:
                alone[job.job_id] = exclusive
                shared[job.job_id] = [option for option in options if option.config.shared]
        jobs = [job for job in snapshot.jobs if job.job_id in alone]
        packed = _pack(jobs, shared, self._most_pairs(jobs, alone, snapshot), snapshot.cluster.gpu_mem_bytes)
        units = _units(jobs, alone, packed)
        chosen, _ = marginal_gain(
            [unit.curve for unit in units],
            lambda at, option: base.remaining_s(option, units[at].jobs[0], snapshot.now_s),
            snapshot.num_gpus,
        )
        return _plan(snapshot, units, chosen)

    def _most_pairs(self, jobs: Sequence[JobView], alone: Mapping[str, Sequence[Candidate]], snapshot: Snapshot) -> int:
        if not self.options.share:
            return 0
        if self.options.pack == "first":
            return len(jobs) // 2
        return sum(alone[job.job_id][0].config.num_gpus for job in jobs) - snapshot.num_gpus


_Packed = Mapping[str, tuple[JobView, tuple[Candidate, Candidate]]]
"""First job of a pair -> the second, and the shared option of each."""


def _pack(
    jobs: Sequence[JobView], shared: Mapping[str, Sequence[Candidate]], num_pairs: int, gpu_mem_bytes: float
) -> _Packed:
    """At most ``num_pairs`` pairs: those that run, then new ones in order of submission."""
    packed: dict[str, tuple[JobView, tuple[Candidate, Candidate]]] = {}
    free = {job.job_id: job for job in jobs if shared[job.job_id]}
    by_gpu: dict[object, JobView] = {}
    for job in jobs:
        if job.running and job.shared and job.job_id in free:
            mate = by_gpu.setdefault(job.gpus, job)
            halves = _fitting(shared[mate.job_id], shared[job.job_id], gpu_mem_bytes) if mate is not job else None
            if halves is not None and len(packed) < num_pairs:
                packed[mate.job_id] = job, halves
                del free[mate.job_id], free[job.job_id]
    busiest = sorted(free.values(), key=lambda job: -shared[job.job_id][0].estimate.util_pct)
    for job in jobs:
        if len(packed) >= num_pairs or job.job_id not in free:
            continue
        for mate in busiest:
            if mate.job_id not in free or mate is job:
                continue
            halves = _fitting(shared[job.job_id], shared[mate.job_id], gpu_mem_bytes)
            if halves is not None:
                packed[job.job_id] = mate, halves
                del free[job.job_id], free[mate.job_id]
                break
    return packed


def _fitting(
    first: Sequence[Candidate], second: Sequence[Candidate], gpu_mem_bytes: float
) -> tuple[Candidate, Candidate] | None:
    """The first combination that fits; the fastest options are tried first."""
    for one in first:
        for other in second:
            a, b = one.estimate, other.estimate
            if may_share(a.mem_bytes, a.util_pct, b.mem_bytes, b.util_pct, gpu_mem_bytes):
                return one, other
    return None


def _units(jobs: Sequence[JobView], alone: Mapping[str, Sequence[Candidate]], packed: _Packed) -> list[_Unit]:
    """In order of submission; a pair stands where its first job stands."""
    seconds = {mate.job_id for mate, _ in packed.values()}
    units = []
    for job in jobs:
        if job.job_id in packed:
            mate, halves = packed[job.job_id]
            units.append(_Unit((job, mate), halves[:1], halves))
        elif job.job_id not in seconds:
            units.append(_Unit((job,), alone[job.job_id]))
    return units


def _plan(snapshot: Snapshot, units: Sequence[_Unit], chosen: Sequence[int | None]) -> Plan:
    choices: dict[str, Candidate] = {}
    pairs: list[tuple[str, str]] = []
    reasons = dict.fromkeys((job.job_id for job in snapshot.jobs), _NO_OPTION)
    for unit, at in zip(units, chosen, strict=True):
        ids = [job.job_id for job in unit.jobs]
        if at is None:
            reasons.update(dict.fromkeys(ids, _WAITS))
        elif unit.halves:
            choices.update(zip(ids, unit.halves, strict=True))
            pairs.append((ids[0], ids[1]))
            reasons[ids[0]], reasons[ids[1]] = (f"packed with {mate}: both fit on one GPU" for mate in ids[::-1])
        else:
            choices[ids[0]] = unit.curve[at]
            count = unit.curve[at].config.num_gpus
            more = "the most it can use" if at + 1 == len(unit.curve) else "more would shorten other jobs more, or none"
            reasons[ids[0]] = f"{count} GPU{'s' if count > 1 else ''}: {more}"
    return Plan(choices, pairs=tuple(pairs), reasons=reasons)
