"""First in, first out, at the requested GPU count, with optional back-filling."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from icefrog.placement import place
from icefrog.policies import base
from icefrog.types import Candidate, Candidates, Plan, Pricing, Snapshot


class Fifo:
    """Jobs run in order of submission, at the GPU count they asked for, until they end.

    They are never preempted and never moved. A job whose GPUs must lie together waits until they do.
    Without back-filling the first job that does not fit blocks those behind it. With ``backfill`` later jobs may use what it
    leaves over, which can delay it for as long as smaller jobs keep coming (no reservation is made).
    """

    name: ClassVar[str] = "fifo"
    source: ClassVar[str] = "textbook: first come, first served; rigid GPU requests, no preemption"
    oracle: ClassVar[bool] = False
    pricing: ClassVar[Pricing] = Pricing()

    class Options(base.Options):
        """Knobs of ``fifo``."""

        backfill: bool = Field(default=False, description="let later jobs pass one that does not fit")

    def __init__(self, options: Options) -> None:
        self.options = options

    def decide(self, snapshot: Snapshot, candidates: Candidates) -> Plan:
        """Keep what runs; admit by order of submission while GPUs last."""
        free = snapshot.num_gpus
        choices: dict[str, Candidate] = {}
        reasons: dict[str, str] = {}
        for job in snapshot.jobs:
            # A job may hold another count than it asked for, or half a GPU, if another policy was in charge before.
            candidate = base.exclusive(candidates, job.job_id, job.num_gpus) if job.running else None
            if candidate is not None and job.num_gpus <= free:
                free -= job.num_gpus
                choices[job.job_id] = candidate
                reasons[job.job_id] = f"keeps what it holds ({job.num_gpus} GPUs) until it ends"
        blocked_by: str | None = None
        for job in (job for job in snapshot.jobs if job.job_id not in choices):
            wanted = job.spec.requested_gpus
            candidate = base.exclusive(candidates, job.job_id, wanted)
            if candidate is None:
                reasons[job.job_id] = f"cannot run on {wanted} GPUs here"
            elif blocked_by is not None and not self.options.backfill:
                reasons[job.job_id] = f"waits behind {blocked_by}, which was submitted earlier"
            elif wanted > free:
                blocked_by = blocked_by or job.job_id
                reasons[job.job_id] = f"needs {wanted} GPUs, {free} are free"
            elif place(snapshot, Plan({**choices, job.job_id: candidate}, migrate=False)).unplaced:
                blocked_by = blocked_by or job.job_id
                reasons[job.job_id] = f"needs {wanted} GPUs together; {free} are free, but spread over nodes"
            else:
                free -= wanted
                choices[job.job_id] = candidate
                reasons[job.job_id] = f"its turn: starts on the {wanted} GPUs it asked for"
        return Plan(choices=choices, reasons=reasons, migrate=False)
