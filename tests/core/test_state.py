"""The state machine, as stories told in records."""

from __future__ import annotations

import pytest

from icefrog import events as ev
from icefrog.state import FINAL, GRANTED, TRANSITIONS, ClusterState, IllegalTransitionError, Phase
from icefrog.testing import builders as b


def submit(state: ClusterState, name: str = "a", at: float = 0.0, **changes: object) -> None:
    state.apply(ev.JobSubmitted(time_s=at, job=b.job_spec(name, **changes)))


def start(state: ClusterState, name: str = "a", at: float = 0.0, attempt: int = 1, gpus=None, shared=False) -> None:
    gpus = gpus if gpus is not None else b.gpus(2)
    grant = b.grant(len(gpus), shared=shared)
    state.apply(ev.Start(time_s=at, job_id=name, attempt=attempt, gpus=gpus, grant=grant))


def started(state: ClusterState, name: str = "a", at: float = 0.0, attempt: int = 1) -> None:
    state.apply(ev.JobStarted(time_s=at, job_id=name, attempt=attempt))


def test_a_job_waits_runs_is_resized_and_finishes(state):
    submit(state, at=10.0)
    start(state, at=15.0)
    started(state, at=20.0)
    state.apply(
        ev.ProgressReported(
            time_s=50.0,
            job_id="a",
            attempt=1,
            epoch=1,
            effective_samples=500.0,
            frozen_layers=2,
            psi=0.9,
            variance=(1.0, 2.0, 3.0),
            metric=0.4,
        )
    )
    state.apply(ev.Resize(time_s=60.0, job_id="a", attempt=2, gpus=b.gpus(4), grant=b.grant(4)))
    state.apply(ev.JobStopped(time_s=62.0, job_id="a", attempt=1, effective_samples=600.0))
    started(state, at=65.0, attempt=2)
    job = state.jobs["a"]
    assert (job.phase, job.attempt, job.num_restarts, job.frozen_layers) == (Phase.RUNNING, 2, 1, 2)
    assert job.measured_restart_s == 5.0  # asked at 60, up at 65
    state.apply(ev.JobFinished(time_s=100.0, job_id="a", attempt=2, outcome="completed", metric=0.98))
    assert job.phase is Phase.COMPLETED
    assert job.queue_s == pytest.approx(10.0 + 3.0)  # 10..20 before the start, 62..65 between the attempts
    assert job.attained_gpu_s == pytest.approx(42.0 * 2 + 35.0 * 4)
    assert job.effective_samples == 600.0
    assert state.active == {}


def test_a_preempted_job_waits_again_and_keeps_its_progress(state):
    submit(state)
    start(state)
    started(state, at=1.0)
    state.apply(ev.Preempt(time_s=5.0, job_id="a", attempt=1))
    assert state.jobs["a"].gpus == ()  # its grant is over at once
    state.apply(ev.JobStopped(time_s=6.0, job_id="a", attempt=1, effective_samples=70.0))
    job = state.jobs["a"]
    assert (job.phase, job.waiting_since_s, job.effective_samples) == (Phase.PENDING, 6.0, 70.0)
    start(state, at=8.0, attempt=2)
    started(state, at=9.0, attempt=2)
    assert job.queue_s == pytest.approx(1.0 + 3.0)


def test_waiting_is_not_measured_as_the_cost_of_a_restart(state):
    submit(state)
    start(state)
    started(state, at=1.0)
    state.apply(ev.Resize(time_s=10.0, job_id="a", attempt=2, gpus=b.gpus(4), grant=b.grant(4)))
    state.apply(ev.Preempt(time_s=11.0, job_id="a", attempt=2))  # before the second attempt came up
    state.apply(ev.JobStopped(time_s=12.0, job_id="a", attempt=1))
    start(state, at=3600.0, attempt=3)
    started(state, at=3605.0, attempt=3)
    assert state.jobs["a"].measured_restart_s == 5.0


def test_a_crash_returns_the_job_to_the_queue_at_its_checkpoint(state):
    submit(state)
    start(state)
    started(state, at=1.0)
    state.apply(ev.ProgressReported(time_s=5.0, job_id="a", attempt=1, epoch=1, effective_samples=90.0))
    state.apply(ev.JobCrashed(time_s=6.0, job_id="a", attempt=1, reason="killed", effective_samples=60.0))
    job = state.jobs["a"]
    assert (job.phase, job.num_crashes, job.effective_samples) == (Phase.PENDING, 1, 60.0)


def test_the_old_attempt_may_crash_or_finish_while_a_resize_is_under_way(state):
    for name, first in (("a", 0), ("b", 2)):
        submit(state, name)
        start(state, name, gpus=b.gpus(2, first=first))
        started(state, name)
        state.apply(
            ev.Resize(time_s=2.0, job_id=name, attempt=2, gpus=b.gpus(2, node=1, first=first), grant=b.grant(2))
        )
    state.apply(ev.JobCrashed(time_s=3.0, job_id="a", attempt=1, reason="killed"))
    started(state, "a", at=4.0, attempt=2)
    assert state.jobs["a"].phase is Phase.RUNNING
    state.apply(ev.JobFinished(time_s=3.0, job_id="b", attempt=1, outcome="completed"))
    assert state.jobs["b"].phase is Phase.COMPLETED


def test_waiting_time_before_a_failed_first_start_is_not_lost(state):
    submit(state, at=0.0)
    start(state, at=10.0)
    state.apply(ev.JobCrashed(time_s=12.0, job_id="a", attempt=1, reason="no such program"))
    assert state.jobs["a"].waiting_since_s == 0.0


def test_cancelling(state):
    submit(state, "waiting")
    state.apply(ev.CancelRequested(time_s=1.0, job_id="waiting"))
    assert state.jobs["waiting"].phase is Phase.CANCELLED
    submit(state, "running")
    start(state, "running")
    started(state, "running")
    state.apply(ev.CancelRequested(time_s=2.0, job_id="running"))
    assert [job.job_id for job in state.snapshot().jobs] == []  # none of a policy's business any more
    state.apply(ev.Stop(time_s=2.0, job_id="running", attempt=1))
    state.apply(ev.JobStopped(time_s=3.0, job_id="running", attempt=1))
    assert state.jobs["running"].phase is Phase.CANCELLED
    state.apply(ev.CancelRequested(time_s=4.0, job_id="running"))  # crossed the end: changes nothing
    assert state.jobs["running"].phase is Phase.CANCELLED


def test_sharers_hold_half_a_gpu_each(state):
    for name in ("a", "b"):
        submit(state, name, share=True)
        start(state, name, gpus=b.gpus(1), shared=True)
        started(state, name)
    state.apply(ev.JobFinished(time_s=10.0, job_id="a", attempt=1, outcome="completed"))
    state.apply(ev.Regrant(time_s=10.0, job_id="b", attempt=1, grant=b.grant(1)))
    assert state.jobs["a"].attained_gpu_s == pytest.approx(5.0)
    state.apply(ev.JobFinished(time_s=20.0, job_id="b", attempt=1, outcome="completed"))
    assert state.jobs["b"].attained_gpu_s == pytest.approx(5.0 + 10.0)


def test_double_use_of_a_gpu_is_noticed():
    state = ClusterState(b.cluster(1, 4))
    for name in ("a", "b"):
        submit(state, name)
        start(state, name)
    with pytest.raises(AssertionError):
        state.check()


def test_an_illegal_record_raises_with_the_jobs_history(state):
    submit(state)
    start(state)
    started(state, at=3.0)
    with pytest.raises(IllegalTransitionError, match=r"start \(attempt 2\).*running.*pending -start@0s-> starting"):
        start(state, attempt=2)


@pytest.mark.parametrize(
    "record",
    [
        ev.JobStarted(time_s=1.0, job_id="a", attempt=7),
        ev.Preempt(time_s=1.0, job_id="a", attempt=7),
        ev.JobFinished(time_s=1.0, job_id="a", attempt=7, outcome="completed"),
        ev.JobStarted(time_s=1.0, job_id="nobody", attempt=1),
    ],
)
def test_records_of_unknown_jobs_and_attempts_raise(state, record):
    submit(state)
    start(state)
    with pytest.raises(IllegalTransitionError):
        state.apply(record)


def test_a_job_cannot_be_submitted_twice(state):
    submit(state)
    with pytest.raises(IllegalTransitionError, match="twice"):
        submit(state)


def test_the_table_leaves_no_way_out_of_a_final_phase():
    for (phase, _), target in TRANSITIONS.items():
        if phase in FINAL:
            assert target is phase


def test_every_phase_can_be_reached_and_left():
    reached = set(TRANSITIONS.values()) | {Phase.PENDING, Phase.TARGET_MISSED}  # missed: job_finished with that outcome
    assert reached == set(Phase)
    left = {phase for (phase, _), target in TRANSITIONS.items() if target is not phase}
    assert left == set(Phase) - FINAL
    assert GRANTED.isdisjoint(FINAL)


def test_the_logged_duration_is_for_oracles_only(state):
    submit(state, duration_s=500.0)
    assert state.snapshot().jobs[0].spec.duration_s is None
    assert state.snapshot().oracle_remaining_s is None
    assert state.snapshot(oracle=True).oracle_remaining_s == {"a": 500.0}


def test_a_replayed_log_gives_the_same_state(state):
    records = []

    class Recorder(ClusterState):
        def apply(self, record):
            records.append(ev.encode(record))
            super().apply(record)

    recorder = Recorder(b.cluster(2, 4))
    submit(recorder)
    start(recorder)
    started(recorder)
    recorder.apply(
        ev.ProgressReported(time_s=5.0, job_id="a", attempt=1, epoch=1, effective_samples=9.0, report_offset=77)
    )
    state.replay(ev.decode(line) for line in records)
    assert state.jobs == recorder.jobs
    assert state.jobs["a"].report_offset == 77
