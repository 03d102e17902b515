"""Copies of frozen pydantic models with some values replaced, unchecked: for products of valid values, by the thousand."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel

M = TypeVar("M", bound=BaseModel)

_put = object.__setattr__  # past the freeze


def copied(model: M, values: dict[str, Any], changed: dict[str, Any]) -> M:
    """A model of the same class.

    ``model_copy`` does the same in five times the time.

    Args:
        model: the original.
        values: of all fields (and cached properties that stay true); the copy keeps the mapping.
        changed: the names that count as given by somebody, beside those of the original.
    """
    twin = object.__new__(type(model))
    given = model.__pydantic_fields_set__
    _put(twin, "__dict__", values)
    _put(twin, "__pydantic_fields_set__", given if changed.keys() <= given else given | changed.keys())
    _put(twin, "__pydantic_extra__", None)
    _put(twin, "__pydantic_private__", None)
    return twin
