"""Cells on a Ray cluster of this machine; needs the ``ray`` extra."""

from __future__ import annotations

from pathlib import Path

import pytest
from experiment_files import SMALL, load

from icefrog.errors import UserError
from icefrog.experiment.backends import Inline
from icefrog.experiment.cell_run import without_clock
from icefrog.experiment.ray_backend import RayCluster, _knock
from icefrog.experiment.store import CellStore
from icefrog.experiment.sweep import plan, run_sweep


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:99999"])
def test_nobody_at_the_address(address: str) -> None:
    with pytest.raises(UserError, match="no cluster at"):
        _knock(address)


@pytest.mark.slow
def test_a_cluster_computes_what_this_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason='needs Ray: pip install "icefrog[ray]"')
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    trace = tmp_path / "jobs.csv"
    trace.write_text("job_id,submit_s,num_gpus,duration_s\na,0,1,600\nb,5,2,600\n")
    text = SMALL.replace("{source: synth:philly-120, name: philly, jobs: 6}", f"[{trace}, synth:philly-120]")
    planned = plan(list(load(tmp_path, text.replace("seeds: 2", "seeds: 1")).cells()))
    here = run_sweep(planned, CellStore(tmp_path / "here"), Inline())
    there = run_sweep(planned, CellStore(tmp_path / "there"), RayCluster("local"))
    assert not there.failed
    for key, result in here.results.items():
        assert _plain(result) == _plain(there.results[key])


def _plain(result: object) -> dict[str, object]:
    plain = without_clock(result)  # type: ignore[arg-type]
    return {**plain, "cpu_s": 0, "trace": {**plain["trace"], "source": ""}}  # the file lies elsewhere on a node
