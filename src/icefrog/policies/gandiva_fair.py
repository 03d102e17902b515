"""Fair shares of GPU time for users, by gang-aware stride scheduling (Gandiva_fair)."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from icefrog.policies import base
from icefrog.policies.rigid import Words, admit
from icefrog.types import Candidates, JobView, Json, Plan, Pricing, Snapshot

_WORDS = Words(runs="its user's share of GPU time", waits="users who got less GPU time come first")


@dataclass(frozen=True, slots=True)
class Books:
    """What is remembered while anybody waits."""

    at_s: float | None = None  # when they were closed
    passes: Mapping[str, float] | None = None  # user -> GPU-seconds had, above the user who had the least
    held: Mapping[str, int] | None = None  # user -> GPUs held since then


class GandivaFair:
    """Every user gets the same share of GPU time, however many jobs and however large.

    Stride scheduling (Waldspurger and Weihl, 1995): a user's *pass* grows by the GPU-seconds the user gets over the user's
    tickets; all users hold the same number. At the start of each quantum the user with the smallest pass is served first:
    one job at a time, whose GPUs x quantum then count as had, so that users alternate in proportion. Gang-aware: a large
    job whose turn it is takes all its GPUs at once, from whoever comes later in the line, and is passed, not forgotten,
    while it cannot have them: its user's pass stays small, so that it is first in the next quantum. Within a user, the job
    that got the least service comes first. Between the starts of quanta nobody is preempted; GPUs that come free go to the
    first in the same order.

    While nobody waits everybody has what he wants: nothing is booked then. Whoever comes anew begins with the smallest
    pass there is, with neither credit nor debt.

    Differences from the paper: one central scheduler sees all servers (the paper splits stride scheduling into a central
    part for large jobs and one for each server, and balances load between servers by migration). Trading of GPU
    generations between users is left out: all GPUs count the same.
    """

    name: ClassVar[str] = "gandiva-fair"
    source: ClassVar[str] = "Gandiva_fair (EuroSys'20): fair GPU time for users, gang-aware stride; without trading"
    oracle: ClassVar[bool] = False
    pricing: ClassVar[Pricing] = Pricing(counts="requested", reads_progress=False)

    class Options(base.Options):
        """Knobs of ``gandiva-fair``."""

        quantum_s: float = Field(default=600.0, gt=0, description="who runs is decided anew once in so long")
        user: Literal["user", "vc"] = Field(
            default="user", description="the label that names a job's owner; a job without it is a user of its own"
        )

    def __init__(self, options: Options) -> None:
        self.options = options

    def decide(self, snapshot: Snapshot, candidates: Candidates) -> Plan:
        """Close the books, then serve users in the order of their passes."""
        now_s, views = snapshot.now_s, snapshot.views
        if not views.waiting:
            return admit(snapshot, candidates, (), _WORDS).plan(memory={})
        books = _books(snapshot.memory)
        passes = self._passes(snapshot, books)
        anew = books.at_s is not None and now_s >= self._quantum_end_s(books.at_s)
        jobs = snapshot.jobs if anew else views.waiting
        admission = admit(snapshot, candidates, self._in_line(jobs, passes, now_s), _WORDS)
        if not admission.waits:
            return admission.plan(memory={})
        held: dict[str, int] = defaultdict(int)
        for job in snapshot.jobs:
            if job.running and job.job_id not in admission.preempted:
                held[self._user(job)] += len(job.gpus)
            elif job.job_id in admission.choices:
                held[self._user(job)] += len(admission.gpus[job.job_id])
        memory = {"at_s": now_s, "passes": passes, "held": dict(held)}
        return admission.plan(stands_until_s=self._quantum_end_s(now_s), memory=memory)

    def _user(self, job: JobView) -> str:
        return job.spec.labels.get(self.options.user, job.job_id)

    def _quantum_end_s(self, time_s: float) -> float:
        return (math.floor(time_s / self.options.quantum_s) + 1) * self.options.quantum_s

    def _passes(self, snapshot: Snapshot, books: Books) -> dict[str, float]:
        """The passes now, the smallest being 0."""
        passes = {}
        passed_s = 0.0 if books.at_s is None else snapshot.now_s - books.at_s
        users = dict.fromkeys(map(self._user, snapshot.jobs))
        for user in users:
            if books.passes is not None and user in books.passes:
                passes[user] = books.passes[user] + passed_s * (books.held or {}).get(user, 0)
        least = min(passes.values(), default=0.0)
        return {user: passes.get(user, least) - least for user in users}

    def _in_line(self, jobs: tuple[JobView, ...], passes: Mapping[str, float], now_s: float) -> list[JobView]:
        """Jobs as their users' turns come, each turn counting as a quantum on all its GPUs."""
        mine: dict[str, list[JobView]] = defaultdict(list)
        for job in jobs:
            mine[self._user(job)].append(job)
        for queue in mine.values():
            queue.sort(key=lambda job: (job.attained_service_s(now_s), job.submit_s), reverse=True)
        turns = [(passes[user], number, user) for number, user in enumerate(mine)]
        heapq.heapify(turns)
        order = []
        while turns:
            value, number, user = turns[0]
            job = mine[user].pop()
            order.append(job)
            if mine[user]:
                heapq.heapreplace(turns, (value + job.spec.requested_gpus * self.options.quantum_s, number, user))
            else:
                heapq.heappop(turns)
        return order


def _books(memory: Json) -> Books:
    if not isinstance(memory, dict) or "at_s" not in memory:
        return Books()
    return Books(float(memory["at_s"]), memory["passes"], memory["held"])
