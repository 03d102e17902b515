"""Checkpoints written beside training: what is saved, when it is reported, and what happens when the disk refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import nn

from icefrog.errors import UserError
from icefrog.runtime import LayerElastic, protocol
from icefrog.runtime.checkpoint import CheckpointStore, load
from icefrog.runtime.hostcopy import HostCopy
from icefrog.runtime.keeper import Keeper

CPU = torch.device("cpu")


class SlowDisk(CheckpointStore):
    """Writes when it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.gate = threading.Event()
        self.writing = threading.Event()

    def save(self, state: dict[str, Any], summary: dict[str, Any]) -> Path:
        self.writing.set()
        assert self.gate.wait(30)
        self.gate.clear()
        return super().save(state, summary)


class Heard:
    """Takes the reporter's place; remembers which checkpoints it was told of."""

    def __init__(self) -> None:
        self.paths: list[Path] = []

    def checkpointed(self, path: Path, effective_samples: float, wait_s: float) -> None:
        assert path.with_suffix(".json").is_file()
        assert wait_s > 0
        self.paths.append(path)


class Alone:
    """A world of one."""

    rank, size = 0, 1

    @staticmethod
    def from_rank0(value: Any) -> Any:
        return value


def make(store: CheckpointStore) -> tuple[Keeper, Heard, list[str]]:
    heard, warned = Heard(), []
    return Keeper(store, Alone(), heard, warned.append), heard, warned  # type: ignore[arg-type]


def packed(value: float) -> Callable[[], dict[str, Any]]:
    return lambda: {"n": torch.tensor([value])}


SUMMARY = {"effective_samples": 1.0}


def test_what_is_saved_is_the_state_at_the_step_boundary(tmp_path: Path) -> None:
    store = SlowDisk(tmp_path)
    keeper, heard, _ = make(store)
    weight, lists = torch.ones(4), [1, [2]]
    keeper.save(lambda: {"weight": weight, "lists": lists}, SUMMARY)
    weight.fill_(2)  # training goes on while the disk is busy
    lists[1].append(3)  # type: ignore[union-attr]
    assert store.writing.wait(30)
    assert heard.paths == []  # nothing is said before it is durable
    assert store.paths() == []
    store.gate.set()
    keeper.wait()
    assert [path.name for path in heard.paths] == ["00000001.pt"]
    state = load(heard.paths[0], CPU)
    assert state["weight"].tolist() == [1.0] * 4
    assert state["lists"] == [1, [2]]
    assert json.loads((tmp_path / "00000001.json").read_text())["wait_s"] > 0


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    store = SlowDisk(tmp_path)
    keeper, heard, _ = make(store)
    keeper.save(packed(1), SUMMARY)
    threading.Timer(0.2, store.gate.set).start()
    keeper.save(packed(2), SUMMARY)
    assert len(heard.paths) == 1
    assert keeper.wait_s > 0.1  # and it is measured
    store.gate.set()
    assert keeper.newest(dict) == {"n": torch.tensor([2.0])}  # reading waits, too


def test_a_full_disk_is_a_warning_then_the_next_save_tries_again(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    folder.write_text("in the way")  # every write fails
    keeper, heard, warned = make(CheckpointStore(folder))
    keeper.save(packed(1), SUMMARY)
    keeper._thread.join()  # type: ignore[union-attr]
    keeper.tell()
    keeper.tell()
    assert len(warned) == 1
    assert "could not be written" in warned[0]
    folder.unlink()
    keeper.save(packed(2), SUMMARY)
    keeper.wait()
    assert len(heard.paths) == len(warned) == 1
    assert keeper.newest(dict) == {"n": torch.tensor([2.0])}


def test_at_the_end_it_is_tried_once_more_and_then_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    folder.write_text("in the way")
    keeper, heard, _ = make(CheckpointStore(folder))
    keeper.save(packed(1), SUMMARY)
    with pytest.raises(UserError, match="the last checkpoint could not be written") as caught:
        keeper.wait()
    assert str(folder) in caught.value.hint
    keeper.save(packed(2), SUMMARY)
    keeper._thread.join()  # type: ignore[union-attr]
    folder.unlink()
    keeper.wait()
    assert len(heard.paths) == 1


def run(folder: Path, epochs: int = 2, *, spoil: bool = False) -> LayerElastic:
    """A short job; ``spoil`` puts a file where its checkpoints should go."""
    if spoil:
        (folder / "c").write_text("in the way")
    env = {protocol.ENV_ATTEMPT_DIR: str(folder), protocol.ENV_CHECKPOINT_DIR: str(folder / "c")}
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = LayerElastic(model, optimizer, rule="none", env=env, checkpoint_every_steps=2)
    x, y = models.data()
    for _ in elastic.epochs(epochs):
        for at in range(0, len(x), 16):
            nn.functional.cross_entropy(elastic.model(x[at : at + 16]), y[at : at + 16]).backward()
            optimizer.step()
            optimizer.zero_grad()
        elastic.end_epoch()
    return elastic


def reports(folder: Path) -> list[protocol.AnyReport]:
    return [protocol.decode(line) for line in (folder / "reports.jsonl").read_bytes().splitlines()]


def test_a_job_reports_its_last_checkpoint_before_it_says_finished(tmp_path: Path) -> None:
    run(tmp_path)
    found = reports(tmp_path)
    saved = [r for r in found if isinstance(r, protocol.Checkpointed)]
    assert [r.effective_samples for r in saved] == [
        32,
        64,
        96,
        128,
    ]  # every second step; the epoch's end is one of them
    assert isinstance(found[-1], protocol.Finished)
    assert isinstance(found[-2], protocol.Checkpointed)
    assert all(0 < r.wait_s < 10 for r in saved)


def test_a_job_that_cannot_save_warns_and_ends_with_an_error(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(UserError, match="could not be written"):
            run(tmp_path, spoil=True)
    assert any("could not be written" in str(item.message) for item in caught)
    found = reports(tmp_path)
    assert any(isinstance(r, protocol.Warned) for r in found)
    assert not any(isinstance(r, protocol.Finished | protocol.Checkpointed) for r in found)


PROGRAM = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import test_keeper
from pathlib import Path
from icefrog.runtime.checkpoint import CheckpointStore
keepers = [test_keeper.make(CheckpointStore(Path(folder)))[0] for folder in sys.argv[2:]]
for keeper in keepers:
    keeper.save(lambda: {"n": torch.ones(2_000_000)}, test_keeper.SUMMARY)
sys.exit(3)
"""


def test_a_program_that_just_ends_still_saves_and_never_fails_silently(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    bad.write_text("in the way")
    command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parent), str(good), str(bad)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 3
    path = CheckpointStore(good).newest_valid()
    assert path is not None
    assert int(load(path, CPU)["n"].sum()) == 2_000_000
    assert done.stderr.count("UserWarning: the last checkpoint could not be written") == 1


def test_a_host_copy_is_the_same_structure_in_memory_that_is_used_again() -> None:
    shared = torch.arange(6.0).reshape(2, 3)
    state = {
        "model": OrderedDict(a=shared, tied=shared.detach(), part=shared[:, 1:], odd=shared.t(), none=torch.empty(0)),
        "plain": (1, "x", None, [True, 2.5]),
    }
    state["model"]._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    copier = HostCopy()
    first = copier.take(state)
    assert first["plain"] == state["plain"]
    assert first["model"]._metadata == {"": {"version": 2}}
    for name, tensor in state["model"].items():  # type: ignore[attr-defined]
        assert torch.equal(first["model"][name], tensor)
    assert first["model"]["a"] is first["model"]["tied"]
    where = first["model"]["a"].data_ptr()
    assert where != shared.data_ptr()
    shared.add_(1)
    second = copier.take({**state, "more": torch.ones(2)})
    assert second["model"]["a"].data_ptr() == where
    assert torch.equal(second["model"]["part"], shared[:, 1:])
    third = copier.take({"model": OrderedDict(a=torch.ones(5, dtype=torch.int64))})  # another shape
    assert third["model"]["a"].tolist() == [1] * 5


def test_a_report_that_cannot_be_written_is_no_reason_to_save_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    keeper, heard, warned = make(store)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(heard, "checkpointed", full)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        keeper.save(packed(1.0), SUMMARY)
        keeper.wait()
    assert [path.name for path in store.paths()] == ["00000001.pt"]
    assert warned == []
    assert ["could not be reported" in str(item.message) for item in caught] == [True]
