"""No rule: the boundary moves by hand only."""

from __future__ import annotations

from icefrog.runtime.rules.base import FreezingRule, Proposal, Situation


class NoFreezing(FreezingRule):
    """Leaves the boundary where ``elastic.freeze(k)`` put it; a scheduler's lower bound is obeyed all the same."""

    name = "none"

    def propose(self, now: Situation) -> Proposal:
        """The boundary in force."""
        return Proposal(max(now.frozen_layers, now.bounds.min_frozen), "freezing is left to the user")
