"""The executor for one machine: attempts are process groups under a supervisor each."""

from icefrog.executors.local.executor import LocalExecutor
from icefrog.executors.local.slots import Devices, local_cluster

__all__ = ["Devices", "LocalExecutor", "local_cluster"]
