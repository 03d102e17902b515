"""One job of the Pollux world: it advances in steps of the world's grid, by the measurements.

Between two changes of its allocation nothing from outside touches a job, so its books are looked at ahead: up to its end,
or to the end of the step in which it has something new to report.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from icefrog.events import Grant, ProgressReported
from icefrog.executors.sim.pollux.agent import Agent
from icefrog.executors.sim.pollux.application import Application, LocalBatch
from icefrog.profile import Profile
from icefrog.spec import JobSpec
from icefrog.types import GpuId

_SAME_TIME_S = 1e-6  # the executor rounds times to microseconds
_LATE_S = 2e-6
"""A job that ends at the very second at which a step begins (the rest of its last epoch is rounded to 0 s) is only found
complete in that step: the round before it still counts the job, and may take its GPUs. So its end comes this much later."""
_NO_SHARING = (0.0, 100.0)
"""(memory, utilisation): not measured; nobody is offered a shared GPU here."""


@dataclass(frozen=True, slots=True)
class WorldConfig:
    """Settings of the Pollux world."""

    seed: int = 0
    step_s: float = 60.0
    """The grid on which progress is computed: the scheduling round."""
    restart_s: float = 30.0
    """What every start, the first included, costs: no progress, GPUs held."""
    failures_per_gpu_h: float = 0.0


@dataclass(slots=True)
class Books:
    """Where a job stands."""

    now_s: float = 0.0
    progress: float = 0.0  # scale-invariant iterations
    epoch: int = 0  # c: epochs done
    delay_s: float = 0.0  # rest of the restart
    batch: LocalBatch | None = None
    agent: Agent | None = None  # what the job has measured of itself; None while it may not move its batch
    finish_s: float | None = None

    def copy(self) -> Books:
        """Books of one's own; ``dataclasses.replace`` takes three times as long, and this is done at every event."""
        return Books(self.now_s, self.progress, self.epoch, self.delay_s, self.batch, self.agent, self.finish_s)


class PolluxJob:
    """The state of one job; implements :class:`icefrog.executors.sim.base.SimulatedJob`.

    Args:
        spec: with the application's name in ``workload``.
        app: its measurements.
        config: of the world.
    """

    def __init__(self, spec: JobSpec, app: Application, config: WorldConfig) -> None:
        self.spec = spec
        self.app = app
        self._config = config
        self._books = Books()
        self._saved = Books()
        self._ahead: Books | None = None  # the books at the next event
        self._due = False  # that event is now
        self._told: tuple[int, Agent | None] = (0, None)  # what its last report said
        self._told_before: tuple[int, Agent | None] = (0, None)
        self.attempt = 0
        self.generation = 0
        self.gpus: tuple[GpuId, ...] = ()
        self._placement: tuple[int, ...] = ()
        self._grant: Grant | None = None

    @property
    def job_id(self) -> str:
        """The job's id."""
        return self.spec.job_id

    @property
    def holds(self) -> bool:
        """Whether an attempt holds GPUs."""
        return bool(self.gpus)

    @property
    def total_samples(self) -> float:
        """P0 = progress after the last epoch x the initial batch, effective samples."""
        return self.app.thresholds[-1] * self.app.init_batch

    @property
    def reported_samples(self) -> float:
        """Effective samples done: scale-invariant iterations x the initial batch."""
        return self._books.progress * self.app.init_batch

    # -- the attempt -------------------------------------------------------------------------------------------------------

    def start(self, now_s: float, attempt: int, gpus: tuple[GpuId, ...], grant: Grant) -> None:
        """Hold the GPUs; the first seconds are lost."""
        self.attempt, self.gpus = attempt, gpus
        self._placement, self._due = run_lengths(gpus), False
        self._books = self._books.copy()
        self._books.now_s, self._books.delay_s = now_s, self._config.restart_s
        self.regrant(now_s, grant)

    def regrant(self, now_s: float, grant: Grant) -> None:
        """Take a batch, or the freedom to choose one."""
        self._grant = grant
        books = self._books
        if grant.elastic_batch and self.app.rules.rigid is None:
            books.agent = books.agent or Agent.new()
        else:
            books.agent = None
        books.batch = self._choose_batch(books)
        self._ahead = None

    def leave(self) -> None:
        """Let the GPUs go."""
        self.gpus, self._grant, self._placement, self._ahead = (), None, (), None
        self.generation += 1

    def save(self) -> None:
        """Keep the progress as it is now."""
        self._saved = self._books.copy()

    def fall_back(self) -> None:
        """Progress since the last checkpoint is lost; what the job learned of its speed is not."""
        saved = self._saved
        self._books = replace(self._books, progress=saved.progress, epoch=saved.epoch, finish_s=None)
        self._ahead = None

    # -- time --------------------------------------------------------------------------------------------------------------

    def advance(self, now_s: float) -> None:
        """Bring the books to ``now_s``."""
        if now_s <= self._books.now_s or not self.holds:
            return
        ahead = self._ahead
        if ahead is not None and abs(now_s - ahead.now_s) < _SAME_TIME_S:
            self._books, self._ahead, self._due = ahead, None, True
            return
        books = self._books.copy()
        while books.now_s < now_s and books.finish_s is None:
            self._step(books, min(self._step_end(books.now_s), now_s))
        self._books, self._ahead, self._due = books, None, False

    def set_rate(self, sharing: float) -> None:
        """Nothing to recompute: speeds follow from the allocation, and GPUs are not shared here."""

    def next_event(self) -> tuple[float, bool]:
        """The end of the job, or of the first step at whose end there is something new to report."""
        if self._books.finish_s is not None:
            return self._books.now_s, True
        if self._due:
            return self._books.now_s, False
        if self._ahead is None:
            self._ahead = self._look_ahead()
        return self._ahead.now_s, self._ahead.finish_s is not None

    def finish(self, now_s: float) -> float:
        """The last epoch is over."""
        return now_s if self._books.finish_s is None else self._books.finish_s

    def end_interval(self) -> None:
        """There is something new: it is kept, and told in the next report."""
        self._due = False
        self.save()
        self._told_before, self._told = self._told, (self._books.epoch, self._books.agent)

    def report(self, now_s: float) -> ProgressReported:
        """Epochs done; of a job that moves its batch also its fitted speed and its gradient statistics."""
        books = self._books
        assert books.batch is not None
        agent, before = books.agent, self._told_before[1]
        profile: Profile | None = None
        variance: tuple[float, ...] | None = None
        sqr_norm: tuple[float, ...] | None = None
        if agent is not None:
            if before is None or agent.params is not before.params:
                profile = agent.profile(self.app)
            sqr_norm, variance = agent.reported_stats(self.app)
        step_s = self.app.step_s(self._placement, books.batch)
        return ProgressReported(
            time_s=now_s,
            job_id=self.job_id,
            attempt=self.attempt,
            epoch=books.epoch,
            effective_samples=self.reported_samples,
            throughput=round(_global_batch(books.batch, len(self.gpus)) / step_s, 3),
            variance=variance,
            sqr_norm=sqr_norm,
            profile=profile,
            reason=f"epoch {books.epoch} of {self.app.epochs}",
        )

    def remaining_s(self, now_s: float) -> float | None:
        """Not known: how long a job takes follows from its batch, step by step."""
        return None

    def true_occupancy(self) -> tuple[float, float]:
        """Not measured."""
        return _NO_SHARING

    # -- the step ----------------------------------------------------------------------------------------------------------

    def _look_ahead(self) -> Books:
        books = self._books.copy()
        while books.finish_s is None:
            self._steps_within_an_epoch(books)
            self._step(books, self._step_end(books.now_s))
            if (books.epoch, books.agent) != self._told:
                break
        return books

    def _step_end(self, now_s: float) -> float:
        grid = self._config.step_s
        return (math.floor(now_s / grid + 1e-9) + 1.0) * grid

    def _steps_within_an_epoch(self, books: Books) -> None:
        """The steps of which nothing would be told before the one in which the epoch ends, of a job that learns nothing of
        itself: what :meth:`_step` does to the books, to the bit (whole seconds add up exactly)."""
        grid = self._config.step_s
        steps = round(books.now_s / grid)
        if books.agent is not None or books.delay_s > 0.0 or books.epoch != self._told[0]:
            return
        if grid % 1.0 or books.now_s != steps * grid:
            return
        gain = self._goodput(books, len(self.gpus)) * grid
        threshold = self.app.thresholds[books.epoch]
        progress = books.progress
        while progress + gain < threshold:
            progress += gain
            steps += 1
        books.progress, books.now_s = progress, steps * grid

    def _step(self, books: Books, until_s: float) -> None:
        """One step of the grid (or the part of it up to ``until_s``), to the end of the job at most."""
        since_s = books.now_s
        seconds = until_s - since_s
        delay = min(books.delay_s, seconds)
        books.delay_s -= delay
        books.now_s += delay
        seconds -= delay
        num_gpus = len(self.gpus)
        while seconds > 0.0:
            assert books.batch is not None
            known = books.agent
            goodput = self._goodput(books, num_gpus)
            threshold = self.app.thresholds[books.epoch]
            if books.progress + goodput * seconds < threshold:
                books.progress += goodput * seconds
                books.now_s += seconds
                seconds = 0.0
            else:
                passed = float(round((threshold - books.progress) / goodput))
                books.progress = threshold
                books.epoch += 1
                books.now_s += passed
                seconds -= passed
                if books.epoch == self.app.epochs:
                    books.finish_s = books.now_s
                    if books.finish_s == since_s:
                        books.now_s += _LATE_S
                    return
            if books.agent is not known:  # otherwise it would choose the same again
                books.batch = self._choose_batch(books)

    def _goodput(self, books: Books, num_gpus: int) -> float:
        """Scale-invariant iterations a second; a job that measures itself writes down what it sees."""
        assert books.batch is not None
        batch = _global_batch(books.batch, num_gpus)
        step_s, sync_s = self.app.times(self._placement, books.batch.batch_per_gpu)
        grad_sqr, grad_var = self.app.grad_stats(batch, books.epoch)
        if books.agent is not None:
            where = (len(self._placement), num_gpus, books.batch.batch_per_gpu)
            books.agent = books.agent.observe(where, (step_s, sync_s), (grad_sqr, grad_var))
        scale = batch / self.app.init_batch
        gain = (grad_var + grad_sqr) / (grad_var / scale + grad_sqr)
        return gain / (step_s + books.batch.accum_steps * (step_s - sync_s))

    def _choose_batch(self, books: Books) -> LocalBatch:
        assert self._grant is not None
        num_gpus = len(self.gpus)
        if books.agent is not None:
            return books.agent.best_batch(self.app, len(self._placement), num_gpus)
        if self._grant.elastic_batch and self.app.rules.rigid is not None:
            return self.app.local_batch(self.app.rules.rigid[1], num_gpus)
        return LocalBatch(self._grant.batch_per_gpu, self._grant.accum_steps - 1)


def run_lengths(gpus: Sequence[GpuId]) -> tuple[int, ...]:
    """GPUs on each node, in the order of ranks."""
    return tuple(len(list(run)) for _, run in groupby(gpu.node for gpu in gpus))


def _global_batch(batch: LocalBatch, num_gpus: int) -> int:
    return num_gpus * batch.batch_per_gpu * (batch.accum_steps + 1)
