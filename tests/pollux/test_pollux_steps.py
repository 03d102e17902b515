"""Steps of the grid in which nothing happens are taken in one go: the books are the same to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from invented import application

from icefrog.events import Grant
from icefrog.executors.sim.pollux.application import Application
from icefrog.executors.sim.pollux.job import PolluxJob, WorldConfig
from icefrog.testing import builders as b
from icefrog.types import GpuId

Seen = list[tuple[float, bool, float, int]]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Application:
    folder: Path = tmp_path_factory.mktemp("invented")
    return application(folder)


def life(job: PolluxJob, submit_s: float, crash_at: int) -> Seen:
    """What happens to it: times, whether it is the end, progress and epochs. Its attempt dies after so many events."""
    spec = job.spec
    gpus = tuple(GpuId(0, device) for device in range(spec.requested_gpus))
    grant = Grant(num_gpus=len(gpus), batch_per_gpu=16, accum_steps=2 // len(gpus))
    job.start(submit_s, 1, gpus, grant)
    seen: Seen = []
    attempt, last, now_s = 1, False, submit_s
    while not last:
        now_s, last = job.next_event()
        if len(seen) == crash_at and attempt == 1:
            now_s -= 0.25 * (now_s - submit_s)  # between two steps
            job.advance(now_s)
            job.fall_back()
            job.leave()
            attempt += 1
            job.start(now_s, attempt, gpus, grant)
            last = False
        else:
            job.advance(now_s)
            if not last:
                job.end_interval()
        seen.append((now_s, last, job.reported_samples, job._books.epoch))
    return seen


@pytest.mark.parametrize("crash_at", [0, 1, 9])
@pytest.mark.parametrize("submit_s", [0.0, 7.0, 60.25, 1e6 + 1.0])
@pytest.mark.parametrize(("step_s", "restart_s"), [(1.0, 3.0), (2.0, 0.0), (0.7, 0.0), (7.0, 2.5), (60.0, 30.0)])
@pytest.mark.parametrize("num_gpus", [1, 2])
def test_steps_taken_in_one_go_leave_the_same_books(
    app: Application, num_gpus: int, step_s: float, restart_s: float, submit_s: float, crash_at: int
) -> None:
    spec = b.job_spec("j", command=None, workload="bert", gpus=(1, 2), num_gpus=num_gpus, batch={"global": 32})
    jobs = [PolluxJob(spec, app, WorldConfig(step_s=step_s, restart_s=restart_s)) for _ in range(2)]
    jobs[1]._steps_within_an_epoch = lambda books: None  # type: ignore[method-assign]
    together, one_by_one = (life(job, submit_s, crash_at) for job in jobs)
    assert together == one_by_one
    assert together[-1][3] == 2


def test_they_are_taken_in_one_go(app: Application) -> None:
    """A hundred steps of an epoch cost a look or two."""
    spec = b.job_spec("j", command=None, workload="bert", gpus=(1, 2), num_gpus=1, batch={"global": 32})
    job = PolluxJob(spec, app, WorldConfig(step_s=1.0, restart_s=0.0))
    step, steps = job._step, []
    job._step = lambda books, until_s: (steps.append(until_s), step(books, until_s))  # type: ignore[func-returns-value, method-assign, misc]
    life(job, 0.0, 99)
    assert 2 <= len(steps) <= 6
