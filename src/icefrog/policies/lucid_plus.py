"""Lucid whose jobs freeze layers by the tuned FreezeOut schedule: one of the paper's baselines."""

from __future__ import annotations

from typing import ClassVar

from icefrog.policies.lucid import Lucid
from icefrog.types import Pricing


class LucidPlus(Lucid):
    """:class:`~icefrog.policies.lucid.Lucid` with FreezeOut (:mod:`icefrog.estimate.freezeout`), tuned for each job.

    Scores and memory are those of the depth that a job has reached, so that frozen jobs are packed more easily.
    """

    name: ClassVar[str] = "lucid+"
    source: ClassVar[str] = "Lucid (ASPLOS'23) with tuned FreezeOut, as IceFrog's paper compares it; oracle durations"
    pricing: ClassVar[Pricing] = Pricing(counts="requested", freezing="freezeout")
