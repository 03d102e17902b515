"""Pollux whose jobs freeze layers by the tuned FreezeOut schedule: one of the paper's baselines."""

from __future__ import annotations

from typing import ClassVar

from icefrog.policies.pollux import Pollux
from icefrog.types import Pricing


class PolluxPlus(Pollux):
    """:class:`~icefrog.policies.pollux.Pollux` with FreezeOut (:mod:`icefrog.estimate.freezeout`), tuned for each job.

    Goodput is that of the depth that a job has reached. No GPU is shared.
    """

    name: ClassVar[str] = "pollux+"
    source: ClassVar[str] = "Pollux (OSDI'21) with tuned FreezeOut, as IceFrog's paper compares it"
    pricing: ClassVar[Pricing] = Pricing(freezing="freezeout", batch="elastic")
