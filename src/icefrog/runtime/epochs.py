"""What an epoch loop can get wrong, and what it is told."""

from __future__ import annotations

from icefrog.errors import UserError
from icefrog.runtime.reporting import Counters

NOT_BEGUN = (
    "end_epoch() without elastic.epochs(): nothing is resumed, and how long training will be is not known, so freezing "
    "rules that go by the share of training that is done stay at its start; write "
    "`for epoch in elastic.epochs(max_epochs)`, or call elastic.begin(max_epochs) before the loop"
)


def check_epoch(epoch: int, at: Counters, *, trained: bool) -> None:
    """The loop's body is over for ``epoch``; ``trained``: there was an ``optimizer.step()``.

    Raises:
        UserError: an epoch ended without a step or without ``end_epoch``, or with two.
    """
    if at.epoch == epoch:
        raise UserError(
            f"epoch {epoch} ended without elastic.end_epoch()",
            "call elastic.end_epoch(metric=...) as the last line of the epoch loop",
        )
    if at.epoch > epoch + 1:
        raise UserError(
            f"elastic.end_epoch() was called {at.epoch - epoch} times in epoch {epoch}",
            "call it once, as the last line; elastic.decide(metric) is for validation in mid-epoch",
        )
    if not trained:
        raise UserError(
            f"epoch {epoch} ended without an optimizer.step()",
            "the loader gave no batch: one that can be gone through only once (a generator) is used up",
        )
