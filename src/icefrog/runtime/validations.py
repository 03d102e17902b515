"""The validation metrics of a job so far: the best one, and how long ago it was."""

from __future__ import annotations

import math
from typing import Any

from icefrog.errors import UserError
from icefrog.spec import Mode

_ENOUGH = 4
"""Metrics from which on those of a loss are told from others."""
_BLIND_EPOCHS = 2
"""Without a metric, while layers are frozen, until a word is said."""


class Validations:
    """Where nobody has said whether more is better, a metric that only fell behind its first value is taken for a loss.

    Args:
        mode: whether more is better; None: nobody said.

    Raises:
        UserError: another mode.

    Attributes:
        metrics: every finite one, in order.
        best: of these; None: there is none.
        stalled: metrics since the best one, infinite ones included.
    """

    def __init__(self, mode: Mode | None) -> None:
        if mode not in (None, "max", "min"):
            raise UserError(f"mode={mode!r} does not say whether more of the metric is better", "use 'max' or 'min'")
        self._given = mode
        self.metrics: list[float] = []
        self.best: float | None = None
        self.stalled = 0
        self._told = False

    @property
    def mode(self) -> Mode:
        """As given, or as it looks: the first ``_ENOUGH`` metrics decide."""
        first, *later = self.metrics[:_ENOUGH] or [0.0]
        return self._given or ("min" if later and max(later) < first else "max")

    def news(self, epochs: int, frozen: bool) -> str | None:
        """What the user should know, once.

        Args:
            epochs: completed.
            frozen: a rule has frozen layers.
        """
        if self._told:
            return None
        message = None
        if frozen and not self.metrics and epochs >= _BLIND_EPOCHS:
            message = (
                "layers are frozen, and no validation metric is given: nothing would open them if training stalled "
                "(pass metric= to end_epoch)"
            )
        elif self._given is None and self.mode == "min" and len(self.metrics) >= _ENOUGH:
            message = (
                "the validation metric fell from the start: less of it is taken to be better (say mode='min' or 'max')"
            )
        self._told = message is not None
        return message

    def see(self, metric: float) -> bool:
        """Take in one, which is not NaN; an infinite one (a loss that overflowed) is no better than the best, whichever way.

        Returns:
            Whether it is finite.
        """
        if math.isinf(metric):
            self.stalled += 1
            return False
        before = self.mode
        self.metrics.append(metric)
        if self.mode == before:
            self._compare(metric)
        else:  # it looked the other way
            self.best, self.stalled = None, 0
            for each in self.metrics:
                self._compare(each)
        return True

    def _compare(self, metric: float) -> None:
        sign = 1.0 if self.mode == "max" else -1.0
        if self.best is None or sign * metric > sign * self.best:
            self.best, self.stalled = metric, 0
        else:
            self.stalled += 1

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"metrics": list(self.metrics), "best_metric": self.best, "stalled": self.stalled}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        self.metrics, self.best, self.stalled = list(state["metrics"]), state["best_metric"], state["stalled"]
