"""``--only KEY=VALUE``: a part of an experiment's cells."""

from __future__ import annotations

from collections.abc import Sequence

from icefrog.errors import UserError
from icefrog.experiment.cells import Cell


def select(cells: Sequence[Cell], wishes: Sequence[str]) -> list[Cell]:
    """The cells that meet every wish; several values of one key (or ``a,b``) mean any of them.

    Keys: ``variant``, ``policy``, ``trace``, ``seed``, and the settings in which the conditions differ.

    Raises:
        UserError: not KEY=VALUE, an unknown key, or a value that no cell has.
    """
    wanted: dict[str, set[str]] = {}
    for wish in wishes:
        key, equals, listed = wish.partition("=")
        if not equals or not key or not listed:
            raise UserError(f"--only: {wish!r} is not KEY=VALUE", "for example --only variant=icefrog")
        wanted.setdefault(key.strip(), set()).update(_values(listed))
    known = [facts(cell) for cell in cells]
    for key, values in wanted.items():
        found = list(dict.fromkeys(fact[key] for fact in known if key in fact))
        if not found:
            keys = dict.fromkeys(key for fact in known for key in fact)
            raise UserError(f"--only: unknown key {key!r}", f"keys: {', '.join(keys)}")
        if missing := values.difference(found):
            raise UserError(f"--only: no cell has {key}={min(missing)}", f"{key}: {', '.join(found)}")
    return [
        cell
        for cell, fact in zip(cells, known, strict=True)
        if all(fact.get(key) in values for key, values in wanted.items())
    ]


def facts(cell: Cell) -> dict[str, str]:
    """What a cell can be chosen by."""
    return {
        "variant": cell.variant.name,
        "policy": cell.variant.policy,
        "trace": cell.trace.label,
        "seed": str(cell.seed),
        **{key: f"{value:g}" if isinstance(value, float) else str(value) for key, value in cell.condition.axes.items()},
    }


def _values(text: str) -> list[str]:
    """Commas separate values, but not inside the brackets of a variant's name."""
    parts, depth = [""], 0
    for character in text:
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]
