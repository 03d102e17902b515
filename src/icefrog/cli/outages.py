"""The options of ``icefrog simulate`` that take nodes out of service."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from icefrog.cli.numbers import NODE_HOURS
from icefrog.errors import UserError

if TYPE_CHECKING:
    from icefrog.executors.sim.failures import Outages
    from icefrog.spec import ClusterSpec

Command = TypeVar("Command", bound=Callable[..., Any])


def outage_options(command: Command) -> Command:
    """Adds ``--node-mtbf``, ``--node-repair`` and ``--capacity``; the command gets them as ``node_mtbf_h``, ... ."""
    for option in (
        click.option("--capacity", metavar="FILE[:VC]", help="Nodes or GPUs in service over time: a CSV file."),
        click.option("--node-repair", "node_repair_h", type=NODE_HOURS, metavar="H", help="Default: 1 hour."),
        click.option("--node-mtbf", "node_mtbf_h", type=NODE_HOURS, metavar="H", help="Nodes fail, each so often."),
    ):
        command = option(command)
    return command


def parse_outages(
    node_mtbf_h: float | None,
    node_repair_h: float | None,
    capacity: str | None,
    cluster: ClusterSpec,
    start: str | None,
) -> Outages:
    """What takes nodes out of service.

    Args:
        node_mtbf_h: mean time between failures of one node, hours.
        node_repair_h: how long a repair takes, hours.
        capacity: a file, as :func:`icefrog.executors.sim.capacity.read_capacity` reads it.
        cluster: whose nodes they are.
        start: the date, ISO, at which the simulation starts; None: unknown.
    """
    from icefrog.executors.sim.capacity import planned_changes, read_capacity
    from icefrog.executors.sim.failures import Outages

    if node_repair_h is not None and node_mtbf_h is None:
        raise UserError("--node-repair: nodes do not fail", "give --node-mtbf HOURS, too")
    if capacity is None:
        return Outages(node_mtbf_h, node_repair_h or 1.0)
    steps = read_capacity(capacity, None if start is None else datetime.fromisoformat(start))
    return Outages(node_mtbf_h, node_repair_h or 1.0, planned_changes(steps, cluster), steps.source)
