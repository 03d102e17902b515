"""The throughput model against the public measurements: half fitted, the other half predicted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import icefrog.workloads
from icefrog.errors import UserError
from icefrog.estimate.fit import ThroughputPoint, fit_error
from icefrog.estimate.pollux import (
    APPLICATIONS,
    EVEN_BATCHES_ONLY,
    Measurement,
    check_halves,
    halves,
    read_measurements,
)
from icefrog.profile import ThroughputParams


def test_halves_do_not_overlap_and_both_unseen_is_what_it_says() -> None:
    rows = [
        Measurement(placement, ThroughputPoint(sum(map(int, placement)), len(placement), batch, 1.0))
        for placement in ("1", "2", "11", "12", "44")
        for batch in (8.0, 16.0, 32.0)
    ]
    fitted, rest, unseen = halves(rows)
    assert {row.placement for row in fitted} == {"1", "11", "44"}
    assert {row.point.batch_per_gpu for row in fitted} == {8.0, 32.0}
    assert len(fitted) + len(rest) == len(rows)
    assert all(row.placement in ("2", "12") and row.point.batch_per_gpu == 16.0 for row in unseen)
    assert len(unseen) == 2


def test_a_missing_folder_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not found"):
        read_measurements(tmp_path, "bert", "t4")
    folder = tmp_path / "pollux" / "bert"
    folder.mkdir(parents=True)
    (folder / "placements.csv").write_text("placement,local_bsz,step_time,sync_time\n1x,4,0.1,0.1\n")
    with pytest.raises(UserError, match=r"placements\.csv"):
        read_measurements(tmp_path, "bert", "t4")


@pytest.mark.data
@pytest.mark.parametrize("application", APPLICATIONS)
def test_median_error_on_the_other_half_is_at_most_8_percent(data_dir: Path, application: str) -> None:
    check = check_halves(read_measurements(data_dir, application, "t4"))
    assert check.rest.median <= 0.08
    assert check.both_unseen.median <= 0.08
    assert check.rest.num_points > check.num_fitted


@pytest.mark.data
@pytest.mark.parametrize("application", sorted(set(APPLICATIONS) - {"yolov3"}))  # yolov3: see the evidence page
def test_median_error_on_a100_is_at_most_8_percent(data_dir: Path, application: str) -> None:
    check = check_halves(read_measurements(data_dir, application, "a100"))
    assert check.rest.median <= 0.08
    assert check.both_unseen.median <= 0.08


@pytest.mark.data
def test_the_shipped_parameters_are_those_the_error_was_measured_with(data_dir: Path) -> None:
    text = (Path(icefrog.workloads.__file__).parent / "fitted_pollux.json").read_text()
    for application, by_gpu in json.loads(text)["applications"].items():
        for gpu_type, entry in by_gpu.items():
            rows = read_measurements(data_dir, application, gpu_type)
            multiple = EVEN_BATCHES_ONLY.get(application, 1)
            points = [row.point for row in rows if row.point.batch_per_gpu % multiple == 0]
            error = fit_error(ThroughputParams.model_validate(entry["throughput"]), points)
            assert error.median == pytest.approx(entry["median_error"], abs=6e-5)
            assert error.num_points == entry["points"]
