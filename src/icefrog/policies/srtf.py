"""Shortest remaining time first, preemptive, told the true remaining times: an oracle, as a yardstick."""

from __future__ import annotations

from typing import ClassVar

from icefrog.policies import base
from icefrog.types import Candidate, Candidates, Plan, Pricing, Snapshot


class Srtf:
    """The job with the least true service time left runs first, at the GPU count it asked for; longer ones are preempted.

    An oracle: it reads the logged durations, which no real scheduler knows. Ties go to the earlier submission.
    """

    name: ClassVar[str] = "srtf"
    source: ClassVar[str] = "textbook: shortest remaining time first (oracle: knows true durations), preemptive"
    oracle: ClassVar[bool] = True
    pricing: ClassVar[Pricing] = Pricing()

    class Options(base.Options):
        """``srtf`` has no knobs."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def decide(self, snapshot: Snapshot, candidates: Candidates) -> Plan:
        """Admit in order of true remaining service time, skipping jobs that do not fit in what is left."""
        remaining = snapshot.oracle_remaining_s or {}
        order = sorted(snapshot.jobs, key=lambda job: (remaining.get(job.job_id, 0.0), job.submit_s, job.job_id))
        free = snapshot.num_gpus
        choices: dict[str, Candidate] = {}
        reasons: dict[str, str] = {}
        for rank, job in enumerate(order):
            wanted = job.spec.requested_gpus
            candidate = base.exclusive(candidates, job.job_id, wanted)
            if candidate is None:
                reasons[job.job_id] = f"no {wanted} GPUs can be had together"
            elif wanted > free:
                reasons[job.job_id] = f"{rank} jobs have less time left; needs {wanted} GPUs, {free} are left over"
            else:
                free -= wanted
                choices[job.job_id] = candidate
                reasons[job.job_id] = f"no. {rank + 1} by remaining time: runs on the {wanted} GPUs it asked for"
        return Plan(choices=choices, reasons=reasons)
