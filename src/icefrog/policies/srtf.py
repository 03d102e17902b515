"""Shortest remaining time first, preemptive, told the true remaining times: an oracle, as a yardstick."""

from __future__ import annotations

from typing import ClassVar

from icefrog.policies import base
from icefrog.policies.rigid import Words, admit, admit_into_free
from icefrog.types import Candidates, JobView, Plan, Pricing, Snapshot

_WORDS = Words(runs="little time left", waits="jobs with less time left come first")


class Srtf:
    """The job with the least true service time left runs first, at the GPU count it asked for; longer ones are preempted.

    Jobs that do not fit in what shorter ones leave are passed by longer ones. An oracle: it reads the logged durations,
    which no real scheduler knows. Ties go to the earlier submission.
    """

    name: ClassVar[str] = "srtf"
    source: ClassVar[str] = "textbook: shortest remaining time first (oracle: knows true durations), preemptive"
    oracle: ClassVar[bool] = True
    pricing: ClassVar[Pricing] = Pricing(counts="requested", shares=False, reads_progress=False)

    class Options(base.Options):
        """``srtf`` has no knobs."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def decide(self, snapshot: Snapshot, candidates: Candidates) -> Plan:
        """Admit in order of true remaining service time."""
        remaining = snapshot.oracle_remaining_s or {}

        def key(job: JobView) -> tuple[float, float]:
            return remaining.get(job.job_id, 0.0), job.submit_s

        waiting = sorted(snapshot.views.waiting, key=key)
        admission = admit_into_free(snapshot, candidates, waiting, _WORDS)
        if admission is None:
            admission = admit(snapshot, candidates, sorted(snapshot.jobs, key=key), _WORDS)
        # The plan stands: those that run only come further forward in the order, and still leave no room for others.
        return admission.plan()
