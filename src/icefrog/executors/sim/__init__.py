"""The simulator: an executor with a world of its own. Policies see what it reports, never what it knows."""

from icefrog.executors.sim.executor import SimExecutor
from icefrog.executors.sim.world import Curves, TrueJob, World, WorldConfig

__all__ = ["Curves", "SimExecutor", "TrueJob", "World", "WorldConfig"]
