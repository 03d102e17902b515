"""Two jobs on one checkpoint folder: the second is refused; a job that was killed starts again at once."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import nn
from two_ranks import Ranks

import icefrog.runtime.folder_lock
from icefrog.errors import UserError
from icefrog.runtime import LayerElastic
from icefrog.runtime.folder_lock import FolderLock

# A process as a job that has its folder and goes on, with a forked child as a data loader's worker.
HOLDER = """
import os, sys, time
from pathlib import Path
from icefrog.runtime.folder_lock import lock_of
me = object()
lock_of(Path(sys.argv[1])).take(me)
if os.fork():
    print("taken", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "taken\n"
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(icefrog.runtime.folder_lock, "_WAIT_S", 0.1)


def start(folder: Path) -> LayerElastic:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return LayerElastic(model, optimizer, rule="none", checkpoint_dir=folder, env=dict(os.environ))


def train(elastic: LayerElastic, epochs: int = 1) -> None:
    x, y = models.data(16)
    for _ in elastic.epochs(epochs):
        nn.functional.cross_entropy(elastic.model(x), y).backward()
        elastic.optimizer.step()
        elastic.optimizer.zero_grad()
        elastic.end_epoch()


@pytest.mark.usefixtures("soon")
def test_a_second_job_is_refused_and_one_that_was_killed_starts_again_at_once(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    elastic = start(tmp_path)
    with pytest.raises(
        UserError, match=rf"another job keeps its checkpoints in .* \(process {holder.pid} on "
    ) as error:
        train(elastic)
    assert "checkpoint_dir=" in error.value.hint
    os.kill(holder.pid, signal.SIGKILL)  # its child lives on
    holder.wait()
    train(elastic)
    elastic.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "00000001.json", "00000001.pt"]


def test_a_job_that_is_just_ending_is_waited_for(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {holder.pid}"])
    elastic = start(tmp_path)
    train(elastic)
    elastic.close()


@pytest.mark.usefixtures("soon", "holder")
def test_a_loop_that_never_began_hears_of_it_at_its_first_save(tmp_path: Path) -> None:
    elastic = start(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.functional.cross_entropy(elastic.model(models.data(16)[0]), models.data(16)[1]).backward()
        elastic.optimizer.step()
        elastic.end_epoch()
    with pytest.raises(UserError, match="another job keeps its checkpoints"):
        elastic.close()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_in_one_process_the_later_one_takes_over(tmp_path: Path) -> None:
    first, second = start(tmp_path), start(tmp_path)
    first.begin(10)
    second.begin(10)  # a notebook's cell that ran again
    for elastic in (first, second):
        x, y = models.data(16)
        nn.functional.cross_entropy(elastic.model(x), y).backward()
        elastic.optimizer.step()
        elastic.end_epoch()
    with pytest.raises(UserError, match="taken over"):
        first.close()
    second.close()


def test_a_file_system_without_locks_refuses_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "lockf", none)
    lock = FolderLock(tmp_path)
    lock.take("one")
    lock.check("one")
    FolderLock(tmp_path).take("two")


def refused(folder: str) -> str:
    icefrog.runtime.folder_lock._WAIT_S = 0.1
    elastic = start(Path(folder))
    try:
        elastic.begin(1)
    except UserError as error:
        return str(error)
    finally:
        elastic.close()
        icefrog.runtime.folder_lock._WAIT_S = 3.0
    return ""


@pytest.mark.usefixtures("holder")
def test_all_ranks_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(refused, str(tmp_path), timeout_s=60.0)
    assert found[0] == found[1]
    assert "another job" in found[0]


@pytest.mark.usefixtures("holder")
def test_what_only_reads_is_let_in(tmp_path: Path) -> None:
    from icefrog.runtime.checkpoint import CheckpointStore

    start_s = time.monotonic()
    assert CheckpointStore(tmp_path).newest_valid() is None
    assert time.monotonic() - start_s < 1.0


def test_a_folder_that_was_deleted_is_locked_anew(tmp_path: Path, soon: None) -> None:
    """The lock on a file that is gone keeps nobody out."""
    folder = tmp_path / "job"
    lock, me = FolderLock(folder), object()
    lock.take(me)
    shutil.rmtree(folder)
    lock.check(me)  # the next save
    told = subprocess.run(
        [sys.executable, "-c", _TRY, str(folder / ".lock")], capture_output=True, text=True, check=True, timeout=60
    )
    assert told.stdout == "held"
    shutil.rmtree(folder)
    other = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "taken\n"
        with pytest.raises(UserError, match="another job keeps its checkpoints"):
            lock.check(me)
    finally:
        other.kill()
        other.wait()
    lock.release(me)


_TRY = """
import fcntl, sys
try:
    fcntl.lockf(open(sys.argv[1], "r+"), fcntl.LOCK_EX | fcntl.LOCK_NB)
    print("free", end="")
except OSError:
    print("held", end="")
"""
