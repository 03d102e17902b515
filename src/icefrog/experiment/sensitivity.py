"""How much a knob matters: each point along it against the same policy at the knob's default, on the same jobs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from icefrog.experiment.cells import Condition, Variant
from icefrog.experiment.spec import default_settings
from icefrog.experiment.statistics import ratio_interval
from icefrog.policies import policy_class

Values: TypeAlias = Mapping[tuple[str, int], float]
"""Mean completion time by replicate (trace, seed), s."""
Place: TypeAlias = tuple[int, str]
"""Where a row stands: (index of the condition, name of the variant)."""


def sensitivities(
    conditions: Sequence[Condition], variants: Sequence[Variant], jct_s: Mapping[Place, Values]
) -> dict[Place, dict[str, Any]]:
    """For each row the comparisons by knob: ``{knob: {"at": ..., "ratio": ..., "low": ..., "high": ..., "pairs": ...}}``.

    A knob is a numeric setting of the world, the share of restricted jobs, or a listed option of a policy: all else equal,
    the replicates run the same jobs. (Loads, scales and clusters draw other jobs.) ``ratio`` is mean JCT / mean JCT where
    the knob is ``at``: at its default if that was run, else at the first value that was. Above 1: worse than there.
    """
    found: dict[Place, dict[str, Any]] = {}
    for place, reference, knob, at in _pairs(conditions, variants):
        ours, theirs = jct_s.get(place, {}), jct_s.get(reference, {})
        paired = sorted(ours.keys() & theirs.keys())
        if not paired or any(math.isnan(ours[key] + theirs[key]) for key in paired):
            continue
        ratio = ratio_interval([ours[key] for key in paired], [theirs[key] for key in paired])
        if math.isfinite(ratio.value):
            entry = {"at": at, "ratio": ratio.value, "low": ratio.low, "high": ratio.high, "pairs": len(paired)}
            found.setdefault(place, {})[knob] = entry
    return found


def _pairs(conditions: Sequence[Condition], variants: Sequence[Variant]) -> list[tuple[Place, Place, str, float]]:
    """(row, the row it is compared with, the knob, its value there)."""
    pairs: list[tuple[Place, Place, str, float]] = []
    for i, condition in enumerate(conditions):
        for knob in condition.axes:
            if knob in _DEFAULTS:
                j, at = _reference_condition(conditions, condition, knob)
                pairs += [((i, one.name), (j, one.name), knob, at) for one in variants]
        for one in variants:
            if one.axis is not None:
                other, at = _reference_variant(variants, one, one.axis[0])
                pairs.append(((i, one.name), (i, other.name), one.axis[0], at))
    return pairs


_DEFAULTS = {**default_settings(), "restrict_freezing": 0.0}


def _reference_condition(conditions: Sequence[Condition], here: Condition, knob: str) -> tuple[int, float]:
    same = [
        (j, float(other.axes[knob]))
        for j, other in enumerate(conditions)
        if {**other.axes, knob: None} == {**here.axes, knob: None}
    ]
    return next((one for one in same if one[1] == _DEFAULTS[knob]), same[0])


def _reference_variant(variants: Sequence[Variant], here: Variant, knob: str) -> tuple[Variant, float]:
    same = [
        (one, one.axis[1])
        for one in variants
        if one.axis is not None and (one.policy, one.series, one.axis[0]) == (here.policy, here.series, knob)
    ]
    default = policy_class(here.policy).Options.model_fields[knob].default
    return next((one for one in same if one[1] == default), same[0])
