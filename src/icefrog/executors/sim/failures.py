"""When nodes leave service and come back: random failures, planned changes of capacity, and both together."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

_STREAM = 7001  # keeps the generators of nodes apart from those of jobs


@dataclass(frozen=True, slots=True, order=True)
class NodeChange:
    """One node leaves service or comes back."""

    time_s: float
    node: int
    up: bool
    planned: bool = False
    """A planned leave stops the jobs with a checkpoint; any other kills them."""
    reason: str = ""


def node_failures(num_nodes: int, mtbf_h: float, repair_h: float, seed: int) -> Iterator[NodeChange]:
    """Independent failures of every node, without end, in order of time.

    A node fails after an exponential time in service (mean ``mtbf_h``) and is back ``repair_h`` later. Each draws from a
    generator of its own, so neither a policy nor the size of the cluster changes what happens to a node.
    """
    return heapq.merge(*(_failures_of(node, mtbf_h, repair_h, seed) for node in range(num_nodes)))


def _failures_of(node: int, mtbf_h: float, repair_h: float, seed: int) -> Iterator[NodeChange]:
    rng = np.random.default_rng([seed, node, _STREAM])
    now_s = 0.0
    while True:
        now_s += float(rng.exponential(mtbf_h * 3600.0))
        yield NodeChange(now_s, node, up=False, reason="node failure")
        now_s += repair_h * 3600.0
        yield NodeChange(now_s, node, up=True)


def merged(*sources: Iterable[NodeChange]) -> Iterator[NodeChange]:
    """Changes from several sources as one: a node serves while none of them has it out.

    Each source is in order of time and alternates, for each node, between leaving and coming back.
    """
    out: dict[int, int] = {}
    for change in heapq.merge(*sources):
        before = out.get(change.node, 0)
        out[change.node] = after = before + (-1 if change.up else 1)
        if (before == 0) != (after == 0):
            yield change


@dataclass(frozen=True, slots=True)
class Outages:
    """What takes nodes out of service in a simulation; by default nothing does."""

    node_mtbf_h: float | None = None
    """Mean time between failures of one node, hours in service; None: nodes do not fail."""
    node_repair_h: float = 1.0
    planned: tuple[NodeChange, ...] = ()
    """From :func:`icefrog.executors.sim.capacity.planned_changes`, in order of time."""
    source: str = ""
    """Of the planned changes."""

    def facts(self) -> dict[str, float | str]:
        """What was simulated, for people; empty: nothing."""
        facts: dict[str, float | str] = {}
        if self.node_mtbf_h is not None:
            facts |= {"node_mtbf_h": self.node_mtbf_h, "node_repair_h": self.node_repair_h}
        return {**facts, "capacity": self.source} if self.source else facts

    def changes(self, num_nodes: int, seed: int) -> Iterator[NodeChange]:
        """All of them in order of time; without end where nodes fail."""
        if self.node_mtbf_h is None:
            return iter(self.planned)
        failures = node_failures(num_nodes, self.node_mtbf_h, self.node_repair_h, seed)
        return merged(failures, self.planned) if self.planned else failures
