"""Copies of frozen pydantic models with some values replaced, unchecked: for products of valid values, by the thousand."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel

M = TypeVar("M", bound=BaseModel)

# The slots of a model, past the freeze; ``object.__setattr__`` takes twice as long to find them.
_new = object.__new__
_put_values = vars(BaseModel)["__dict__"].__set__
_put_given, _put_extra, _put_private = (
    vars(BaseModel)[f"__pydantic_{slot}__"].__set__ for slot in ("fields_set", "extra", "private")
)


def copied(model: M, values: dict[str, Any]) -> M:
    """A model of the same class. What counts as given by somebody is what was with the original.

    ``model_copy`` does the same in ten times the time.

    Args:
        model: the original.
        values: of all fields (and cached properties that stay true); the copy keeps the mapping.
    """
    twin = _new(type(model))
    _put_values(twin, values)
    _put_given(twin, model.__pydantic_fields_set__)
    _put_extra(twin, None)
    _put_private(twin, None)
    return twin
