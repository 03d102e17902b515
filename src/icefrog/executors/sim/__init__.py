"""The simulator: an executor with a world of its own. Policies see what it reports, never what it knows."""

from icefrog.executors.sim.base import SimulatedJob, SimWorld
from icefrog.executors.sim.executor import SimExecutor
from icefrog.executors.sim.truth import Curves, TrueJob, WorldConfig
from icefrog.executors.sim.world import World

__all__ = ["Curves", "SimExecutor", "SimWorld", "SimulatedJob", "TrueJob", "World", "WorldConfig"]
