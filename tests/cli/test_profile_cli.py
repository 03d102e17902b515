"""`icefrog profile`: what is measured, kept, fitted, printed and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from icefrog.cli.main import run
from icefrog.errors import UserError
from icefrog.estimate.throughput import step_s
from icefrog.executors.local import probe as local_probe
from icefrog.executors.local.probe import ProbeFailedError
from icefrog.measured import fit_runs
from icefrog.profile import LayerCost, Parallel, Profile, Replicated, Sharded
from icefrog.runtime.protocol import Probed, ProbedCell

SCRIPT = Path(__file__).parent / "tiny_training.py"
LAYERS = tuple(LayerCost(name=f"l{i}", flops=1e6, param_bytes=4e3, activation_bytes=64) for i in range(4))


REPLICAS = Replicated()


def measured(gpus: int, batch: int, depths: tuple[int, ...] = (0, 1, 2), parallel: Parallel = REPLICAS) -> Probed:
    """Forward 1 ms + 0.1 a sample, backward twice that, 4 ms of synchronisation a pair; freezing acts as modelled."""

    def cell(depth: int) -> ProbedCell:
        forward, theta = 1e-3 + 1e-4 * batch, 1 - depth / 4
        backward, sync = 2 * forward * theta, 4e-3 * theta * (gpus > 1)
        return ProbedCell(
            num_gpus=gpus, num_nodes=1, batch_per_gpu=batch, accum_steps=1, frozen_layers=depth, num_steps=10,
            step_s=forward + backward + sync, fwd_s=forward, bwd_s=backward, sync_s=sync,
            mem_bytes=1e8 + 1e6 * batch * theta, util_pct=50,
        )  # fmt: skip

    return Probed(
        parallel=parallel if gpus > 1 else Replicated(),
        samples_per_epoch=256,
        layers=LAYERS,
        cells=tuple(cell(depth) for depth in depths),
    )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, int]]:
    """A machine that is measured in no time; the list says what was run. Runs with batch 13 fail."""
    ran: list[tuple[int, int]] = []

    def fake(_folder: Path, _spec: Any, grant: Any, *_: Any) -> Probed:
        ran.append((grant.num_gpus, grant.batch_per_gpu))
        if grant.batch_per_gpu == 13:
            raise ProbeFailedError("rank 0 exited with 1: ValueError: no")
        return measured(grant.num_gpus, grant.batch_per_gpu)

    monkeypatch.setattr(local_probe, "run_probe", fake)
    monkeypatch.setattr(local_probe, "usable_gpus", lambda _most: "cpu")
    monkeypatch.chdir(tmp_path)
    return ran


def test_the_file_is_a_profile_that_predicts_what_was_measured(machine, tmp_path, capsys):
    out = tmp_path / "tiny.json"
    assert run(["profile", str(SCRIPT), "--gpus", "1,2", "--batch", "8,16,32", "--out", str(out), "--json", "0.1"]) == 0
    document = json.loads(capsys.readouterr().out)
    profile = Profile.model_validate_json(out.read_text())
    assert document["profile"] == json.loads(out.read_text())
    assert document["schema"] == 1
    assert len(document["cells"]) == 18
    assert document["errors"]["fitted"]["max"] < 0.03
    assert document["errors"]["held_out"]["median"] < 0.05
    assert (profile.samples_per_epoch, profile.max_local_batch, profile.gpu_type) == (256, 32, "cpu")
    assert "18 configurations" in profile.provenance
    truth = measured(2, 64, (1,)).cells[0].step_s
    assert float(step_s(profile, 2, 1, 64, 1)) == pytest.approx(truth, rel=0.05)


def test_it_goes_on_where_it_stopped(machine, capsys):
    grid = ["profile", str(SCRIPT), "--gpus", "1,2"]
    assert run([*grid, "--batch", "8,16", "0.1"]) == 0
    assert machine == [(1, 8), (1, 16), (2, 8), (2, 16)]
    assert run([*grid, "--batch", "8,16,32", "0.1"]) == 0
    assert machine[4:] == [(1, 32), (2, 32)]
    text = capsys.readouterr().out
    assert "configurations left out: median" in text
    assert Path("tiny_training.profile.json").exists()
    assert run([*grid, "--batch", "8", "--steps", "5", "0.1"]) == 0  # another measurement: nothing is kept
    assert machine[6:] == [(1, 8), (2, 8)]


def test_what_fails_is_named_and_the_rest_is_fitted(machine, tmp_path, capsys):
    assert run(["profile", str(SCRIPT), "--gpus", "1", "--batch", "8,13,16", "0.1"]) == 1
    assert "1 GPUs, batch 13: rank 0 exited with 1: ValueError: no" in capsys.readouterr().err
    assert Profile.model_validate_json((tmp_path / "tiny_training.profile.json").read_text()).max_local_batch == 16
    assert run(["profile", str(SCRIPT), "--gpus", "1", "--batch", "13", "--out", "x.json", "0.1"]) == 1
    assert not Path("x.json").exists()


@pytest.mark.parametrize(
    "argv",
    [
        ["missing.py"],
        ["not a module"],
        ["package.module:function", "argument"],
        [str(SCRIPT), "--gpus", "0"],
        [str(SCRIPT), "--batch", "8,x"],
        [str(SCRIPT), "--steps", "1"],
        [str(SCRIPT), "--parallel", "tensor"],
    ],
)
def test_wrong_input_is_refused_with_a_hint(machine, capsys, argv):
    assert run(["profile", *argv]) == 2
    captured = capsys.readouterr()
    assert [line.partition(":")[0] for line in captured.err.splitlines()] == ["error", "hint"]
    assert machine == []


def test_a_sidecar_of_another_kind_is_refused(machine, capsys):
    Path("tiny_training.profile.json.runs.json").write_text("[1]")
    assert run(["profile", str(SCRIPT), "--gpus", "1", "0.1"]) == 2
    assert "does not hold measured cells" in capsys.readouterr().err


def test_one_process_is_of_the_kind_that_several_are():
    runs = [measured(a, m, parallel=Sharded()) for a in (1, 2) for m in (8, 16)]
    assert isinstance(fit_runs("job", runs, "cpu").profile.parallel, Sharded)
    with pytest.raises(UserError, match="several ways"):
        fit_runs("job", [*runs, measured(4, 8)], "cpu")


def test_runs_of_other_models_or_without_an_epoch_are_refused():
    one = measured(1, 8)
    with pytest.raises(UserError, match="other layers"):
        fit_runs("job", [one, one.model_copy(update={"layers": LAYERS[:3]})], "cpu")
    with pytest.raises(UserError, match="samples an epoch has"):
        fit_runs("job", [one.model_copy(update={"samples_per_epoch": None})], "cpu")


@pytest.mark.slow
def test_a_real_script_in_real_processes(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    grid = ["profile", str(SCRIPT), "--gpus", "1,2", "--batch", "8,32", "--depths", "0,2", "--steps", "8", "--json"]
    assert run([*grid, "0.1"]) == 0
    document = json.loads(capsys.readouterr().out)
    at = [(c["num_gpus"], c["batch_per_gpu"], c["frozen_layers"]) for c in document["cells"]]
    assert at == [(a, m, depth) for a in (1, 2) for m in (8, 32) for depth in (0, 2)]
    sync = {(c["num_gpus"], c["frozen_layers"]): c["sync_s"] for c in document["cells"]}
    assert sync[2, 0] > sync[1, 0]
    assert run([*grid[:-1], "--out", "failing.json", "not-a-number"]) == 1
    assert "could not convert string to float" in capsys.readouterr().err
