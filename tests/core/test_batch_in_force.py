"""The batch that a running job has moved to, as the scheduler sees it."""

from __future__ import annotations

from typing import Any

from icefrog import events as ev
from icefrog.state import ClusterState
from icefrog.testing import builders as b
from icefrog.views import view


def running(state: ClusterState, *, elastic: bool, **batch: Any) -> None:
    state.apply(ev.JobSubmitted(time_s=0.0, job=b.job_spec("a")))
    grant = b.grant(2).model_copy(update={"elastic_batch": elastic})
    state.apply(ev.Start(time_s=0.0, job_id="a", attempt=1, gpus=b.gpus(2), grant=grant))
    state.apply(ev.JobStarted(time_s=1.0, job_id="a", attempt=1, **batch))


def reported(state: ClusterState, attempt: int = 1, **batch: Any) -> tuple[int, int]:
    state.apply(ev.ProgressReported(time_s=5.0, job_id="a", attempt=attempt, epoch=1, effective_samples=5.0, **batch))
    return in_force(state)


def in_force(state: ClusterState) -> tuple[int, int]:
    config = view(state.jobs["a"], 60.0).config
    assert config is not None
    return config.batch_per_gpu, config.accum_steps


def test_a_report_says_what_an_elastic_job_runs_with(state: ClusterState) -> None:
    running(state, elastic=True)
    granted = b.grant(2)
    assert reported(state) == (granted.batch_per_gpu, granted.accum_steps)  # an old report says nothing of it
    assert reported(state, batch_per_gpu=7, accum_steps=3) == (7, 3)
    again = b.grant(4).model_copy(update={"elastic_batch": True})
    state.apply(ev.Resize(time_s=6.0, job_id="a", attempt=2, gpus=b.gpus(4), grant=again))
    # A late word of the attempt before.
    assert reported(state, batch_per_gpu=9, accum_steps=1) == (again.batch_per_gpu, again.accum_steps)


def test_a_job_with_a_fixed_batch_has_what_was_granted(state: ClusterState) -> None:
    running(state, elastic=False)
    granted = b.grant(2)
    assert reported(state, batch_per_gpu=7, accum_steps=3) == (granted.batch_per_gpu, granted.accum_steps)


def test_a_job_that_comes_back_says_at_once_what_its_checkpoint_brought(state: ClusterState) -> None:
    running(state, elastic=True, batch_per_gpu=7, accum_steps=3)
    assert in_force(state) == (7, 3)
