"""The generator: seeded, works without data, and shaped like the log it was fitted to."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from icefrog.errors import UserError
from icefrog.traces import read_trace, synth_names, synth_trace
from icefrog.traces.synth import load_generator

SCRIPT = Path(__file__).parents[2] / "scripts/fit_philly_generator.py"


def fitter() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fit_philly_generator", SCRIPT)
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
    assert synth_names() == ("philly-120",)


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


def _distance(first: np.ndarray, second: np.ndarray) -> float:
    """Kolmogorov-Smirnov: the largest difference of the two distribution functions."""
    points = np.concatenate([first, second])
    ranks = [np.searchsorted(np.sort(x), points, side="right") / len(x) for x in (first, second)]
    return float(np.abs(ranks[0] - ranks[1]).max())
