"""What-if: small texts that change a set-up, one thing at a time or several together.

``gpus+8``, ``nodes*2``, ``cluster=16x4``, ``policy=srtf``, ``icefrog.rho=0.3``, ``load=1.5``, ``freeze=half``,
``noise=0.3``; joined by commas they are made together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from icefrog.errors import UserError
from icefrog.experiment.cells import Condition, Variant
from icefrog.experiment.spec import Value, world_settings
from icefrog.policies import make_policy, policy_names
from icefrog.spec import ClusterSpec
from icefrog.specfile import parse_cluster

_SIZE = re.compile(r"^(gpus|nodes)([-+*=])(\d+(?:\.\d+)?)$")
_MOST_NODES = 100_000
_FREEZE: Mapping[str, float] = {"all": 0.0, "half": 0.5, "none": 1.0}
"""Share of the jobs that then forbid freezing."""
FORMS = (
    "gpus+8, gpus-8, gpus*2, gpus=64, nodes+2 (and - * =), cluster=16x4, policy=NAME, POLICY.OPTION=VALUE, load=1.5, "
    f"freeze=all|half|none|0..1, {', '.join(f'{name}=VALUE' for name in world_settings())}"
)


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated, but for the jobs."""

    variant: Variant
    condition: Condition


def changed(base: Setup, text: str) -> Setup:
    """The set-up after every change of a comma-separated text, from left to right; its variant is named by the text.

    Raises:
        UserError: not a change, or one that this set-up does not allow.
    """
    setup = base
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise _not_a_change(text)
    for part in parts:
        setup = _one(setup, part)
    make_policy(setup.variant.policy, setup.variant.options)
    name = ", ".join(parts)
    return replace(setup, variant=replace(setup.variant, name=name, series=name))


def _one(setup: Setup, part: str) -> Setup:
    condition = setup.condition
    if (match := _SIZE.match(part)) is not None:
        what, sign, number = match.groups()
        return replace(
            setup, condition=replace(condition, cluster=_resized(condition.cluster, part, what, sign, float(number)))
        )
    key, equals, value = part.partition("=")
    if not equals or not value:
        raise _not_a_change(part)
    if key == "cluster":
        return replace(setup, condition=replace(condition, cluster=parse_cluster(value)))
    if key == "policy":
        return replace(setup, variant=Variant(value, value))
    if key == "load":
        return replace(setup, condition=replace(condition, pace=condition.pace * _number(part, value, 1e-3, 1e4)))
    if key == "freeze":
        forbidden = _FREEZE[value] if value in _FREEZE else 1.0 - _number(part, value, 0.0, 1.0)
        return replace(setup, condition=replace(condition, restrict_freezing=forbidden, restricted_max_fraction=0.0))
    if key in world_settings():
        world = {**condition.world, key: _number(part, value, 0.0, 1e6)}
        return replace(setup, condition=replace(condition, world=world))
    return replace(setup, variant=_with_option(setup.variant, part, key, value))


def _with_option(variant: Variant, part: str, key: str, value: str) -> Variant:
    policy, dot, option = key.partition(".")
    if not dot or not option or policy not in policy_names():
        raise _not_a_change(part)
    if policy != variant.policy:
        raise UserError(
            f"--change: {part!r} sets an option of {policy}, but {variant.policy} runs", f"add policy={policy},"
        )
    options: dict[str, Value] = {**variant.options, option: value}
    return replace(variant, options=options)


def _resized(cluster: ClusterSpec, part: str, what: str, sign: str, number: float) -> ClusterSpec:
    if len(cluster.nodes) != 1:
        raise UserError(
            f"--change: {part!r}: the cluster has nodes of several kinds", "say which: cluster=8x4+6x8, or a file"
        )
    (node,) = cluster.nodes
    unit = node.gpus if what == "gpus" else 1
    before = node.count * unit
    after = {"+": before + number, "-": before - number, "*": before * number, "=": number}[sign]
    if after % unit or not 1 <= after / unit <= _MOST_NODES:
        unit_text = f"whole nodes of {node.gpus} GPUs" if what == "gpus" else "whole nodes"
        raise UserError(
            f"--change: {part!r} gives {after:g} {what}", f"{unit_text} are needed, from 1 to {_MOST_NODES:,}"
        )
    return ClusterSpec(nodes=(node.model_copy(update={"count": int(after / unit)}),))


def _number(part: str, value: str, low: float, high: float) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not low <= number <= high:
        raise UserError(f"--change: {part!r}: {value!r} is not allowed", f"a number from {low:g} to {high:g}")
    return number


def _not_a_change(text: str) -> UserError:
    return UserError(f"--change: {text!r} is not a change", f"for example {FORMS}")
