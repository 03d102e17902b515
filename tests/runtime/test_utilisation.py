"""On a CPU slot, utilisation is what the job would use of its core, however crowded the machine is."""

from __future__ import annotations

import multiprocessing
import os
import time

from icefrog.runtime.profiling import _cpu_demand_s


def demand(work, wall_s: float) -> float:
    begin, cpu = time.perf_counter(), _cpu_demand_s()
    while (passed := time.perf_counter() - begin) < wall_s:
        work()
    return (_cpu_demand_s() - cpu) / passed


def spin(until: float) -> None:
    while time.time() < until:
        pass


def test_blocking_is_no_demand():
    assert demand(lambda: time.sleep(0.05), 0.3) < 0.5


def test_a_computing_thread_wants_its_core_even_when_it_does_not_get_it():
    crowd = [multiprocessing.Process(target=spin, args=(time.time() + 1.5,)) for _ in range(2 * (os.cpu_count() or 1))]
    for process in crowd:
        process.start()
    try:
        assert demand(lambda: None, 1.0) > 0.9
    finally:
        for process in crowd:
            process.join()
