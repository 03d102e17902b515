"""Freezing rules: who decides how many layers are frozen. One rule a file; the interface is in :mod:`.base`."""

from __future__ import annotations

from collections.abc import Callable

from icefrog.errors import UserError
from icefrog.estimate.boundary import Guards
from icefrog.runtime.rules.autofreeze import AutoFreeze
from icefrog.runtime.rules.base import (
    Bounds,
    CacheState,
    FreezingRule,
    FunctionRule,
    Gradients,
    Hands,
    Proposal,
    Situation,
)
from icefrog.runtime.rules.egeria import Egeria
from icefrog.runtime.rules.fixed import Fixed
from icefrog.runtime.rules.freezeout import FreezeOut
from icefrog.runtime.rules.linear import Linear
from icefrog.runtime.rules.none import NoFreezing
from icefrog.runtime.rules.pipetransformer import PipeTransformer
from icefrog.runtime.rules.progress import Progress
from icefrog.runtime.rules.tuner import Tuner

__all__ = [
    "RULES",
    "AutoFreeze",
    "Bounds",
    "CacheState",
    "Egeria",
    "Fixed",
    "FreezeOut",
    "FreezingRule",
    "FunctionRule",
    "Gradients",
    "Guards",
    "Hands",
    "Linear",
    "NoFreezing",
    "PipeTransformer",
    "Progress",
    "Proposal",
    "Rule",
    "Situation",
    "Tuner",
    "make_rule",
]

Rule = FreezingRule | Callable[[Situation], Proposal] | str
"""What ``LayerElastic(rule=...)`` takes: a rule, a function, or the name of a rule with its default settings."""

RULES: dict[str, Callable[[], FreezingRule]] = {
    "tuner": Tuner,
    "progress": Progress,
    "none": NoFreezing,
    "linear": Linear,
    "freezeout": FreezeOut,
    "autofreeze": AutoFreeze,
    "egeria": Egeria,
    "pipetransformer": PipeTransformer,
}
"""Rules that need no settings, by name."""


def make_rule(given: Rule | None, guards: Guards | None = None, *, sharded: bool = False) -> FreezingRule:
    """The rule that was asked for.

    Args:
        given: a rule, a function, or a name; None: ``progress``, or ``tuner`` where there are guards for it or where
            whole gradients are not to be had.
        guards: of the rule ``tuner`` by name; a rule object has its own settings.
        sharded: a rank holds a part of the model.

    Raises:
        UserError: an unknown name, or guards for a rule that takes none.
    """
    if given is None:
        given = "tuner" if sharded or guards is not None else "progress"
    if given == "tuner":
        return Tuner(guards)
    if guards is not None and given != "none":
        raise UserError("guards belong to the rule 'tuner'", "pass rule=Tuner(guards)")
    if isinstance(given, FreezingRule):
        return given
    if isinstance(given, str):
        if given not in RULES:
            raise UserError(
                f"there is no freezing rule {given!r}",
                f"choose {', '.join(RULES)}, or pass a rule object such as Fixed(3)",
            )
        return RULES[given]()
    return FunctionRule(given)
