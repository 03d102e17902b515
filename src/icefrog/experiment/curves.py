"""Findings over a quantity: a setting in which the conditions differ, or an option in which variants of one policy do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]
"""An entry of ``rows`` in a findings document."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line: its points by ascending x. ``flat``: the quantity does not concern it, so it has one value everywhere."""

    name: str
    points: tuple[tuple[float, Row], ...]
    flat: bool = False


@dataclass(slots=True)
class Curves:
    """All lines over one quantity."""

    axis: str
    lines: list[Curve] = field(default_factory=list)


def curves(document: Mapping[str, Any]) -> Curves | None:
    """The lines of a findings document; None if nothing numeric was varied.

    With several numeric settings, x is the one with the most values, and every combination of the others makes lines of
    its own.
    """
    axis = _setting(document)
    if axis is not None:
        return Curves(axis, _over_setting(document, axis))
    axis = next((row["axis"][0] for row in _rows(document) if row["axis"] is not None), None)
    return None if axis is None else Curves(axis, _over_option(document, axis))


def _rows(document: Mapping[str, Any]) -> Iterator[Row]:
    return (row for condition in document["conditions"] for row in condition["rows"])


def _setting(document: Mapping[str, Any]) -> str | None:
    values: dict[str, set[float]] = {}
    for condition in document["conditions"]:
        for key, value in condition["axes"].items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                values.setdefault(key, set()).add(value)
    return max(values, key=lambda key: len(values[key]), default=None) if values else None


def _over_setting(document: Mapping[str, Any], axis: str) -> list[Curve]:
    found: dict[str, list[tuple[float, Row]]] = {}
    for condition in document["conditions"]:
        if axis not in condition["axes"]:
            continue
        others = ", ".join(f"{key}={value}" for key, value in condition["axes"].items() if key != axis)
        for row in condition["rows"]:
            name = f"{row['variant']}, {others}" if others else row["variant"]
            found.setdefault(name, []).append((float(condition["axes"][axis]), row))
    return [Curve(name, tuple(sorted(points, key=lambda point: point[0]))) for name, points in found.items()]


def _over_option(document: Mapping[str, Any], axis: str) -> list[Curve]:
    found: dict[tuple[str, bool], list[tuple[float, Row]]] = {}
    xs = [row["axis"][1] for row in _rows(document) if row["axis"] is not None and row["axis"][0] == axis]
    for condition in document["conditions"]:
        for row in condition["rows"]:
            suffix = f", {condition['label']}" if condition["label"] else ""
            if row["axis"] is not None and row["axis"][0] == axis:
                found.setdefault((row["series"] + suffix, False), []).append((row["axis"][1], row))
            else:
                found[row["variant"] + suffix, True] = [(min(xs), row), (max(xs), row)]
    return [
        Curve(name, tuple(sorted(points, key=lambda point: point[0])), flat) for (name, flat), points in found.items()
    ]
