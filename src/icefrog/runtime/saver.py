"""When a job saves its state: at the end of epochs, and between two optimizer steps where a step's end has asked for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from icefrog.runtime import checkpoint, saving
from icefrog.runtime.deciding import Decider
from icefrog.runtime.ending import Ending
from icefrog.runtime.engine import Engine
from icefrog.runtime.keeper import Keeper
from icefrog.runtime.readable import refuse_unreadable
from icefrog.runtime.reporting import Counters
from icefrog.runtime.saving import Stateful


@dataclass(frozen=True, slots=True)
class _DueSave:
    """A checkpoint to be made when the next step begins."""

    stop: bool
    """Whether the job then leaves."""
    rng: dict[str, Any]
    """The generators' states at the end of the last step."""


class Saver:
    """Owned by :class:`~icefrog.runtime.elastic.LayerElastic`. Every method is called on all ranks at the same step.

    Args:
        engine: whose state it is, with that of the two that follow.
        decider: as above.
        registered: as above; may grow.
        keeper: writes and reads.
        ending: how a job leaves that was asked to stop.
    """

    def __init__(
        self,
        engine: Engine,
        decider: Decider,
        registered: Mapping[str, Stateful],
        keeper: Keeper,
        ending: Ending,
    ) -> None:
        self._engine = engine
        self._decider = decider
        self._registered = registered
        self._keeper = keeper
        self._ending = ending
        self._due: _DueSave | None = None

    def ask(self, *, stop: bool) -> None:
        """At a step's end: save before the next one; ``stop``: then leave."""
        self._due = _DueSave(stop, checkpoint.rng_state())

    def step_begins(self, at: Counters) -> None:
        """The next step begins, so all is done that belongs to the last one: its LR scheduler, an average of weights.

        Raises:
            Stopped: the job was asked to stop.
            UserError: the last checkpoint cannot be written.
        """
        due, self._due = self._due, None
        if due is not None:
            self.save(at, due.rng)
            if due.stop:
                self._ending.leave(at)
            self._engine.timer.reset()

    def drop(self) -> None:
        """What was due is not any more: the epoch's end saves, or training goes on from another state."""
        self._due = None

    def save(self, at: Counters, rng: dict[str, Any] | None = None) -> None:
        """``rng``: this rank's generators at the step's end; the loader may have drawn from them since. None: as now."""
        summary = {"epoch": at.epoch, "step": at.step, "effective_samples": at.effective_samples, "metric": at.metric}
        summary["frozen_layers"] = self._engine.boundary
        every_rng = self._engine.world.gather_plain(checkpoint.rng_state() if rng is None else rng)

        def pack() -> dict[str, Any]:
            state = saving.pack(self._engine, self._decider, at, self._registered, held_only=True)
            self._refuse_unreadable(state["registered"])
            return {**state, "rng": every_rng[0], "every_rng": every_rng}

        self._keeper.save(pack, summary)

    def newest(self) -> dict[str, Any] | None:
        """Collective. What the newest checkpoint holds that is whole, as of :func:`~icefrog.runtime.saving.pack`.

        Raises:
            UserError: what would be saved could not be read back.
        """
        if self._keeper.store is not None:
            # On every rank, and before any work is done that could not be kept.
            self._refuse_unreadable({name: item.state_dict() for name, item in self._registered.items()})
        return self._keeper.newest(self._engine.parallel.held_model_state)

    def _refuse_unreadable(self, registered: Mapping[str, Any]) -> None:
        for name, state in registered.items():
            refuse_unreadable(state, f"the state of {name!r}")
        for number, group in enumerate(self._engine.optimizer.param_groups):
            settings = {key: value for key, value in group.items() if key != "params"}
            refuse_unreadable(settings, f"parameter group {number}")
