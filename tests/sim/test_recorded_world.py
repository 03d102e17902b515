"""Live logs written by hand, with round numbers: what is read out of them, and what their simulation makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from icefrog import events as ev
from icefrog.errors import UserError
from icefrog.estimate.throughput import throughput
from icefrog.executors.sim.recorded import Recording, record, recorded_scenario, recorded_settings
from icefrog.executors.sim.recorded.recording import StartCosts
from icefrog.profile import Profile
from icefrog.simulate import RunResult, simulate
from icefrog.spec import FreezeRule, Target
from icefrog.testing.builders import cluster, gpus, job_spec, profile

ORIGIN_S = 1.7e9
EPOCH = 1000  # samples
UP_S, WARMUP_S, END_S, STOP_S = 5.0, 2.0, 1.0, 3.0
VARIANCE = (1.0, 1.0, 40.0, 40.0)
"""Freezing the first two of four layers: psi = 80 / 82."""


def epoch_s(num_gpus: int, frozen_layers: int = 0, slower: float = 1.25) -> float:
    """Seconds of an epoch live: by so much slower than the profile says."""
    speed = throughput(profile(4), num_gpus, 1, 64 // num_gpus, frozen_layers)
    return slower * EPOCH / float(speed)


@dataclass
class Live:
    """A log as a live controller and its jobs would write it."""

    records: list[ev.AnyRecord] = field(default_factory=list)
    told: Profile = field(default_factory=lambda: profile(4))
    statistics: dict[str, tuple[float, ...]] = field(default_factory=lambda: {"variance": VARIANCE})

    def submit(self, name: str, at_s: float, **fields: object) -> None:
        given = {"gpus": (1,), "batch": {"global": 64}, "max_epochs": 40, "target": Target(value=0.9), **fields}
        self.records.append(ev.JobSubmitted(time_s=ORIGIN_S + at_s, job=job_spec(name, **given)))

    def attempt(
        self, name: str, at_s: float, epochs: list[int], *, number: int = 1, done: float = 0.0, num_gpus: int = 1
    ) -> float:
        """Start and run as many epochs as there are entries: how many layers are frozen in each. The time it is then."""
        grant = ev.Grant(num_gpus=num_gpus, batch_per_gpu=64 // num_gpus)
        common = {"job_id": name, "attempt": number}
        now_s = ORIGIN_S + at_s
        self.records.append(ev.Start(time_s=now_s, gpus=gpus(num_gpus), grant=grant, **common))
        now_s += UP_S
        total = 40.0 * EPOCH
        self.records.append(ev.JobStarted(time_s=now_s, total_samples=total, **common))
        now_s += WARMUP_S
        for index, frozen in enumerate(epochs):
            now_s += epoch_s(num_gpus, frozen)
            done += EPOCH * (80.0 / 82.0 if frozen else 1.0)
            later = epochs[index + 1] if index + 1 < len(epochs) else frozen
            report = ev.ProgressReported(
                time_s=now_s,
                epoch=index + 1,
                effective_samples=done,
                total_samples=total,
                frozen_layers=later,
                psi=80.0 / 82.0 if later else 1.0,
                profile=self.told,
                **self.statistics,
                **common,
            )
            self.records.append(report)
        return now_s - ORIGIN_S

    def finish(self, name: str, at_s: float, done: float, number: int = 1) -> float:
        at_s += END_S
        finished = ev.JobFinished(
            time_s=ORIGIN_S + at_s, job_id=name, attempt=number, outcome="completed", effective_samples=done
        )
        self.records.append(finished)
        return at_s


def queue() -> tuple[Live, float, float]:
    """Two jobs on one GPU, first in, first out; and when each was done."""
    live = Live()
    live.submit("first", 0.0)
    live.submit("second", 4.0, max_epochs=60)
    first_s = live.finish("first", live.attempt("first", 0.0, [0] * 6), 6000.0)
    second_s = live.finish("second", live.attempt("second", first_s, [0] * 4), 4000.0)
    return live, first_s, second_s


def simulated(costs: Recording, run: Recording, policy: str, num_gpus: int = 1) -> RunResult:
    scenario = recorded_scenario(costs, run, cluster(1, num_gpus))
    return simulate(scenario, policy, None, recorded_settings(run, round_s=15.0, restart_s=10.0))


def finishes(result: RunResult) -> Iterator[float | None]:
    return (job.finish_s for job in result.state.jobs.values())


def test_what_a_log_says_of_its_jobs() -> None:
    live, first_s, _ = queue()
    jobs = record(live.records).jobs
    first, second = jobs["first"], jobs["second"]
    assert (first.submit_s, first.begin_s, second.submit_s) == (0.0, 0.0, 4.0)
    assert first.finish_s == pytest.approx(first_s)
    assert second.begin_s == pytest.approx(first_s)
    assert first.needed_samples == 6000.0
    assert [start.up_s for start in first.starts] == pytest.approx([UP_S])
    assert first.warmups_s()[0] == (1, pytest.approx(WARMUP_S, abs=1e-5))
    assert first.end_s == pytest.approx(END_S)
    assert len(first.intervals) == 5
    assert first.seconds_per_sample(1, 0) == pytest.approx(epoch_s(1) / EPOCH, rel=1e-6)


@pytest.mark.parametrize("epochs", [0, 2, 3])
def test_an_interval_of_two_grants_measures_neither(epochs: int) -> None:
    """The job got its GPU for itself so many epochs after it was up; or before it was up at all."""
    live = Live()
    live.submit("only", 0.0)
    live.finish("only", live.attempt("only", 0.0, [0] * 6), 6000.0)
    start = live.records[1]
    assert isinstance(start, ev.Start)
    live.records[1] = start.model_copy(update={"grant": start.grant.model_copy(update={"shared": True})})
    told_s = ORIGIN_S + (1.0 if epochs == 0 else UP_S + WARMUP_S + (epochs + 0.5) * epoch_s(1))
    regrant = ev.Regrant(time_s=told_s, job_id="only", attempt=1, grant=start.grant)
    job = record(sorted([*live.records, regrant], key=lambda one: one.time_s)).jobs["only"]
    shared = [one.grant.shared for one in (job.starts[0].first, *job.intervals) if one is not None]
    assert shared == [True] * epochs + [False] * (6 if epochs == 0 else 5 - epochs)


def test_the_simulation_of_a_run_from_its_own_costs_is_that_run() -> None:
    live, first_s, second_s = queue()
    run = record(live.records)
    assert list(finishes(simulated(run, run, "fifo"))) == pytest.approx([first_s, second_s], abs=1e-3)


def test_another_order_is_told_from_the_same_costs() -> None:
    """srtf knows nothing of a job that was never up, and takes it first; the other saves, leaves, and comes back."""
    live, *_ = queue()
    run = record(live.records)
    costs = replace(run, jobs={**run.jobs, "first": replace(run.jobs["first"], stops_s=(STOP_S,))})
    late = replace(run.jobs["second"], submit_s=9.0)
    arrivals = replace(run, jobs={**run.jobs, "second": late})
    result = simulated(costs, arrivals, "srtf")
    second_s = 9.0 + UP_S + WARMUP_S + 4 * epoch_s(1) + END_S
    ran_s = 9.0 - UP_S - WARMUP_S  # of the first, before it was preempted
    first_s = second_s + STOP_S + UP_S + WARMUP_S + 6 * epoch_s(1) - ran_s + END_S
    assert list(finishes(result)) == pytest.approx([first_s, second_s], abs=1e-3)
    assert result.state.jobs["first"].num_restarts == 1


def test_a_gpu_count_that_was_not_tried_follows_the_profile() -> None:
    live = Live()
    live.submit("only", 0.0, gpus=(1, 2), num_gpus=2)
    live.finish("only", live.attempt("only", 0.0, [0] * 5), 5000.0)
    run = record(live.records)
    (finish_s,) = finishes(simulated(run, run, "fifo", num_gpus=2))
    assert finish_s == pytest.approx(UP_S + WARMUP_S + 5 * epoch_s(2) + END_S, abs=1e-3)


def test_frozen_epochs_count_less_and_the_job_ends_with_a_whole_one() -> None:
    live = Live()
    live.submit("only", 0.0)
    epochs = [0] * 5 + [2] * 10
    done = 5000.0 + 10 * EPOCH * 80.0 / 82.0
    live.finish("only", live.attempt("only", 0.0, epochs), done)
    run = record(live.records)
    depths = [one.frozen_layers for one in run.jobs["only"].intervals]
    assert depths == epochs[1:]
    assert {round(one.samples, 3) for one in run.jobs["only"].intervals} == {EPOCH}
    whole = run.jobs["only"].spec.model_copy(update={"freeze": FreezeRule(rule="none")})
    arrivals = replace(run, jobs={"only": replace(run.jobs["only"], spec=whole)})
    (finish_s,) = finishes(simulated(run, arrivals, "icefrog"))
    assert finish_s == pytest.approx(UP_S + WARMUP_S + 15 * epoch_s(1) + END_S, abs=1e-3)  # 14.76 epochs' worth


def test_a_simulated_job_freezes_by_the_recorded_statistics() -> None:
    live = Live()
    live.submit("only", 0.0)
    live.finish("only", live.attempt("only", 0.0, [0] * 20), 20_000.0)
    run = record(live.records)
    result = simulated(run, run, "icefrog")
    frozen = [one.frozen_layers for one in result.records if isinstance(one, ev.ProgressReported)]
    assert frozen[:4] == [0, 0, 0, 0]  # up, and the warm-up: a tenth of P0 = 40 epochs
    assert max(frozen) > 0
    (finish_s,) = finishes(result)
    assert finish_s is not None
    assert finish_s < run.jobs["only"].finish_s


def test_a_job_that_went_by_its_signal_does_so_again_and_its_samples_count_as_it_counted() -> None:
    """Behind two of four layers .96 of the signal is left; nobody measured a variance."""
    live = Live(statistics={"signal": (0.02, 0.02, 0.46, 0.5)})
    live.submit("only", 0.0)
    live.finish("only", live.attempt("only", 0.0, [0] * 20), 20_000.0)
    run = record(live.records)
    result = simulated(run, run, "icefrog")
    told = [one for one in result.records if isinstance(one, ev.ProgressReported)]
    frozen = [one for one in told if one.frozen_layers == 2]
    assert max(one.frozen_layers for one in told) == 2
    assert [one.psi for one in frozen] == pytest.approx([0.96**0.5] * len(frozen), abs=1e-6)
    (state,) = result.state.jobs.values()
    assert state.finish_s is not None
    at_full_speed = sum(one.frozen_layers == 0 for one in told[1:])
    epochs = at_full_speed + (20 - at_full_speed) / 0.96**0.5
    assert told[-1].epoch == pytest.approx(epochs, abs=1.0)
    assert state.finish_s < run.jobs["only"].finish_s


def test_nothing_is_known_of_a_job_before_it_says_so() -> None:
    live, *_ = queue()
    run = record(live.records)
    result = simulated(run, run, "fifo")
    mine = [one for one in result.records if getattr(one, "job_id", None) == "first"]
    started = next(one for one in mine if isinstance(one, ev.JobStarted))
    first, second, *_ = (one for one in mine if isinstance(one, ev.ProgressReported))
    assert (started.total_samples, started.profile) == (None, None)
    assert (first.total_samples, first.profile) == (40.0 * EPOCH, None)
    assert second.profile is not None
    finished = next(one for one in mine if isinstance(one, ev.JobFinished))
    assert finished.effective_samples == pytest.approx(6000.0)


def test_runs_with_which_nothing_can_be_compared_are_refused() -> None:
    live, *_ = queue()
    with pytest.raises(UserError, match="second is not finished"):
        record(live.records[:-1])
    crash = ev.JobCrashed(time_s=ORIGIN_S + 6.0, job_id="first", attempt=1, reason="killed")
    with pytest.raises(UserError, match="first did not run to its end"):
        record([*live.records[:4], crash])
    with pytest.raises(UserError, match="no job"):
        record([])
    run = record(live.records)
    other = replace(run, jobs={"third": run.jobs["first"]})
    with pytest.raises(UserError, match="third was not recorded"):
        recorded_scenario(run, other, cluster(1, 1))


def test_a_slower_machine_is_told_by_the_samples_and_trains_more_slowly() -> None:
    live, first_s, _ = queue()
    run = record(live.records)
    slow = run.slowed(1.5)
    assert slow.slower_than(run) == pytest.approx(1.5)
    frozen = {"first": replace(run.jobs["first"], intervals=())}
    assert replace(run, jobs=frozen).slower_than(run) is None
    finish_s, _ = finishes(simulated(slow, run, "fifo"))
    started_s = UP_S + END_S  # as they were
    assert finish_s == pytest.approx(started_s + 1.5 * (first_s - started_s), abs=1e-3)


def test_a_job_that_was_counted_as_started_is_up_when_it_says_so() -> None:
    """An executor takes ranks that are silent for long for a job that does not report; this one does, at last."""
    live, *_ = queue()
    index = next(i for i, one in enumerate(live.records) if isinstance(one, ev.JobStarted))
    real = live.records[index]
    assert isinstance(real, ev.JobStarted)
    says = {"epoch": 0, "effective_samples": 0.0, "total_samples": real.total_samples, "reason": "first report"}
    first = ev.ProgressReported(time_s=real.time_s, job_id="first", attempt=1, **says)
    early = real.model_copy(update={"time_s": real.time_s - UP_S, "total_samples": None})
    live.records[index : index + 1] = [early, first]
    (start,) = record(live.records).jobs["first"].starts
    assert start.up_s == pytest.approx(UP_S)


def test_medians_of_starts_are_by_gpu_count_and_the_nearest_stands_for_others() -> None:
    costs = StartCosts.of([(1, 4.0), (1, 6.0), (1, 50.0), (4, 9.0)])
    assert [costs.seconds(count) for count in (1, 2, 3, 8)] == [6.0, 6.0, 9.0, 9.0]
    assert StartCosts.of([]).seconds(1) is None
