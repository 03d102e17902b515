"""Shortest job first, not preemptive, told the true durations: an oracle."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from icefrog.policies import base
from icefrog.policies.rigid import BACKFILL, Backfill, Words, queue_up
from icefrog.types import Candidates, JobView, Plan, Pricing, Snapshot

_WORDS = Words(
    runs="its turn came, and it runs until it ends", waits="shorter jobs come first, and nobody is preempted"
)


class Sjf:
    """Of the waiting jobs the one with the least true service time starts first, at the GPU count it asked for.

    Nobody is preempted. ``size=gpu_time`` orders by duration x GPUs instead (shortest service first, which Helios' QSSF
    approximates by prediction). An oracle: it reads the logged durations. Ties go to the earlier submission.
    """

    name: ClassVar[str] = "sjf"
    source: ClassVar[str] = "textbook: shortest job first (oracle: knows true durations); by GPU time: Helios (SC'21)"
    oracle: ClassVar[bool] = True
    pricing: ClassVar[Pricing] = Pricing(counts="requested", reads_progress=False)

    class Options(base.Options):
        """Knobs of ``sjf``."""

        size: Literal["duration", "gpu_time"] = Field(
            default="duration", description="what is short: duration, or gpu_time = duration x GPUs"
        )
        backfill: Backfill = BACKFILL

    def __init__(self, options: Options) -> None:
        self.options = options

    def decide(self, snapshot: Snapshot, candidates: Candidates) -> Plan:
        """Keep what runs; admit by size."""
        remaining = snapshot.oracle_remaining_s or {}
        by_gpu_time = self.options.size == "gpu_time"

        def key(job: JobView) -> tuple[float, ...]:
            size = remaining.get(job.job_id, 0.0)
            return (size * job.spec.requested_gpus if by_gpu_time else size, job.submit_s)

        order = sorted(snapshot.views.waiting, key=key)
        return queue_up(
            snapshot, candidates, order, self.options.backfill, _WORDS, lambda job: remaining.get(job.job_id, 0.0)
        )
