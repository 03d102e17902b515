"""From logged jobs to catalogue jobs: what the log says is kept, and every job can run on every count of its A_k."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icefrog.errors import UserError
from icefrog.spec import JobSpec
from icefrog.traces import ReadReport, Trace, TraceJob, synth_trace, task_mix, to_specs
from icefrog.workloads import Catalogue, gpu_time_class, job_curves, job_profile, load_catalogue
from icefrog.workloads.jobs import full_speed


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return load_catalogue()


def trace_of(*jobs: TraceJob) -> Trace:
    return Trace(jobs, ReadReport(len(jobs), len(jobs)), "test")


def check(spec: JobSpec, job: TraceJob, catalogue: Catalogue) -> None:
    workload = catalogue[spec.workload or ""]
    task, batch = workload.task, spec.batch.initial
    assert (spec.job_id, spec.submit_s, spec.num_gpus, spec.duration_s) == (
        job.job_id,
        job.submit_s,
        job.num_gpus,
        job.duration_s,
    )
    assert spec.labels["class"] == gpu_time_class(job.gpu_s)
    assert gpu_time_class(job.gpu_s) in task.classes
    assert job.num_gpus in spec.gpus
    assert spec.batch.options()[-1] <= max(task.batch.max, batch)
    for count in spec.gpus:
        assert count % task.gpus.unit == 0
        assert any(
            m % count == 0 and task.local_batch.min <= m // count <= task.local_batch.max * 4
            for m in spec.batch.options()
        )
    assert batch // job.num_gpus <= task.local_batch.max  # as logged, it runs without accumulation
    assert 5 <= spec.max_epochs <= 200
    assert not spec.share or (task.share and 1 in spec.gpus)
    profile = job_profile(spec, catalogue)
    total = spec.max_epochs * profile.samples_per_epoch
    took_s = total / full_speed(profile, job.num_gpus, batch, 4)
    assert took_s == pytest.approx(job.duration_s, abs=0.51 * took_s / profile.samples_per_epoch, rel=1e-9)
    assert job_curves(spec, catalogue).variance(0.3).shape == (profile.num_layers,)


@given(gpus=st.integers(1, 160), duration_s=st.floats(1e-2, 1e7), seed=st.integers(0, 3))
def test_every_logged_job_becomes_a_job_that_runs_as_logged(
    catalogue: Catalogue, gpus: int, duration_s: float, seed: int
) -> None:
    job = TraceJob("j", 12.5, gpus, duration_s, "ann", "vc1")
    (spec,) = to_specs(trace_of(job), catalogue, seed=seed).specs
    check(spec, job, catalogue)
    assert spec.labels["user"] == "ann"


def test_a_generated_trace(catalogue: Catalogue) -> None:
    trace = synth_trace("philly-120", 10, 0)
    made = to_specs(trace, catalogue, seed=0, max_gpus=48)
    kept = [job for job in trace.jobs if job.num_gpus <= 48]
    assert made.report.kept == len(made.specs) == len(kept)
    for spec, job in zip(made.specs, kept, strict=True):
        check(spec, job, catalogue)
    mix = task_mix(made.specs)
    assert set(mix) == set(catalogue)  # every task is drawn
    assert mix["resnet18-cifar10"] + mix["mobilenetv2-cifar10"] > len(kept) / 2  # most jobs are small
    assert sum(spec.share for spec in made.specs) > len(kept) / 4
    assert sum(len(spec.gpus) > 2 for spec in made.specs) > len(kept) / 2  # elastic in three counts or more


def test_drawing_is_seeded_and_each_job_draws_for_itself(catalogue: Catalogue) -> None:
    trace = synth_trace("philly-120", 1, 0)
    specs = to_specs(trace, catalogue, seed=1).specs
    assert specs == to_specs(trace, catalogue, seed=1).specs
    assert specs != to_specs(trace, catalogue, seed=2).specs
    alone = to_specs(trace_of(trace.jobs[7]), catalogue, seed=1).specs
    assert alone == (specs[7],)


def test_jobs_larger_than_the_cluster_are_counted(catalogue: Catalogue) -> None:
    trace = trace_of(TraceJob("a", 0, 4, 100.0), TraceJob("b", 0, 64, 100.0))
    made = to_specs(trace, catalogue, max_gpus=8)
    assert [spec.job_id for spec in made.specs] == ["a"]
    assert made.report == ReadReport(2, 1, {"asks for more than 8 GPUs": 1})
    assert max(made.specs[0].gpus) <= 8
    with pytest.raises(UserError, match="every job of the trace asks for more than 2 GPUs"):
        to_specs(trace, catalogue, max_gpus=2)


def test_models_that_come_in_units_of_four_are_only_given_to_such_requests(catalogue: Catalogue) -> None:
    names = {
        gpus: {to_specs(trace_of(TraceJob(f"j{i}", 0, gpus, 2e6)), catalogue).specs[0].workload for i in range(40)}
        for gpus in (1, 2, 4, 6, 8)
    }
    assert names[1] == names[2] == names[6] == {"resnet50-imagenet"}
    assert names[4] == names[8] == {"resnet50-imagenet", "llama-7b-sst2"}


def test_a_job_without_a_known_workload_is_refused(catalogue: Catalogue) -> None:
    spec = to_specs(trace_of(TraceJob("a", 0, 1, 100.0)), catalogue).specs[0]
    with pytest.raises(UserError, match="unknown workload 'alexnet', allowed: resnet18-cifar10"):
        job_profile(spec.model_copy(update={"workload": "alexnet"}), catalogue)
    with pytest.raises(UserError, match="no workload"):
        job_profile(spec.model_copy(update={"workload": None, "entry": "a:b"}), catalogue)


def test_deadlines_of_the_log_stand_in_the_jobs(catalogue: Catalogue) -> None:
    trace = trace_of(TraceJob("a", 5.0, 1, 100.0, deadline_s=300.0), TraceJob("b", 6.0, 1, 100.0))
    assert [spec.deadline_s for spec in to_specs(trace, catalogue).specs] == [300.0, None]
