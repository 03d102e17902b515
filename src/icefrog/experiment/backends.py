"""Where cells are computed: here, one by one, or in processes of this machine. ``ray_backend`` adds a cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from icefrog.errors import UserError
from icefrog.experiment.cells import Cell
from icefrog.experiment.digest import program_digest


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a cell: a result, or why there is none."""

    index: int
    """The cell's place among those asked for."""
    result: dict[str, Any] | None
    error: str = ""


Outcomes: TypeAlias = Generator[Outcome, None, None]
Task: TypeAlias = Callable[[int, Cell, str], Outcome]
"""(place of the cell, the cell, digest of the program) -> what became of it."""


class Backend(Protocol):
    """Computes cells."""

    @property
    def slots(self) -> int:
        """How many cells are computed at a time."""
        ...

    def run(self, cells: Sequence[Cell]) -> Outcomes:
        """Outcomes as they come, in any order. Closing the generator ends what is under way."""
        ...


class Inline:
    """In this process, one after the other."""

    slots = 1

    def run(self, cells: Sequence[Cell]) -> Outcomes:
        """See :class:`Backend`."""
        for index, cell in enumerate(cells):
            yield compute(index, cell, program_digest())


class Processes:
    """In processes of this machine.

    Args:
        workers: how many.
        task: what a worker does with a cell.
    """

    def __init__(self, workers: int, task: Task | None = None) -> None:
        self.slots = workers
        self._task = task or compute

    def run(self, cells: Sequence[Cell]) -> Outcomes:
        """See :class:`Backend`.

        A worker that is killed takes the cells under way with it. Those are tried again at the end, each by itself, so that
        one that needs too much memory is told from its neighbours.
        """
        left = list(range(len(cells)))
        suspects: list[int] = []
        while left:
            lost: list[int] = []
            for outcome in self._pass(cells, left, lost, self.slots):
                left.remove(outcome.index)
                yield outcome
            suspects += lost
            left = [index for index in left if index not in lost]
        for index in suspects:
            yield from self._pass(cells, [index], lost := [], 1)
            if lost:
                yield Outcome(index, None, "its worker process died, twice (out of memory?)")

    def _pass(self, cells: Sequence[Cell], indices: Sequence[int], lost: list[int], workers: int) -> Outcomes:
        """One life of a pool. Cells that were under way when a worker died are put into ``lost``."""
        others = set(multiprocessing.active_children())
        context = multiprocessing.get_context("spawn")  # a fork would copy the threads of polars, but not their locks
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_worker)
        waiting = list(reversed(indices))
        running: dict[Future[Outcome], int] = {}
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    index = waiting.pop()
                    running[pool.submit(self._task, index, cells[index], program_digest())] = index
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    outcome = future.result()
                    del running[future]
                    yield outcome
        except BrokenProcessPool:
            lost += running.values()
        finally:
            busy = bool(running)
            pool.shutdown(wait=not busy, cancel_futures=True)
            if busy:  # interrupted: what is under way is given up
                for process in set(multiprocessing.active_children()) - others:
                    process.terminate()


def _worker() -> None:
    """Ctrl-C is the parent's to handle; a worker whose parent is gone leaves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def compute(index: int, cell: Cell, program: str) -> Outcome:
    """Run a cell; whatever it raises becomes its outcome, so that one bad cell does not end a sweep.

    ``program``: :func:`program_digest` where the cell was planned. Another program here would give results a false name.
    """
    from icefrog.experiment.cell_run import run_cell

    if program_digest() != program:
        return Outcome(index, None, "IceFrog is another version where this cell is computed, or was changed meanwhile")
    started_s = time.process_time()
    try:
        result = run_cell(cell)
        return Outcome(index, {**result, "cpu_s": round(time.process_time() - started_s, 3)})
    except UserError as error:
        return Outcome(index, None, f"{error.message} ({error.hint})")
    except Exception as error:
        return Outcome(index, None, f"{type(error).__name__}: {error}")
