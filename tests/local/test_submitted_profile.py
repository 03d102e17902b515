"""A profile that was measured beforehand: jobs are priced by it from their submission on."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_rig import job_spec

from icefrog import events as ev
from icefrog import live
from icefrog.cli.main import run
from icefrog.errors import UserError
from icefrog.eventlog import SqliteLog
from icefrog.profile import Sharded
from icefrog.specfile import load_job
from icefrog.state import ClusterState
from icefrog.testing import builders as b

MEASURED = b.profile(num_layers=3, name="measured", parallel=Sharded())


def write(path: Path) -> None:
    path.write_text(MEASURED.model_dump_json(by_alias=True))


def inbox(home: live.Home) -> list[ev.Event]:
    log: SqliteLog
    with home.open_log() as log:
        return log.receive()


def test_a_job_brings_the_profile_that_its_file_names(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    write(tmp_path / "train" / "mine.json")
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: a\ncommand: [python, t.py]\ngpus: [1, 2]\nbatch: {global: 64}\nmax_epochs: 7\nprofile: mine.json\n"
    )
    home = live.Home(tmp_path / "home")
    live.submit(home, load_job(file), cwd=tmp_path / "train")
    (event,) = inbox(home)
    assert isinstance(event, ev.JobSubmitted)
    assert event.profile == MEASURED

    state = ClusterState(b.cluster(1, 2))
    state.apply(ev.decode(ev.encode(event)))
    (view,) = state.snapshot().jobs
    assert view.profile == MEASURED
    assert view.remaining_samples == 7 * MEASURED.samples_per_epoch


@pytest.mark.parametrize("content", [None, "{", '{"schema": 2}'])
def test_what_is_no_profile_is_refused_before_anything_is_submitted(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "mine.json"
    if content is not None:
        path.write_text(content)
    home = live.Home(tmp_path / "home")
    jobs = [job_spec("good"), job_spec("bad").model_copy(update={"profile": str(path)})]
    with pytest.raises(UserError, match=r"mine\.json") as caught:
        live.submit_all(home, jobs)
    assert "icefrog profile" in caught.value.hint
    assert not home.path.exists() or inbox(home) == []


def test_a_simulated_workload_costs_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = MEASURED.model_copy(update={"layers": b.profile(10).layers})
    (tmp_path / "mine.json").write_text(other.model_dump_json(by_alias=True))
    write(tmp_path / "short.json")
    grid = ["simulate", "--trace", "synth:philly-120", "--jobs", "6", "--cluster", "2x4", "--policy", "fifo"]
    assert run([*grid, "--profile", f"resnet18-cifar10={tmp_path / 'mine.json'}"]) == 0
    capsys.readouterr()
    wrong = ["resnet18-cifar10", f"nothing={tmp_path / 'mine.json'}"]
    wrong += [f"resnet18-cifar10={tmp_path / name}" for name in ("short.json", "none.json")]
    for text in wrong:
        assert run([*grid, "--profile", text]) == 2
        assert [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()] == ["error", "hint"]
