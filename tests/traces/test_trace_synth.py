"""The generator: seeded, works without data, and shaped like the log it was fitted to."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from icefrog.errors import UserError
from icefrog.traces import read_trace, synth_names, synth_trace, to_specs, window, write_text
from icefrog.traces.describe import per_hour, quantiles
from icefrog.traces.pollux import applications
from icefrog.traces.synth import load_generator
from icefrog.workloads import load_catalogue

SCRIPTS = Path(__file__).parents[2] / "scripts"


def fitter(name: str = "fit_philly_generator") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_load_is_the_number_of_jobs_in_the_same_four_hours() -> None:
    for load, count in ((1.0, 120), (2.0, 240), (0.5, 60), (20.0, 2400)):
        trace = synth_trace("synth:philly-120", load, 3)
        assert len(trace.jobs) == count
        assert trace.report.kept == count
        assert 0 <= trace.jobs[0].submit_s <= trace.jobs[-1].submit_s <= 4 * 3600
        assert len({job.job_id for job in trace.jobs}) == count


def test_same_seed_same_jobs_other_seed_other_jobs() -> None:
    assert synth_trace("philly-120", 1, 7).jobs == synth_trace("synth:philly-120", 1, 7).jobs
    assert synth_trace("philly-120", 1, 7).jobs != synth_trace("philly-120", 1, 8).jobs


def test_no_job_is_beyond_what_was_fitted() -> None:
    jobs = synth_trace("philly-120", 100, 0).jobs
    assert {job.num_gpus for job in jobs} <= {1, 2, 4, 8, 16, 32, 64}
    assert all(1.0 <= job.duration_s <= 1000 * 3600 for job in jobs)


@pytest.mark.parametrize("load", [0.0, -1.0, float("nan"), float("inf"), 1e9, 0.001])
def test_loads_that_make_no_sense(load: float) -> None:
    with pytest.raises(UserError, match="load: got"):
        synth_trace("philly-120", load, 0)


def test_unknown_generator() -> None:
    with pytest.raises(UserError, match="allowed: synth:philly-120"):
        synth_trace("synth:venus", 1, 0)
    assert synth_names() == ("philly-120", "philly-week", "chronus-mix1", "chronus-mix2", "pollux-160", "sia-960")


@pytest.mark.data
def test_the_committed_numbers_are_what_the_script_fits(data_dir: Path) -> None:
    script = fitter()
    assert script.fit(read_trace(data_dir / "philly/jobs.csv.gz")) == json.loads(script.OUTPUT.read_text())


@pytest.mark.data
def test_generated_jobs_have_the_distribution_of_the_file(data_dir: Path) -> None:
    submit_s, gpus, duration_s, _ = fitter().select(read_trace(data_dir / "philly/jobs.csv.gz"))
    jobs = load_generator("philly-120").draw(40_000, seed=1)
    drawn = np.array([(j.submit_s, j.num_gpus, j.duration_s) for j in jobs])

    assert _distance(drawn[:, 0], submit_s) < 0.02  # arrivals: piecewise constant by quarter of an hour
    for count, share in zip(*np.unique(gpus, return_counts=True), strict=True):
        expected = share / len(gpus)
        assert abs((drawn[:, 1] == count).mean() - expected) < 4 * np.sqrt(expected / len(drawn)) + 1e-4
    for count in (1, 2, 4, 8):  # durations, for each GPU count that is common
        own, theirs = drawn[drawn[:, 1] == count, 2], duration_s[gpus == count]
        assert _distance(own, theirs) < 1.9 * np.sqrt(1 / len(own) + 1 / len(theirs)) + 0.015
    gpu_h, their_gpu_h = drawn[:, 1] * drawn[:, 2] / 3600, gpus * duration_s / 3600
    assert _distance(gpu_h, their_gpu_h) < 0.025
    assert gpu_h.mean() == pytest.approx(their_gpu_h.mean(), rel=0.15)  # the tail carries the mean


def test_jobs_of_philly_120_are_those_they_have_always_been() -> None:
    text = write_text(synth_trace("philly-120", 2, 5))
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "0d09752fc3e01e9fbf6db5c5eff0bde9173dd6174f2159da00645788baef5440"
    )


@pytest.mark.parametrize("name", synth_names())
def test_every_generator_is_seeded_and_scales_with_load(name: str) -> None:
    generator = load_generator(name)
    jobs = synth_trace(name, 0.1, 3).jobs
    assert len(jobs) == round(generator.jobs_at_load_1 * 0.1)
    assert jobs == synth_trace(name, 0.1, 3).jobs
    assert jobs != synth_trace(name, 0.1, 4).jobs
    assert [job.submit_s for job in jobs] == sorted(job.submit_s for job in jobs)
    assert 0 <= jobs[0].submit_s <= jobs[-1].submit_s <= generator.arrival_edges_s[-1]
    assert all(job.duration_s > 0 and job.num_gpus >= 1 for job in jobs)
    assert generator.source.startswith("fitted to")
    assert to_specs(synth_trace(name, 0.05 if name != "philly-120" else 1, 0), load_catalogue()).specs


def test_deadlines_are_later_than_the_duration_and_fall_in_worth() -> None:
    jobs = synth_trace("chronus-mix2", 0.5, 1).jobs
    kinds = {kind: [job for job in jobs if job.kind == kind] for kind in ("strict", "soft", "best")}
    assert sum(map(len, kinds.values())) == len(jobs)
    assert all(job.deadline_s is None and not job.rewards for job in kinds["best"])
    for job in kinds["strict"] + kinds["soft"]:
        assert job.deadline_s is not None
        assert job.deadline_s > job.duration_s
        times, worths = zip(*job.rewards, strict=True)
        assert times[0] == job.deadline_s
        assert list(times) == sorted(set(times))
        assert list(worths) == sorted(worths, reverse=True)
    assert {len(job.rewards) for job in kinds["strict"]} == {1}
    assert {len(job.rewards) for job in kinds["soft"]} == {4}


@pytest.mark.parametrize("name", ["pollux-160", "sia-960"])
def test_generated_workloads_are_workloads(name: str) -> None:
    jobs = synth_trace(name, 1, 0).jobs
    assert {job.application for job in jobs} >= {"bert", "cifar10", "deepspeech2", "yolov3"}
    known = applications()
    for job in jobs:
        assert job.num_replicas == job.num_gpus
        assert job.batch_size is not None
        assert job.duration_s == pytest.approx(
            known[job.application].duration_s(job.num_gpus, job.batch_size), abs=1e-3
        )


@pytest.mark.data
def test_the_other_committed_numbers_are_what_their_script_fits(data_dir: Path) -> None:
    script = fitter("fit_trace_generators")
    for name, fitted in script.fit_all(data_dir).items():
        assert fitted == json.loads((script.OUTPUT / f"{name}.json").read_text()), name


@pytest.mark.data
def test_a_generated_week_of_philly_is_like_the_log(data_dir: Path) -> None:
    script = fitter("fit_trace_generators")
    steady = window(read_trace(data_dir / "philly/jobs.csv.gz"), script.PHILLY_FROM, script.PHILLY_WEEKS * 168.0)
    log = np.array([(j.num_gpus, j.duration_s, j.gpu_s) for j in steady.jobs])
    drawn = np.array([(j.num_gpus, j.duration_s, j.gpu_s) for j in load_generator("philly-week").draw(40_000, 1)])
    assert _distance(drawn[:, 1], log[:, 1]) < 0.035  # whole seconds: the log's function has steps
    assert _distance(drawn[:, 2], log[:, 2]) < 0.035
    assert (drawn[:, 0] > 1).mean() == pytest.approx((log[:, 0] > 1).mean(), rel=0.1)
    assert drawn[:, 2].mean() == pytest.approx(log[:, 2].mean(), rel=0.15)
    logged = quantiles(per_hour(np.array([job.submit_s for job in steady.jobs])))
    weeks = [np.array([job.submit_s for job in synth_trace("philly-week", 1, seed).jobs]) for seed in range(6)]
    generated = quantiles(np.concatenate([per_hour(week) for week in weeks]))
    for key in ("p50", "p75", "p90", "p99"):  # bursts: hours with many times the mean, and hours with nearly none
        assert 0.5 < generated[key] / logged[key] < 2.0, (key, generated, logged)


@pytest.mark.data
def test_a_generated_day_of_chronus_is_like_the_trace(data_dir: Path) -> None:
    trace = read_trace(data_dir / "chronus/trace_job_Philly_MIX2.csv.gz")
    drawn = load_generator("chronus-mix2").draw(20_000, 1)
    for kind in ("strict", "soft", "best"):
        share = [np.mean([job.kind == kind for job in jobs]) for jobs in (drawn, trace.jobs)]
        assert share[0] == pytest.approx(share[1], abs=0.015)
    slack = [
        np.array([(j.deadline_s or 0) / j.duration_s for j in jobs if j.deadline_s]) for jobs in (drawn, trace.jobs)
    ]
    assert _distance(*slack) < 0.03
    assert _distance(*(np.array([j.duration_s for j in jobs]) for jobs in (drawn, trace.jobs))) < 0.04  # minutes


def _distance(first: np.ndarray, second: np.ndarray) -> float:
    """Kolmogorov-Smirnov: the largest difference of the two distribution functions."""
    points = np.concatenate([first, second])
    ranks = [np.searchsorted(np.sort(x), points, side="right") / len(x) for x in (first, second)]
    return float(np.abs(ranks[0] - ranks[1]).max())
