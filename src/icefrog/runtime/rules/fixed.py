"""A fixed prefix, frozen from some point on: what people do by hand in fine-tuning."""

from __future__ import annotations

from icefrog.errors import UserError
from icefrog.runtime.rules.base import FreezingRule, Proposal, Situation


class Fixed(FreezingRule):
    """``depth`` layers, from the share ``start_share`` of training on.

    Args:
        depth: l >= 0, layers from the input.
        start_share: of P0, effective samples; 0: from the first step.

    Raises:
        UserError: a depth below 0, or a share outside 0..1.
    """

    name = "fixed"

    def __init__(self, depth: int, start_share: float = 0.0) -> None:
        if depth < 0 or not 0.0 <= start_share <= 1.0:
            raise UserError(
                f"Fixed({depth}, start_share={start_share}) is not a rule",
                "give a number of layers >= 0, and a share of training from 0 to 1",
            )
        self.depth = depth
        self.start_share = start_share

    def propose(self, now: Situation) -> Proposal:
        """The prefix, or nothing before its time."""
        if now.share_done < self.start_share:
            return now.at(0, f"nothing is frozen before {self.start_share:.0%} of training")
        return now.at(self.depth, f"{self.depth} layers are frozen, as told")
