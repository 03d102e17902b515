"""Scheduling policies by name. Nothing is imported until a policy is asked for."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from icefrog.errors import UserError
from icefrog.policies.base import Options, Policy

_POLICIES: Mapping[str, str] = {
    "fifo": "icefrog.policies.fifo:Fifo",
    "srtf": "icefrog.policies.srtf:Srtf",
    "sjf": "icefrog.policies.sjf:Sjf",
    "edf": "icefrog.policies.edf:Edf",
    "themis": "icefrog.policies.themis:Themis",
    "gandiva-fair": "icefrog.policies.gandiva_fair:GandivaFair",
    "lucid": "icefrog.policies.lucid:Lucid",
    "tiresias": "icefrog.policies.tiresias:Tiresias",
    "optimus": "icefrog.policies.optimus:Optimus",
    "pollux": "icefrog.policies.pollux:Pollux",
    "lucid+": "icefrog.policies.lucid_plus:LucidPlus",
    "optimus+": "icefrog.policies.optimus_plus:OptimusPlus",
    "pollux+": "icefrog.policies.pollux_plus:PolluxPlus",
    "gavel": "icefrog.policies.gavel:Gavel",
    "icefrog": "icefrog.policies.icefrog:IceFrog",
}


def policy_names() -> tuple[str, ...]:
    """Every policy there is."""
    return tuple(_POLICIES)


def policy_class(name: str) -> type[Any]:
    """The class behind a name. Raises :class:`UserError` for an unknown one."""
    if name not in _POLICIES:
        close = difflib.get_close_matches(name, _POLICIES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(f"no policy is called {name!r}", f"{hint}policies: {', '.join(_POLICIES)}")
    module, _, attribute = _POLICIES[name].partition(":")
    found: type[Any] = getattr(importlib.import_module(module), attribute)
    return found


def make_policy(name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """A policy with its options parsed and checked. Raises :class:`UserError` naming a wrong option and those allowed."""
    cls = policy_class(name)
    schema: type[Options] = cls.Options
    try:
        parsed = schema.model_validate(dict(options or {}))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = ", ".join(schema.model_fields) or "none"
            raise UserError(f"policy {name} has no option {key!r}", f"its options: {known}") from error
        raise UserError(
            f"option {name}.{key}: {first['msg']} (given: {first['input']!r})",
            f"`icefrog policies` lists the options of {name} with their ranges",
        ) from error
    policy: Policy = cls(parsed)
    return policy
