"""Two gloo processes (or more) for tests of data parallelism."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

from icefrog.executors.local.supervisor import free_port


def _worker(rank: int, world: int, tasks: Any, results: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for job, args, port in iter(tasks.get, None):
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        torch.manual_seed(0)
        try:
            results.put((rank, job(*args), None))
        except BaseException as error:
            results.put((rank, None, f"{type(error).__name__}: {error}"))


class Ranks:
    """Processes that find each other through the environment; started once, since importing torch takes seconds."""

    def __init__(self, world: int = 2) -> None:
        self.world = world
        context = torch.multiprocessing.get_context("spawn")
        self.results = context.Queue()
        self.tasks = [context.Queue() for _ in range(self.world)]
        self.processes = [
            context.Process(target=_worker, args=(rank, self.world, self.tasks[rank], self.results), daemon=True)
            for rank in range(self.world)
        ]
        for process in self.processes:
            process.start()

    def run(self, job: Callable[..., Any], *args: Any, timeout_s: float = 180.0) -> list[Any]:
        """Call ``job(*args)`` in every process; results by rank. The job must leave its process group."""
        port = free_port()
        for tasks in self.tasks:
            tasks.put((job, args, port))
        found = [self.results.get(timeout=timeout_s) for _ in self.tasks]
        problems = [f"rank {rank}: {problem}" for rank, _, problem in found if problem]
        assert not problems, problems
        return [result for _, result, _ in sorted(found, key=lambda item: item[0])]

    def close(self) -> None:
        for tasks in self.tasks:
            tasks.put(None)
        for process in self.processes:
            process.join(timeout=10)
            if process.is_alive():
                process.terminate()
