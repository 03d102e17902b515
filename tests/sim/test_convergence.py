"""What is true of progress while layers are frozen, apart from what anybody believes of it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import SettlingCurves, workload

from icefrog import events as ev
from icefrog.errors import UserError
from icefrog.estimate.freezeout import JUDGED_AT, Schedule, choose
from icefrog.estimate.throughput import throughput
from icefrog.executors.sim.convergence import VARIANCE_RATIO, MeasuredWorth, Prefix, moved
from icefrog.executors.sim.truth import WorldConfig
from icefrog.executors.sim.world import World
from icefrog.profile import FloatArray
from icefrog.simulate import SimSettings, icefrog_scenario, simulate
from icefrog.testing.builders import cluster
from icefrog.types import GpuId

FLAT = np.ones(10)


def table(depth: float, start: float) -> float:
    """Half of the layers cost a fifth of a step at the start, nothing at the end; all of them all of it."""
    return float(np.interp(depth, [0.0, 0.5, 1.0], [1.0, 0.8 + 0.2 * start, 0.0]))


@dataclass(frozen=True)
class Studied(SettlingCurves):
    """Curves of which worth and signal are known: the later the layer, the more it adds."""

    def signal(self, progress: float) -> FloatArray:
        values = np.arange(1.0, self.num_layers + 1.0)
        return np.asarray(values / values.sum())

    def worth(self, depth: float, start: float) -> float:
        return table(depth, start)


# --- the prefix


def test_layers_keep_the_time_at_which_they_froze() -> None:
    prefix = moved((), 3, 0.2)
    assert prefix == ((3, 0.2),)
    prefix = moved(prefix, 5, 0.4)
    assert prefix == ((3, 0.2), (5, 0.4))
    assert moved(prefix, 4, 0.6) == ((3, 0.2), (4, 0.4))
    assert moved(prefix, 3, 0.6) == ((3, 0.2),)
    assert moved(prefix, 2, 0.6) == ((2, 0.2),)
    assert moved(prefix, 0, 0.6) == ()


@given(st.lists(st.integers(0, 9), max_size=8))
def test_a_prefix_always_ends_at_the_boundary(depths: list[int]) -> None:
    prefix: Prefix = ()
    for step, depth in enumerate(depths):
        prefix = moved(prefix, depth, step / 10)
        assert (prefix[-1][0] if prefix else 0) == depth
        assert all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(prefix))


# --- the truths


def test_a_prefix_that_froze_at_once_is_worth_what_the_table_says() -> None:
    truth = MeasuredWorth(table, 10)
    assert truth.worth((), FLAT) == 1.0
    assert truth.worth(((5, 0.0),), FLAT) == pytest.approx(0.8)
    assert truth.worth(((5, 1.0),), FLAT) == pytest.approx(1.0)


def test_each_part_costs_what_it_cost_when_it_froze() -> None:
    """Half at the start: 0.8. A quarter of the rest at the end, when half is worth 1 and 3/4 0.5: half of that is left."""
    assert MeasuredWorth(table, 4).worth(((2, 0.0), (3, 1.0)), np.ones(4)) == pytest.approx(0.8 * 0.5)


def test_the_truth_can_lie_between_the_two_and_below() -> None:
    """Flat variances, half frozen: 0.5 by Eq. 3, 0.8 by the table."""
    half = ((5, 0.0),)
    assert VARIANCE_RATIO.worth(half, FLAT) == pytest.approx(0.5)
    assert MeasuredWorth(table, 10, share=0.5).worth(half, FLAT) == pytest.approx(np.sqrt(0.5 * 0.8))
    assert MeasuredWorth(table, 10, extra_steps=0.25).worth(half, FLAT) == pytest.approx(0.8 / 1.25)
    assert MeasuredWorth(table, 10, extra_steps=0.25).worth((), FLAT) == 1.0


@given(st.lists(st.integers(0, 10), min_size=1, max_size=6), st.floats(0, 1), st.floats(0, 1))
def test_freezing_more_never_makes_a_sample_worth_more(depths: list[int], share: float, extra: float) -> None:
    truth, prefix = MeasuredWorth(table, 10, share, extra), ()
    for step, depth in enumerate(sorted(depths)):
        deeper = moved(prefix, depth, step / 10)
        assert 0.0 < truth.worth(deeper, FLAT) <= truth.worth(prefix, FLAT) <= 1.0
        prefix = deeper


def test_a_schedule_is_tuned_on_the_truth() -> None:
    """The table says that half of the layers cost nothing late in training; flat variances, that they cost half of it."""
    speed = np.linspace(1.0, 1.5, 10)
    assert choose(speed, lambda _: FLAT) == Schedule(1.0)
    penalty = MeasuredWorth(table, 10).schedule_penalty(lambda _: FLAT)
    schedule = Schedule(0.5)
    depth = np.array([schedule.depth(point, 10) for point in JUDGED_AT])
    prefixes: list[Prefix] = [()]
    for at in JUDGED_AT:
        prefix: Prefix = ()
        for layer, end in enumerate(schedule.ends(10)):
            prefix = moved(prefix, layer + 1, float(end)) if end <= at and layer < 9 else prefix
        prefixes.append(prefix)
    expected = [MeasuredWorth(table, 10).worth(prefix, FLAT) for prefix in prefixes[1:]]
    assert penalty(schedule, depth) == pytest.approx(expected)


# --- a job in the world


def studied(num_jobs: int, **changes: float) -> tuple[World, WorldConfig]:
    work = workload(num_jobs)
    curves = {job_id: Studied(12) for job_id in work.curves}
    config = WorldConfig(noise=0.0, occupancy_noise=0.0, **changes)  # type: ignore[arg-type]
    return World(work.specs, work.profiles, curves, cluster(3, 4), config), config


def test_a_frozen_job_progresses_by_the_truth_and_counts_by_its_belief() -> None:
    """Six of twelve layers frozen from the start: 0.8 of a sample in truth, whatever the job believes."""
    world, _ = studied(1, measured_convergence=1.0)
    job = world.start_jobs()["job000"]
    gpus = job.spec.requested_gpus
    batch = job.spec.batch.initial // gpus
    grant = ev.Grant(num_gpus=gpus, batch_per_gpu=batch, min_frozen_layers=6, max_frozen_layers=6)
    job.start(0.0, 1, tuple(GpuId(0, device) for device in range(gpus)), grant)
    job.set_rate(1.0)
    speed = float(throughput(job.truth.profile, gpus, 1, batch, 6))
    assert job.frozen == 6
    assert job.rate.samples_per_s == pytest.approx(speed)
    assert job.rate.effective_per_s == pytest.approx(0.8 * speed)
    assert job.rate.counted_per_s == pytest.approx(speed)  # it has seen no gradient yet


def test_a_job_that_has_to_freeze_deeper_than_its_rule_would_counts_by_what_is_left_of_the_signal() -> None:
    """Eight of twelve layers, for a partner's sake; the rule looks at no more than six."""
    world, _ = studied(1, stats_noise=0.0)
    job = world.start_jobs()["job000"]
    gpus = job.spec.requested_gpus
    batch = job.spec.batch.initial // gpus
    grant = ev.Grant(num_gpus=gpus, batch_per_gpu=batch, freezing="signal", min_frozen_layers=8, max_frozen_layers=None)
    job.start(0.0, 1, tuple(GpuId(0, device) for device in range(gpus)), grant)
    for _ in range(2):
        job.set_rate(1.0)
        at_s, _ = job.next_event()
        job.advance(at_s)
        job.end_interval()
    job.set_rate(1.0)
    assert job.frozen == 8
    assert job.psi == pytest.approx((42 / 78) ** 0.5, rel=1e-3)
    assert job.rate.counted_per_s == pytest.approx(job.psi * job.rate.samples_per_s)


def run(
    policy: str, config: WorldConfig, *, studied: bool = True, rule: str = "auto", **options: str
) -> list[ev.AnyRecord]:
    work = workload(12, share=False, rule=rule)
    curves = {job_id: Studied(12) for job_id in work.curves} if studied else work.curves
    settings = SimSettings(seed=1, world=config)
    scenario = icefrog_scenario(work.specs, work.profiles, curves, cluster(3, 4), settings)
    return list(simulate(scenario, policy, options, settings).records)


def last_end_s(records: list[ev.AnyRecord]) -> float:
    return max(record.time_s for record in records if isinstance(record, ev.JobFinished))


def test_estimates_know_nothing_of_the_truth() -> None:
    """The first reports are told the same variances and believe the same psi, although progress is another."""
    eq3, measured = (run("icefrog", WorldConfig(measured_convergence=share), batch="fixed") for share in (0.0, 1.0))
    seen = [
        [(r.job_id, r.variance, r.psi) for r in records if isinstance(r, ev.ProgressReported) and r.epoch <= 1][:3]
        for records in (eq3, measured)
    ]
    assert seen[0] == seen[1]
    assert last_end_s(eq3) != last_end_s(measured)


def test_the_same_world_twice_is_the_same_to_the_bit_and_eq3_needs_no_measurement() -> None:
    config = WorldConfig(measured_convergence=1.0)
    assert run("pollux+", config) == run("pollux+", config)
    assert run("icefrog", WorldConfig()) == run("icefrog", WorldConfig(), studied=False)
    with pytest.raises(UserError, match="neither its signal nor the worth"):
        run("icefrog", config, studied=False)
    with pytest.raises(UserError, match="measured_convergence: 2"):
        run("icefrog", WorldConfig(measured_convergence=2.0))


def test_with_the_signal_as_penalty_jobs_report_it_and_keep_60_percent_of_it() -> None:
    """Layer i of 12 holds i / 78 of the signal: 57 / 78 are left behind 6 frozen ones, the most that are allowed."""
    reports = [r for r in run("icefrog", WorldConfig(), penalty="signal") if isinstance(r, ev.ProgressReported)]
    told = [report for report in reports if report.signal is not None]
    assert told
    for report in told:
        assert report.signal is not None
        assert sum(report.signal) == pytest.approx(1.0, abs=2e-3)
        assert sum(report.signal[report.frozen_layers :]) >= 0.6 - 1e-3
    deepest = max(report.frozen_layers for report in told)
    assert 0 < deepest <= 6
    frozen = next(report for report in told if report.frozen_layers == deepest)
    assert frozen.signal is not None
    assert frozen.psi == pytest.approx(sum(frozen.signal[deepest:]) ** 0.5, rel=5e-3)


@pytest.mark.parametrize(
    ("rule", "penalty", "by_signal"),
    [("tuner", "signal", False), ("progress", "tuner", True), ("auto", "signal", True), ("auto", "tuner", False)],
)
def test_a_job_follows_the_rule_that_it_names_else_the_penalty(rule: str, penalty: str, by_signal: bool) -> None:
    reports = [
        r for r in run("icefrog", WorldConfig(), rule=rule, penalty=penalty) if isinstance(r, ev.ProgressReported)
    ]
    frozen = [report for report in reports if report.frozen_layers]
    assert frozen
    assert all((report.signal is not None) == by_signal for report in frozen)


def test_who_follows_a_schedule_or_freezes_nothing_goes_by_no_signal() -> None:
    """Whatever its rule: live as here, FreezeOut's schedule comes first."""
    for policy in ("pollux", "pollux+"):
        reports = [
            r for r in run(policy, WorldConfig(), rule="progress", studied=False) if isinstance(r, ev.ProgressReported)
        ]
        assert reports
        assert all(report.signal is None for report in reports)


def test_without_it_nothing_of_the_signal_is_told() -> None:
    reports = [r for r in run("icefrog", WorldConfig()) if isinstance(r, ev.ProgressReported)]
    assert reports
    assert all(report.signal is None for report in reports)
    assert run("fifo", WorldConfig(measured_convergence=1.0)) == run("fifo", WorldConfig())
