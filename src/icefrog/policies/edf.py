"""Earliest deadline first."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field

from icefrog.policies import base
from icefrog.policies.rigid import Words, admit
from icefrog.types import Candidates, JobView, Plan, Pricing, Snapshot

_WORDS = Words(runs="an early deadline, or room", waits="jobs with earlier deadlines come first")


class Edf:
    """The job whose deadline d = submission + ``deadline_s`` is the earliest runs first, at the GPU count it asked for.

    Jobs without a deadline come last, in order of submission. Optimal on one machine while all deadlines can be met (Liu and
    Layland); in overload it lets one late job make the next one late, unless ``late=last`` sends jobs whose deadline is over
    to the end of the line. It knows no durations, so it refuses nobody.
    """

    name: ClassVar[str] = "edf"
    source: ClassVar[str] = "Liu and Layland (JACM'73): earliest deadline first; rigid GPU requests"
    oracle: ClassVar[bool] = False
    pricing: ClassVar[Pricing] = Pricing(counts="requested", reads_progress=False)

    class Options(base.Options):
        """Knobs of ``edf``."""

        preempt: bool = Field(default=True, description="running jobs make way for earlier deadlines")
        late: Literal["first", "last"] = Field(
            default="first", description="where a job stands whose deadline is over: first keeps its place"
        )

    def __init__(self, options: Options) -> None:
        self.options = options

    def decide(self, snapshot: Snapshot, candidates: Candidates) -> Plan:
        """Admit in order of deadlines."""
        late_last = self.options.late == "last"

        def key(job: JobView) -> tuple[float, ...]:
            due_s = deadline(job)
            over = late_last and due_s <= snapshot.now_s
            return (math.inf if over else due_s, over, job.submit_s)

        jobs = snapshot.jobs if self.options.preempt and snapshot.views.waiting else snapshot.views.waiting
        ahead = [due_s for job in snapshot.jobs if late_last and (due_s := deadline(job)) > snapshot.now_s]
        stands_until_s = min(ahead, default=math.inf)
        return admit(snapshot, candidates, sorted(jobs, key=key), _WORDS).plan(stands_until_s=stands_until_s)


def deadline(job: JobView) -> float:
    """When the job is due, on the clock of the snapshot, s; inf without a deadline."""
    return math.inf if job.spec.deadline_s is None else job.submit_s + job.spec.deadline_s
