"""What an epoch loop can get wrong, and what it is told."""

from __future__ import annotations

from icefrog.errors import UserError
from icefrog.runtime.reporting import Counters

NOT_BEGUN = (
    "end_epoch() without elastic.epochs(): nothing is resumed, and how long training will be is not known, so freezing "
    "rules that go by the share of training that is done stay at its start; write "
    "`for epoch in elastic.epochs(max_epochs)`, or call elastic.begin(max_epochs) before the loop"
)


def check_epoch(epoch: int, at: Counters, *, trained: bool, ran: bool) -> None:
    """The loop's body is over for ``epoch``; ``trained``: there was an ``optimizer.step()``; ``ran``: the model ever ran.

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
    if not trained and ran and at.step == 0:
        raise UserError(
            f"epoch {epoch} ended without a step() of the optimizer that was given to LayerElastic, though the model ran",
            "give it the optimizer whose step() the loop calls; of one with two half steps (SAM) call step(closure), "
            "not first_step() and second_step()",
        )
    if not trained:
        raise UserError(
            f"epoch {epoch} ended without an optimizer.step()",
            "the loader gave no batch: one that can be gone through only once (a generator) is used up",
        )
