"""Look-ups in measurements, on an invented application."""

from __future__ import annotations

from pathlib import Path

import pytest
from invented import application, step_s, write

from icefrog.errors import UserError
from icefrog.executors.sim.pollux.application import Application, LocalBatch, NotMeasuredError


@pytest.fixture
def app(tmp_path: Path) -> Application:
    return application(tmp_path)


def test_a_measured_placement_is_interpolated_over_the_local_batch(app: Application) -> None:
    assert app.times((2,), 8) == pytest.approx(step_s(1, 2, 8))
    assert app.times((1, 3), 10) == pytest.approx(step_s(2, 4, 10))


def test_rotations_of_a_placement_are_the_same(app: Application) -> None:
    assert app.times((3, 1), 8) == app.times((1, 3), 8)


def test_other_placements_are_interpolated_in_three_dimensions(app: Application) -> None:
    """The invented times are linear in nodes, GPUs and batch, so that any triangulation gives them back."""
    assert app.times((2, 2, 1), 12) == pytest.approx(step_s(3, 5, 12))
    assert app.times((4,) * 16, 4) == pytest.approx(step_s(16, 64, 4))


def test_more_nodes_than_measured_count_as_sixteen(app: Application) -> None:
    assert app.times((1,) * 20, 4) == pytest.approx(step_s(16, 20, 4))


@pytest.mark.parametrize(("placement", "local"), [((1,), 3), ((1,), 17), ((5,), 8), ((12,), 8)])
def test_nothing_is_made_up_outside_the_measurements(app: Application, placement: tuple[int, ...], local: int) -> None:
    with pytest.raises(NotMeasuredError):
        app.times(placement, local)


def test_gradient_statistics_and_iterations_lie_between_the_measured_batches(app: Application) -> None:
    assert app.grad_stats(8, 0) == (1.0, 1.0)
    assert app.grad_stats(12, 1) == (1.0, 2.0)
    assert app.iterations(12, 0) == pytest.approx(80.0)
    with pytest.raises(NotMeasuredError):
        app.grad_stats(33, 0)


def test_an_epoch_ends_at_the_smallest_measured_progress(app: Application) -> None:
    assert app.thresholds == (100.0, 200.0)
    assert [app.epochs_done(samples) for samples in (0.0, 799.9, 800.0, 1600.0)] == [0, 0, 1, 2]


def test_remaining_iterations_leave_out_the_epoch_in_progress(app: Application) -> None:
    """iteration[E-1] - iteration[c] at the target batch; 1 in the last epoch."""
    assert app.remaining_iterations(16, 0) == 120.0 - 60.0
    assert app.remaining_iterations(16, 1) == 1.0


@pytest.mark.parametrize(
    ("batch", "gpus", "expected"),
    [
        (8, 1, LocalBatch(8, 0)),  # the initial batch on one GPU
        (16, 1, LocalBatch(8, 1)),  # more on one GPU: it accumulates
        (32, 1, LocalBatch(16, 1)),
        (32, 2, LocalBatch(16, 0)),
        (32, 3, LocalBatch(10, 0)),  # ceil(32 / 3) = 11, capped at floor(32 / 3)
        (30, 4, LocalBatch(8, 0)),
    ],
)
def test_division_of_a_target_batch(app: Application, batch: int, gpus: int, expected: LocalBatch) -> None:
    assert app.local_batch(batch, gpus) == expected


def test_accumulation_costs_the_compute_time_again(app: Application) -> None:
    step, sync = step_s(1, 2, 8)
    assert app.step_s((2,), LocalBatch(8, 2)) == pytest.approx(step + 2 * (step - sync))


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        ("placements.csv", "local_bsz", "batch", "local_bsz"),
        ("placements.csv", "\n1,4,", "\n10,4,", "one digit from 1"),
        ("placements.csv", "\n1,4,", "\n1,4.5,", "whole number"),
        ("scalability.csv", "1.24", "nan", "nan"),
        ("validation-8.csv", "1.0", "x", "could not convert"),
        ("validation-8.csv", "\n200.0,200,0.5,1.0,2.0", "", "fewer than 2 epochs"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, file: str, old: str, new: str, problem: str) -> None:
    data = write(tmp_path)
    path = data / "pollux" / "bert" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(UserError, match=problem) as error:
        Application.read(data, "bert")
    assert "bert" in str(error.value)


def test_missing_files_and_unknown_applications_are_named(tmp_path: Path) -> None:
    data = write(tmp_path)
    with pytest.raises(UserError, match="resnet"):
        Application.read(data, "resnet")
    with pytest.raises(UserError, match=r"placements\.csv"):
        Application.read(data, "ncf")
    for path in (data / "pollux" / "bert").glob("validation-*.csv"):
        path.unlink()
    with pytest.raises(UserError, match="no file validation"):
        Application.read(data, "bert")
