"""What rigid policies have in common: a job runs at the GPU count it asked for, on GPUs that lie together, or it waits.

Such policies differ in the order in which they take the jobs, and in who may be asked to leave. Both are arguments here, so
that a policy is little more than its order. Their plans name changes only (``Plan.keeps``): a decision in which nobody waits
costs next to nothing, any other O(jobs) besides sorting.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from icefrog.changes import free_gpus
from icefrog.placement import FreeGpus, num_nodes
from icefrog.policies import base
from icefrog.types import Candidate, Candidates, GpuId, JobView, Json, Plan, Snapshot

Gpus: TypeAlias = tuple[GpuId, ...]


def _backfill(value: object) -> object:
    """``true`` and ``false``, as in version 0.1."""
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.lower(), value)
    return {True: "aggressive", False: "none"}[value] if isinstance(value, bool) else value


Backfill: TypeAlias = Annotated[Literal["none", "aggressive", "easy"], BeforeValidator(_backfill)]
BACKFILL: Any = Field(
    default="none",
    description="who may pass a job that does not fit: none; aggressive: whoever fits; easy: whoever does not delay it",
)


@dataclass(frozen=True, slots=True)
class Words:
    """How a policy explains itself; clauses without a final stop, the same for all jobs."""

    runs: str
    """Why a job has GPUs: ``runs on 4 GPUs: <runs>``."""
    waits: str
    """Why a job has none: ``waits: <waits>``."""

    @property
    def waiting(self) -> str:
        """The reason of those that wait and have none of their own."""
        return f"waits: {self.waits}"


class Admission:
    """A decision in the making: who starts where, who must leave, and why. All others keep what they have."""

    def __init__(self, snapshot: Snapshot, candidates: Candidates, words: Words) -> None:
        self.free = free_gpus(snapshot)
        self.choices: dict[str, Candidate] = {}
        self.gpus: dict[str, Gpus] = {}
        self.preempted: set[str] = set()
        self.reasons: dict[str, str] = {}
        self._snapshot = snapshot
        self._candidates = candidates
        self._words = words

    def option(self, job: JobView) -> Candidate | None:
        """The job's candidate for the count it asked for; where there is none, the reason is noted."""
        wanted = job.spec.requested_gpus
        found = base.exclusive(self._candidates, job.job_id, wanted)
        if found is None:
            self.reasons[job.job_id] = f"cannot run on {gpus_text(wanted)} here"
        return found

    def start(self, job: JobView, candidate: Candidate, gpus: Gpus) -> None:
        """Give a job free GPUs."""
        self.free.hold(gpus)
        self.choices[job.job_id] = candidate
        self.gpus[job.job_id] = gpus
        self.reasons[job.job_id] = f"runs on {gpus_text(len(gpus))}: {self._words.runs}"
        self.preempted.discard(job.job_id)

    def leave_out(self, job: JobView, wanted: int) -> None:
        """A job in whose turn no place was found."""
        if self.free.num_free >= wanted:
            self.reasons[job.job_id] = f"waits for {gpus_text(wanted)}: enough are free, but spread over nodes"

    def evict(self, job_id: str, gpus: Gpus) -> None:
        """A running job must leave, unless it is started elsewhere later on."""
        self.free.release(gpus)
        self.preempted.add(job_id)
        self.reasons[job_id] = self._words.waiting

    @property
    def waits(self) -> bool:
        """Whether anybody waits once this is carried out."""
        waiting = self._snapshot.views.waiting
        return bool(self.preempted) or any(job.job_id not in self.choices for job in waiting)

    def plan(
        self, *, stands_until_s: float = math.inf, memory: Json = None, pairs: tuple[tuple[str, str], ...] = ()
    ) -> Plan:
        """The decision. If everybody runs, it stands for good."""
        waits = self.waits
        return Plan(
            choices=self.choices,
            pairs=pairs,
            reasons=self.reasons,
            memory=memory,
            gpus=self.gpus,
            stands_until_s=stands_until_s if waits else math.inf,
            keeps=True,
            content=not waits,
            preempted=frozenset(self.preempted),
            waiting_reason=self._words.waiting,
        )


def gpus_text(num_gpus: int) -> str:
    """``1 GPU``, ``4 GPUs``."""
    return "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"


# -- in order of priority ----------------------------------------------------------------------------------------------


def admit(snapshot: Snapshot, candidates: Candidates, order: Sequence[JobView], words: Words) -> Admission:
    """Everybody in turn takes what is there; who finds no place is passed by those behind.

    A running job of ``order`` stays where it is, unless somebody before it in the order finds no other place than its
    GPUs; then it looks for another one in its own turn. So nobody waits for a job of lower priority, nobody moves without
    need, and the same order again gives the same plan. Sharers (of a policy that was in charge before) run to their end.

    Args:
        snapshot: the situation.
        candidates: the jobs' options.
        order: the waiting jobs, and the running ones that may have to leave; the first in line first. All others keep
            their GPUs whatever happens.
        words: the reasons.
    """
    admission = Admission(snapshot, candidates, words)
    free = admission.free
    # Whoever may still be displaced, the first in line first.
    soft = {job.job_id: job.gpus for job in order if job.running and not job.shared}
    num_soft = sum(map(len, soft.values()))
    for job in order:
        if not soft and not free.num_free:
            break
        if (kept := soft.pop(job.job_id, None)) is not None:
            num_soft -= len(kept)
            continue
        if job.running and job.job_id not in admission.preempted:
            continue
        candidate = admission.option(job)
        if candidate is None:
            continue
        wanted = candidate.config.num_gpus
        kind = candidate.config.gpu_type
        gpus: Gpus | None = free.find(wanted, job.gpus, kind)
        if gpus is None and free.num_free + num_soft >= wanted:
            victims, gpus = _victims(free, soft, wanted, kind)
            for victim in victims:
                num_soft -= len(soft[victim])
                admission.evict(victim, soft.pop(victim))
            if victims and gpus is None:
                gpus = free.find(wanted, gpu_type=kind)
        if gpus is None:
            admission.leave_out(job, wanted)
        else:
            admission.start(job, candidate, gpus)
    return admission


def admit_into_free(
    snapshot: Snapshot, candidates: Candidates, waiting: Sequence[JobView], words: Words
) -> Admission | None:
    """What :func:`admit` decides where everybody who waits finds a free place, without a look at those that run.

    Args:
        waiting: the jobs that wait, the first in line first.

    Returns:
        None where somebody has to make room, or to wait.
    """
    admission = Admission(snapshot, candidates, words)
    for job in waiting:
        candidate = admission.option(job)
        if candidate is None:
            continue
        gpus = admission.free.find(candidate.config.num_gpus, job.gpus, candidate.config.gpu_type)
        if gpus is None:
            return None
        admission.start(job, candidate, gpus)
    return admission


def _victims(free: FreeGpus, soft: dict[str, Gpus], wanted: int, gpu_type: str) -> tuple[list[str], Gpus | None]:
    """Whom of ``soft`` a job displaces, the last in line first, and its place if it spans nodes (else there will be one).
    Nobody: all of them together are not enough."""
    if wanted <= free.largest_of(gpu_type):
        return _victims_on_a_node(free, soft, wanted, gpu_type), None
    gpus = _without(free, soft.values()).find(wanted, gpu_type=gpu_type)
    return ([], None) if gpus is None else (_in_the_way(soft, gpus), gpus)


def _victims_on_a_node(free: FreeGpus, soft: dict[str, Gpus], wanted: int, gpu_type: str) -> list[str]:
    """Up the line from its end, until some node has room; who has to leave it is who stands there, as far as needed."""
    room: dict[int, int] = {}
    found: dict[int, list[tuple[str, int]]] = defaultdict(list)  # node -> (job, its GPUs there)
    for job_id in reversed(soft):
        for node in dict.fromkeys(gpu.node for gpu in soft[job_id]):
            here = sum(gpu.node == node for gpu in soft[job_id])
            room[node] = room.get(node, free.free_in(node)) + here
            found[node].append((job_id, here))
            if room[node] >= wanted and free.has_type(node, gpu_type):
                return _needed(found[node], room[node] - wanted)
    return []


def _needed(victims: list[tuple[str, int]], spare: int) -> list[str]:
    """Without those, the first in line first, that can stay because the rest is enough."""
    needed = []
    for job_id, here in reversed(victims):
        if here <= spare:
            spare -= here
        else:
            needed.append(job_id)
    return needed


def _without(free: FreeGpus, holders: Iterable[Gpus]) -> FreeGpus:
    """What would be free if they left."""
    after = free.copy()
    for gpus in holders:
        after.release(gpus)
    return after


def _in_the_way(soft: dict[str, Gpus], gpus: Gpus) -> list[str]:
    """Who holds one of the GPUs, or spans nodes and would share one of them with a job that does, too."""
    taken, nodes = set(gpus), {gpu.node for gpu in gpus}
    return [
        job_id
        for job_id, held in soft.items()
        if not taken.isdisjoint(held) or (num_nodes(held) > 1 and any(gpu.node in nodes for gpu in held))
    ]


# -- a queue without preemption ----------------------------------------------------------------------------------------


def queue_up(
    snapshot: Snapshot,
    candidates: Candidates,
    waiting: Sequence[JobView],
    backfill: Backfill,
    words: Words,
    remaining_s: Callable[[JobView], float],
) -> Plan:
    """Running jobs run to their end; the waiting ones start in one order.

    A job that needs more GPUs than are in service is passed by all others.

    Args:
        snapshot: the situation.
        candidates: the jobs' options.
        waiting: the jobs that wait, the first in line first.
        backfill: ``none``: the first job that finds no place blocks those behind it. ``aggressive``: whoever finds one
            starts, which can delay the blocked job for as long as smaller ones keep coming. ``easy``: see :func:`_easy`.
        words: the reasons.
        remaining_s: time that a job, running or waiting, still needs, s; asked for with ``easy`` only.
    """
    if backfill == "aggressive":
        return admit(snapshot, candidates, waiting, words).plan()
    admission = Admission(snapshot, candidates, words)
    for position, job in enumerate(waiting):
        candidate = admission.option(job)
        if candidate is None:
            continue
        wanted = candidate.config.num_gpus
        gpus = admission.free.find(wanted, gpu_type=candidate.config.gpu_type)
        if gpus is not None:
            admission.start(job, candidate, gpus)
        elif wanted > snapshot.num_gpus:
            admission.reasons[job.job_id] = f"needs {gpus_text(wanted)}, which are not in service"
        else:
            admission.leave_out(job, wanted)
            if backfill == "easy" and admission.free.num_free:
                running = [*snapshot.views.running, *(one for one in waiting if one.job_id in admission.choices)]
                ends = [(remaining_s(one), admission.gpus.get(one.job_id, one.gpus)) for one in running]
                _easy(admission, ends, candidate, waiting[position + 1 :], remaining_s)
            break
    # A reservation moves with the estimates of those that run: it is looked at again in every round.
    return admission.plan(stands_until_s=0.0 if backfill == "easy" else math.inf)


def estimated_s(candidates: Candidates, now_s: float) -> Callable[[JobView], float]:
    """The time that a job still needs by its estimate, at the GPUs it holds or else asked for; inf without an estimate."""

    def remaining_s(job: JobView) -> float:
        count = len(job.gpus) if job.running else job.spec.requested_gpus
        candidate = base.exclusive(candidates, job.job_id, count)
        return math.inf if candidate is None else base.remaining_s(candidate, job, now_s)

    return remaining_s


def _easy(
    admission: Admission,
    ends: Iterable[tuple[float, Gpus]],
    blocked: Candidate,
    behind: Iterable[JobView],
    remaining_s: Callable[[JobView], float],
) -> None:
    """EASY back-filling (Lifka, JSSPP'95; Mu'alem and Feitelson, TPDS'01), on named GPUs.

    The blocked job gets a reservation: the earliest time at which, by the estimates, enough running jobs have ended, and
    the GPUs it would take then. A job behind it starts if it ends before that time, or takes none of those GPUs.

    Args:
        admission: the decision so far.
        ends: (estimated time left, s; GPUs) of those that run; sharers name theirs twice.
        blocked: what the blocked job would run with.
        behind: those behind it, in order.
        remaining_s: how long they would run.
    """
    left_s: dict[Gpus, float] = {}
    for end_s, gpus in ends:
        left_s[gpus] = max(end_s, left_s.get(gpus, 0.0))
    future, shadow_s = admission.free.copy(), math.inf
    reserved: Gpus = ()
    for held in sorted(left_s, key=lambda gpus: left_s[gpus]):
        future.release(held)
        if (place := future.find(blocked.config.num_gpus, gpu_type=blocked.config.gpu_type)) is not None:
            shadow_s, reserved = left_s[held], place
            break
    spare = admission.free.copy()  # what the reservation leaves over
    spare.hold([gpu for gpu in reserved if spare.are_free([gpu])])
    for job in behind:
        if not admission.free.num_free:
            break
        candidate = admission.option(job)
        if candidate is None:
            continue
        count, kind = candidate.config.num_gpus, candidate.config.gpu_type
        found = spare.find(count, gpu_type=kind)
        if found is None and count <= admission.free.num_free and remaining_s(job) <= shadow_s:
            found = admission.free.find(count, gpu_type=kind)
        if found is not None:
            admission.start(job, candidate, found)
            spare.hold([gpu for gpu in found if spare.are_free([gpu])])
