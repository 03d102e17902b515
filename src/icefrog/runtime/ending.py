"""How a run ends, and that it says so once: at its goal, as it was asked to, or by a rule of the loop's own."""

from __future__ import annotations

from collections.abc import Callable

from icefrog.runtime.decision import Stopped
from icefrog.runtime.goal import Goal
from icefrog.runtime.keeper import Keeper
from icefrog.runtime.reporting import Counters, Reporter
from icefrog.runtime.world import World


class Ending:
    """Owned by :class:`~icefrog.runtime.elastic.LayerElastic`.

    Args:
        goal: when a job is done.
        reporter: told of the end.
        keeper: whose last checkpoint must be on disk before the end is reported.
        world: left by a job that was asked to stop.
        on_stop: called in place of saving and raising, for a loop that ends by itself.
    """

    def __init__(
        self, goal: Goal, reporter: Reporter, keeper: Keeper, world: World, on_stop: Callable[[], None] | None
    ) -> None:
        self.on_stop = on_stop
        self._goal = goal
        self._reporter = reporter
        self._keeper = keeper
        self._world = world
        self._asked = False  # and ``on_stop`` was told
        self._reported = False

    def leave(self, at: Counters) -> None:
        """The executor has asked the job to stop, or it has measured what it was to measure.

        Raises:
            Stopped: unless there is ``on_stop``.
            UserError: the last checkpoint cannot be written.
        """
        if self.on_stop is not None:
            self._asked = True
            self.on_stop()
            return
        self._keeper.close()
        self._reporter.stopped(at)
        self._world.close()
        raise Stopped

    def reached(self, at: Counters) -> None:
        """Report the end of a job that has reached its goal; of another: nothing.

        Raises:
            UserError: the last checkpoint cannot be written.
        """
        outcome = self._goal.outcome(at)
        if outcome is not None and self._settle():
            self._reporter.finished(at, outcome)

    def finish(self, at: Counters) -> None:
        """The loop is over: report that the job has ended, or left as it was asked to.

        Raises:
            UserError: the last checkpoint cannot be written.
        """
        if not self._settle():
            return
        if self._asked:
            self._reporter.stopped(at)
        else:
            outcome = self._goal.outcome(at) or ("completed" if self._goal.target is None else "target_missed")
            self._reporter.finished(at, outcome)

    def _settle(self) -> bool:
        """Wait for the last checkpoint; False: the end was reported before."""
        first, self._reported = not self._reported, True
        if first:
            self._keeper.close()
        return first
