"""The paper's policy: all jobs decided together by IceShare, on estimates that know what freezing does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from icefrog.policies import base
from icefrog.policies.iceshare import ExclusiveOption, Job, Problem, SharedOption, Solution, solve
from icefrog.policies.iceshare.problem import SHARED_GPUS
from icefrog.policies.partners import Pairing, steady_pairing
from icefrog.types import Candidate, Candidates, GpuId, JobView, Plan, Pricing, Snapshot


@dataclass(frozen=True, slots=True)
class _Offer:
    """What one job brings into a decision, in the order of the problem's options."""

    view: JobView
    alone: tuple[Candidate, ...]
    shared: tuple[Candidate, ...]
    waits_since_s: float | None  # None: it runs, and owes nobody
    must_run: bool


_HOUR_S = 3600.0
_SHORTEST_S = 300.0
"""Added to remaining times, so that a job about to end is not worth all others together."""
_LARGEST_AGE = 1.0 - 1e-6
"""Of a job's time to accuracy: a job that is done but for rounding still has a remaining time."""
_TOLERANCE = 1e-3
"""Gap to the bound that is good enough: the estimates are far less exact."""
_TIMES_THE_RESTART = 4.0
"""What a running job's change must gain, in times of what restarts would cost if it were moved that often for good."""
_REVIEW_SHARE = 0.05
"""A plan is looked at again when so much of the shortest remaining time is over."""
_LEAST_REVIEW_S = 60.0

_Turn: TypeAlias = tuple[float, float]
"""(since when the job had waited, since when it runs) of a job that was forced to run, s."""


class IceFrog:
    """Largest sum of IceShares above a fairness floor, exclusive GPUs and sharing pairs in one exact decision (section 8).

    A job that has waited longer than ``max_wait_s`` is forced to run, the longest waiting first, and then keeps running for
    at least ``min_run_s``. A change of a running job's configuration must be worth its restart, and ``min_gain`` besides:
    estimates are not so exact that the last percent could be told from noise, and where jobs come and go nothing lasts. With
    ``batch=fixed`` it must gain the less the longer the job has run undisturbed: a job of days on a quiet cluster is not
    left with a sixth less than its best speed for a restart of a minute. With elastic batches the cluster is full, and that
    was measured to cost a percent. A job that ends before a restart would be over keeps what it has, or waits.
    """

    name: ClassVar[str] = "icefrog"
    source: ClassVar[str] = "IceFrog: layer-elastic jobs, IceShare (Eq. 15-18), solved exactly"
    oracle: ClassVar[bool] = False

    class Options(base.Options):
        """Knobs of ``icefrog``."""

        rho: float = Field(
            default=0.5, ge=0.0, le=1.0, description="fairness: every job reaches rho x the max-min share"
        )
        max_wait_s: float = Field(default=7200.0, gt=0, description="a job that waited longer is forced to run")
        min_run_s: float = Field(default=1800.0, ge=0, description="a forced job runs at least this long")
        turn_share: float = Field(
            default=0.25, ge=0, le=1, description="of the GPUs, for forced jobs together; the first in line always runs"
        )
        share: bool = Field(default=True, description="let pairs of jobs share a GPU")
        slowdown: float = Field(
            default=0.9, gt=0.0, le=1.0, description="speed of a sharer that is reckoned with, 1 = alone"
        )
        penalty: Literal["tuner", "freezeout", "signal"] = Field(
            default="tuner",
            description="freeze by the frozen penalty (Eq. 3), by the share of the signal that is left to train (the rule "
            "progress), or by the tuned FreezeOut schedule (ablation)",
        )
        throughput: Literal["layer-aware", "ddp-only"] = Field(
            default="layer-aware", description="ddp-only: sharded jobs are priced as data-parallel ones (ablation)"
        )
        batch: Literal["fixed", "elastic"] = Field(
            default="elastic", description="elastic: within the range that a job gives; fixed: its first batch"
        )
        min_gain: float = Field(
            default=0.2,
            ge=0,
            description="a running job's change must save this share of its remaining time (less: see the class)",
        )
        urgency: float = Field(
            default=1.0,
            ge=0,
            le=2,
            description="how much more short jobs count: shares weigh 1 / remaining time to this power; 0: all the same",
        )

    def __init__(self, options: Options) -> None:
        self.options = options

    @property
    def pricing(self) -> Pricing:
        """The Layer Tuner by default; the options of the paper's ablations change it."""
        chosen = self.options
        return Pricing(
            freezing=chosen.penalty,
            batch=chosen.batch,
            sharing_speed=chosen.slowdown,
            throughput=chosen.throughput,
        )

    def decide(self, snapshot: Snapshot, candidates: Candidates) -> Plan:
        """One IceShare problem: build, solve, map back."""
        forced = _memory(snapshot.memory)
        offers = self._offers(snapshot, candidates, forced)
        reasons = dict.fromkeys((job.job_id for job in snapshot.jobs), "no configuration of it fits this cluster")
        pairs: tuple[tuple[str, str], ...] = ()
        choices = self._settled(offers, snapshot)
        if choices is not None:
            reasons |= {
                offer.view.job_id: _why_running(offer, choices[offer.view.job_id], 1.0, None) for offer in offers
            }
        else:
            partner = _partners(snapshot)
            problem = Problem.from_jobs(
                snapshot.num_gpus,
                [self._job(offer, partner.get(offer.view.job_id), snapshot.now_s) for offer in offers],
                gpu_mem_bytes=snapshot.cluster.gpu_mem_bytes,
                rho=self.options.rho,
            )
            solution = solve(problem, tolerance=_TOLERANCE)
            pairing = steady_pairing(solution, self.options.min_gain)
            choices = _choices(offers, solution, pairing)
            reasons |= _reasons(offers, choices, solution, pairing)
            pairs = tuple((offers[i].view.job_id, offers[j].view.job_id) for i, j in pairing.pairs)
        return Plan(
            choices=choices,
            pairs=pairs,
            reasons=reasons,
            memory=self._remember(snapshot, offers, choices, forced),
            stands_until_s=self._stands_until_s(offers, snapshot.now_s),
        )

    def _settled(self, offers: Sequence[_Offer], snapshot: Snapshot) -> dict[str, Candidate] | None:
        """What runs, where every job runs alone with the GPUs that are best for it: no solver could do better."""
        choices: dict[str, Candidate] = {}
        for offer in offers:
            view = offer.view
            own = next((c for c in offer.alone if c.config.num_gpus == view.num_gpus), None)
            if (
                not view.running
                or view.shared
                or own is None
                or not snapshot.down.isdisjoint(g.node for g in view.gpus)
            ):
                return None
            best_s = min(c.estimate.tta_s for c in offer.alone)
            if best_s + self._charge_s(offer, snapshot.now_s) < own.estimate.tta_s:
                return None
            choices[view.job_id] = own
        return choices

    def _charge_s(self, offer: _Offer, now_s: float) -> float:
        """What a change of a running job's configuration is charged: its restart, and the gain that it must bring."""
        view, gain = offer.view, self.options.min_gain
        if self.options.batch == "fixed" and view.holding_since_s is not None:
            gain = min(gain, _TIMES_THE_RESTART * view.restart_s / max(now_s - view.holding_since_s, 1.0))
        return view.restart_s + gain * _held_remaining_s(offer, now_s)

    def _stands_until_s(self, offers: Sequence[_Offer], now_s: float) -> float:
        """Progress alone changes the plan when a good part of the shortest remaining time is over; or a turn begins or
        ends, or a job has waited long enough to be forced."""
        until_s = math.inf
        for offer in offers:
            until_s = min(until_s, now_s + _REVIEW_SHARE * _remaining_s(offer, now_s))
            if offer.must_run:
                until_s = min(until_s, now_s + max(self.options.min_run_s / 4, _LEAST_REVIEW_S))
            elif offer.view.waiting_since_s is not None:
                until_s = min(until_s, offer.view.waiting_since_s + self.options.max_wait_s)
        return until_s

    # -- into the problem --------------------------------------------------------------------------------------------------

    def _offers(self, snapshot: Snapshot, candidates: Candidates, forced: Mapping[str, _Turn]) -> list[_Offer]:
        """Jobs that have an option; those that must run first, the longest waiting at the front, then by submission."""
        offers = []
        largest = max(snapshot.cluster.gpus_per_node)
        for view in snapshot.jobs:
            options = candidates.get(view.job_id, ())
            alone = _whole_nodes(tuple(c for c in options if not c.config.shared), largest)
            if not alone:
                continue
            shared = tuple(c for c in options if c.config.shared) if self.options.share else ()
            if (own := _about_to_end(view, alone, snapshot.now_s)) is not None:
                alone, shared = (own,), ()
            since_s, must_run = self._claim(view, snapshot.now_s, forced)
            offers.append(_Offer(view, alone, shared, since_s, must_run))
        offers.sort(key=lambda offer: (not offer.must_run, offer.waits_since_s if offer.must_run else 0.0))
        return self._within_turn_share(offers, snapshot.num_gpus)

    def _within_turn_share(self, offers: list[_Offer], num_gpus: int) -> list[_Offer]:
        """Forced are the first in line, and those behind it as far as their share of the GPUs goes: with everybody
        forced, a long queue would turn into round robin."""
        left = self.options.turn_share * num_gpus
        for at, offer in enumerate(offers):
            if not offer.must_run:
                break
            left -= min(c.config.num_gpus for c in offer.alone)
            if left < 0 and at > 0:
                return [*offers[:at], *(replace(o, must_run=False) for o in offers[at:])]
        return offers

    def _claim(self, view: JobView, now_s: float, forced: Mapping[str, _Turn]) -> tuple[float | None, bool]:
        """(since when it waits, or waited before its present turn; whether it must run now).

        Those two in one order are what bounds the wait: nobody who came to wait later, and was forced since, is in the way.
        """
        if not view.running:
            since_s = view.waiting_since_s
            return since_s, since_s is not None and now_s - since_s > self.options.max_wait_s
        turn = forced.get(view.job_id)
        if turn is None or now_s >= turn[1] + self.options.min_run_s:
            return None, False
        return turn[0], True

    def _job(self, offer: _Offer, partner: str | None, now_s: float) -> Job:
        view = offer.view
        current: float | None = None
        if view.running:
            current = SHARED_GPUS if view.shared else float(view.num_gpus)
        return Job(
            id=view.job_id,
            options=tuple(ExclusiveOption(c.config.num_gpus, c.estimate.tta_s) for c in offer.alone),
            shared=tuple(
                SharedOption(c.estimate.tta_s, c.estimate.mem_bytes, c.estimate.util_pct) for c in offer.shared
            ),
            weight=view.spec.weight,
            current=current,
            partner=partner,
            restart_s=self._charge_s(offer, now_s),
            must_run=offer.must_run,
            age_s=min(max(now_s - view.submit_s, 0.0), _LARGEST_AGE * _best_s(offer)),
            urgency=self._urgency(_remaining_s(offer, now_s)),
        )

    def _urgency(self, remaining_s: float) -> float:
        """(1 h / remaining time)^urgency; remaining times below a few minutes are all the same."""
        return float((_HOUR_S / (remaining_s + _SHORTEST_S)) ** self.options.urgency)

    def _remember(
        self,
        snapshot: Snapshot,
        offers: Sequence[_Offer],
        choices: Mapping[str, Candidate],
        forced: Mapping[str, _Turn],
    ) -> Any:
        """Whose turn it is: {"forced": {job: [waited since, runs since]}}. Entries leave when the turn is over."""
        kept: dict[str, list[float]] = {}
        for offer in offers:
            job_id = offer.view.job_id
            if not offer.must_run or offer.waits_since_s is None or job_id not in choices:
                continue
            runs_since_s = forced[job_id][1] if offer.view.running else snapshot.now_s
            kept[job_id] = [offer.waits_since_s, runs_since_s]
        return {"forced": kept}


def _memory(memory: Any) -> Mapping[str, _Turn]:
    found = memory.get("forced", {}) if isinstance(memory, dict) else {}
    return {job_id: (float(turn[0]), float(turn[1])) for job_id, turn in found.items()}


def _whole_nodes(options: tuple[Candidate, ...], node_gpus: int) -> tuple[Candidate, ...]:
    """Without counts above a node that are not whole nodes (section 9), unless the job has nothing else."""
    tidy = tuple(c for c in options if c.config.num_gpus <= node_gpus or c.config.num_gpus % node_gpus == 0)
    return tidy or options


def _about_to_end(view: JobView, alone: Sequence[Candidate], now_s: float) -> Candidate | None:
    """What a job runs with that ends before a restart would be over: whatever it was given, it would end later."""
    if not view.running or view.shared:
        return None
    own = next((c for c in alone if c.config.num_gpus == view.num_gpus), None)
    return own if own is not None and base.remaining_s(own, view, now_s) <= view.restart_s else None


def _best_s(offer: _Offer) -> float:
    """The shortest estimated time to accuracy, age included."""
    return min(c.estimate.tta_s for c in (*offer.alone, *offer.shared))


def _remaining_s(offer: _Offer, now_s: float) -> float:
    """Estimated time left with the GPUs that are best for it."""
    return max(_best_s(offer) - max(now_s - offer.view.submit_s, 0.0), 0.0)


def _held_remaining_s(offer: _Offer, now_s: float) -> float:
    """Estimated time left as the job runs now; 0 for one that waits (it pays no restart either)."""
    view = offer.view
    same = [c for c in (offer.shared if view.shared else offer.alone) if c.config.num_gpus == view.num_gpus]
    if not view.running or not same:
        return 0.0
    return max(min(c.estimate.tta_s for c in same) - max(now_s - view.submit_s, 0.0), 0.0)


def _partners(snapshot: Snapshot) -> dict[str, str]:
    """Who shares a GPU with whom, both ways."""
    on_gpu: dict[tuple[GpuId, ...], list[str]] = {}
    for view in snapshot.views.running:
        if view.shared:
            on_gpu.setdefault(view.gpus, []).append(view.job_id)
    pairs = [ids for ids in on_gpu.values() if len(ids) == 2]
    return {a: b for pair in pairs for a, b in (pair, pair[::-1])}


# -- back from the solution ------------------------------------------------------------------------------------------------


def _choices(offers: Sequence[_Offer], solution: Solution, pairing: Pairing) -> dict[str, Candidate]:
    problem = solution.problem
    choices: dict[str, Candidate] = {}
    for index, offer in enumerate(offers):
        if (option := int(solution.option[index])) >= 0:
            choices[offer.view.job_id] = offer.alone[option - int(problem.opt_ptr[index])]
        elif index in pairing.option:
            choices[offer.view.job_id] = offer.shared[pairing.option[index] - int(problem.shr_ptr[index])]
    return choices


def _reasons(
    offers: Sequence[_Offer], choices: Mapping[str, Candidate], solution: Solution, pairing: Pairing
) -> dict[str, str]:
    """In words. Rounded, so that a reason changes (and is logged again) only when the situation does."""
    partner = {i: offers[j].view.job_id for pair in pairing.pairs for i, j in (pair, pair[::-1])}
    best_s = solution.problem.best_tta_s.tolist()
    reasons = {}
    for index, offer in enumerate(offers):
        choice = choices.get(offer.view.job_id)
        if choice is None:
            reasons[offer.view.job_id] = _why_waiting(offer)
        else:
            share = min(best_s[index] / choice.estimate.tta_s, 1.0)
            reasons[offer.view.job_id] = _why_running(offer, choice, share, partner.get(index))
    return reasons


def _why_running(offer: _Offer, choice: Candidate, share: float, mate: str | None) -> str:
    gpus = choice.config.num_gpus
    where = f"shares a GPU with {mate}" if mate is not None else f"{gpus} GPU" + ("s" if gpus > 1 else "")
    text = f"{where}: {share:.1f} of its best time"
    fastest = min(offer.alone, key=lambda c: c.estimate.tta_s).config.num_gpus
    if share < 0.95 and (fastest != gpus or mate is not None):
        text += f"; {fastest} would be best for it, but cost others more"
    if offer.must_run:
        text += "; it has waited long, so it runs now"
    return text


def _why_waiting(offer: _Offer) -> str:
    fewest = min(c.config.num_gpus for c in offer.alone)
    needs = f"it needs {fewest} GPU" + ("s" if fewest > 1 else "")
    if offer.must_run:
        return f"waits: {needs}; jobs that have waited longer come first"
    return f"waits: {needs}, which bring other jobs closer to their best time"
