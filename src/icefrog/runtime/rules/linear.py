"""Depth rises linearly with progress: the simplest schedule, as in MosaicML Composer's ``LayerFreezing``."""

from __future__ import annotations

import math

from icefrog.errors import UserError
from icefrog.runtime.rules.base import FreezingRule, Proposal, Situation


class Linear(FreezingRule):
    """l(t) = floor(l_max (t - t_start) / (t_end - t_start)), between 0 and l_max; t: share of P0 done.

    l_max is the deepest that the bounds allow (``max_fraction`` of the layers). Defaults as in Composer: it starts in the
    middle of training and is at its deepest at the end.

    Args:
        start_share: t_start.
        end_share: t_end, above t_start.

    Raises:
        UserError: not 0 <= start_share < end_share <= 1.
    """

    name = "linear"

    def __init__(self, start_share: float = 0.5, end_share: float = 1.0) -> None:
        if not 0.0 <= start_share < end_share <= 1.0:
            raise UserError(
                f"Linear(start_share={start_share}, end_share={end_share}) is not a rule",
                "give two shares of training, 0 <= start_share < end_share <= 1",
            )
        self.start_share = start_share
        self.end_share = end_share

    def propose(self, now: Situation) -> Proposal:
        """The depth that belongs to the progress."""
        way = (now.share_done - self.start_share) / (self.end_share - self.start_share)
        depth = math.floor(now.bounds.max_frozen * min(max(way, 0.0), 1.0) + 1e-9)
        return now.at(depth, f"{now.share_done:.0%} of training is done")
