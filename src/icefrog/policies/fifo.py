"""First in, first out, at the requested GPU count, with optional back-filling."""

from __future__ import annotations

from typing import ClassVar

from icefrog.policies import base
from icefrog.policies.rigid import BACKFILL, Backfill, Words, estimated_s, queue_up
from icefrog.types import Candidates, Plan, Pricing, Snapshot

_WORDS = Words(runs="its turn came, and it runs until it ends", waits="jobs submitted earlier come first")


class Fifo:
    """Jobs run in order of submission, at the GPU count they asked for, until they end.

    They are never preempted and never moved. A job whose GPUs must lie together waits until they do. Without back-filling
    the first job that does not fit blocks those behind it. ``backfill=aggressive`` lets whoever fits use what it leaves
    over, which can delay it for as long as smaller jobs keep coming; ``easy`` only those that, by the estimates of what
    everybody still needs, do not delay it (Lifka, "The ANL/IBM SP scheduling system", JSSPP'95).
    """

    name: ClassVar[str] = "fifo"
    source: ClassVar[str] = "textbook: first come, first served; EASY back-filling: Lifka (JSSPP'95)"
    oracle: ClassVar[bool] = False

    class Options(base.Options):
        """Knobs of ``fifo``."""

        backfill: Backfill = BACKFILL

    def __init__(self, options: Options) -> None:
        self.options = options

    @property
    def pricing(self) -> Pricing:
        """At the requested count. Only EASY asks how long running jobs still need."""
        return Pricing(counts="requested", shares=False, reads_progress=self.options.backfill == "easy")

    def decide(self, snapshot: Snapshot, candidates: Candidates) -> Plan:
        """Keep what runs; admit by order of submission."""
        remaining_s = estimated_s(candidates, snapshot.now_s)
        return queue_up(snapshot, candidates, snapshot.views.waiting, self.options.backfill, _WORDS, remaining_s)
