"""What becomes of our hooks when a model is copied or pickled whole: they are the original's alone."""

from __future__ import annotations

from typing import Any


class HookOwner:
    """Has methods that hang as hooks on modules of the user's model.

    A copied model carries them along; they go on meaning the original, and each does nothing when another module calls it.
    A pickled model (``torch.save(model)``) leaves them behind.
    """

    def __deepcopy__(self, _memo: Any) -> Any:
        return self

    def __reduce__(self) -> Any:
        return _Absent, ()


class _Absent:
    """In the place of the owner in a model that was unpickled: each of its hooks does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._nothing

    def _nothing(self, *_args: Any, **_kwargs: Any) -> None:
        return None
