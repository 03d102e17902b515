"""How a model is spread over processes, behind one interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from icefrog.errors import UserError
from icefrog.runtime.parallel.base import Parallel as Parallel
from icefrog.runtime.parallel.ddp import DataParallel as DataParallel
from icefrog.runtime.parallel.single import Single as Single
from icefrog.runtime.world import World

KINDS = ("auto", "single", "ddp", "fsdp")


def choose(kind: str | Parallel, world: World, ddp_options: Mapping[str, Any]) -> Parallel:
    """The parallelism that a job asked for. In one process all kinds that only deal samples are the same: single.

    Raises:
        UserError: an unknown name, or ``single`` in several processes.
    """
    if isinstance(kind, Parallel):
        return kind
    if kind not in KINDS:
        raise UserError(
            f"unknown parallelism {kind!r}",
            f"choose one of {', '.join(KINDS)}, or give an object, as in parallel=Pipeline(loss_fn)",
        )
    if kind == "single" and world.size > 1:
        raise UserError(
            f"parallel='single' in a group of {world.size} processes would train {world.size} models apart",
            "use parallel='auto', or start one process",
        )
    if world.size == 1:
        return Single()
    if kind == "fsdp":
        from icefrog.runtime.parallel.fsdp import FullyShardedDataParallel  # imports much of torch.distributed

        return FullyShardedDataParallel()
    return DataParallel(ddp_options)
