from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def _entry(rank: int, world: int, port: int, job: Callable[..., Any], args: tuple[Any, ...], queue: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    try:
        queue.put((rank, job(*args), None))
    except BaseException as error:
        queue.put((rank, None, f"{type(error).__name__}: {error}"))


def run_ranks(world: int, job: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Call ``job(*args)`` in ``world`` processes that find each other through the environment; results by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [
        context.Process(target=_entry, args=(rank, world, port, job, args, queue), daemon=True) for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        found = [queue.get(timeout=timeout_s) for _ in processes]
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.terminate()
    problems = [f"rank {rank}: {problem}" for rank, _, problem in found if problem]
    assert not problems, problems
    return [result for _, result, _ in sorted(found, key=lambda item: item[0])]
