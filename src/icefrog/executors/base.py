"""What an executor is: it obeys commands and reports events. ``sim``, ``local`` (and later Ray, Slurm, Kubernetes)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from icefrog import events as ev
from icefrog.state import ClusterState


class Executor(Protocol):
    """Runs attempts. A GPU that is still held when a Start names it is waited for, never shared by accident."""

    def adopt(self, state: ClusterState) -> None:
        """Take over what the log says is going on: attempts that live go on, granted ones that never started are started.

        Called once, before anything else. Must not start what already runs.
        """
        ...

    def submit(self, commands: Sequence[ev.AnyCommand]) -> None:
        """Carry out commands. Idempotent by ``command_id``."""
        ...

    def poll(self, until_s: float) -> list[ev.Event]:
        """What happened, in order of time, up to ``until_s`` at most; a simulated executor advances its clock to it."""
        ...

    def idle(self) -> bool:
        """Whether nothing runs and nothing will happen by itself any more."""
        ...

    def close(self) -> None:
        """Let go of resources; running attempts are not touched."""
        ...
