"""Sharded checkpoints: two ranks to one to two, bits equal; damage to any file is noticed; a failing rank fails all."""

from __future__ import annotations

import os
import shutil
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from two_ranks import Ranks

from icefrog.runtime import sharded
from icefrog.runtime.checkpoint import CheckpointStore
from icefrog.runtime.hostcopy import HostCopy
from icefrog.runtime.named_state import load_optimizer_state, optimizer_state
from icefrog.runtime.sharded import ShardedStore, ShardedWriteError, split


def join() -> Any:
    """The process group of this test's ranks, and one of its own for checkpoints."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    return dist.new_group(backend="gloo")


def net() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """5 rows over two ranks: uneven shards; the head trains alone in the first step, so the rest has no state yet."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3) -> None:
    x, y = models.data(32)
    for _ in range(count):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def pack(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "schema": 1,
        "model": dict(model.state_dict()),
        "optimizer": optimizer_state(model, optimizer),
        "statistics": {"step": 3, "last": {"0.weight": model[0].weight.detach() * 2}},  # type: ignore[index,operator]
        "rng": {"torch": torch.get_rng_state()},
    }


def plain(state: Any) -> Any:
    """Comparable: shards gathered, tensors as lists."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, torch.Tensor):
        return (state.full_tensor() if isinstance(state, DTensor) else state).tolist()
    return state


def shard(model: nn.Sequential) -> None:
    for part in (model[0], model[3]):
        fully_shard(part)
    fully_shard(model)


def save_sharded(folder: str, saves: int = 1) -> Any:
    group = join()
    try:
        model, _ = net()
        shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        copier, store = HostCopy(), ShardedStore(folder, group)
        for number in range(saves):
            steps(model, optimizer)
            taken = copier.take(pack(model, optimizer))
            expected = plain(pack(model, optimizer))
            steps(model, optimizer, 1)  # what is saved is the copy
            store.save(taken, {"epoch": number, "effective_samples": 1.0})
        return expected
    finally:
        dist.destroy_process_group()


def load_sharded(path: str) -> Any:
    join()
    try:
        model, _ = net()
        shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        state = sharded.load(Path(path), model.state_dict())
        assert isinstance(state["model"]["0.weight"], DTensor)
        assert isinstance(state["optimizer"]["state"]["0.weight"]["exp_avg"], DTensor)
        model.load_state_dict(state["model"])
        load_optimizer_state(model, optimizer, state["optimizer"])
        return plain({**pack(model, optimizer), "rng": state["rng"]})
    finally:
        dist.destroy_process_group()


def test_two_ranks_to_one_and_back_to_two_is_the_same_to_the_bit(ranks: Ranks, tmp_path: Path) -> None:
    one, two = ranks.run(save_sharded, str(tmp_path))
    assert one["model"]["0.weight"] == two["model"]["0.weight"]
    (path,) = CheckpointStore(tmp_path).paths()
    assert path.name == "00000001.dcp"
    whole = sharded.load(path)
    assert plain(whole) == one  # normalisation statistics, generators: rank 0's
    model, optimizer = net()
    model.load_state_dict(whole["model"])
    load_optimizer_state(model, optimizer, whole["optimizer"])
    assert plain(pack(model, optimizer)) == {**one, "rng": plain({"torch": torch.get_rng_state()})}
    for again in ranks.run(load_sharded, str(path)):
        assert again == one


def filters_while_saving(folder: str) -> list[str]:
    """What becomes of warnings while tensors are written."""
    write, seen = sharded.dcp_save, []

    def look(*args: Any, **options: Any) -> Any:
        seen.append(warnings.filters[0][0])
        return write(*args, **options)

    sharded.dcp_save = look  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            save_sharded(folder)
    finally:
        sharded.dcp_save = write
    return seen


def test_saving_beside_training_leaves_training_its_warnings(ranks: Ranks, tmp_path: Path) -> None:
    """Filters are those of the process, not of the thread that saves."""
    assert ranks.run(filters_while_saving, str(tmp_path)) == [["always"], ["always"]]


def save_stages(folder: str) -> list[str]:
    group = join()
    try:
        model, optimizer = net()
        steps(model, optimizer)
        state = pack(model, optimizer)
        mine = [name for name in state["model"] if (name[0] == "3") == (dist.get_rank() == 1)]
        state["model"] = {name: state["model"][name] for name in mine}
        named = state["optimizer"]
        named["state"] = {name: {**named["state"][name], "note": name} for name in mine if name in named["state"]}
        named["groups"][0]["params"] = [name for name in named["groups"][0]["params"] if name in mine]
        if dist.get_rank() == 1:
            del state["statistics"]
        ShardedStore(folder, group).save(state, {})
        return mine
    finally:
        dist.destroy_process_group()


def test_stages_of_a_pipeline_each_write_their_own_layers(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save_stages, str(tmp_path))
    (path,) = CheckpointStore(tmp_path).paths()
    whole = sharded.load(path)
    model, optimizer = net()
    steps(model, optimizer)
    expected = pack(model, optimizer)
    for name, kept in expected["optimizer"]["state"].items():
        kept["note"] = name  # what is no tensor comes from every rank as well
    assert plain(whole) == plain({**expected, "rng": whole["rng"]})
    mine = {name: tensor for name, tensor in model.state_dict().items() if name[0] == "3"}
    only = sharded.load(path, mine)  # one stage reads its own
    assert plain(only["model"]) == plain(mine)
    assert sorted(only["optimizer"]["state"]["3.weight"]) == ["exp_avg", "exp_avg_sq", "note", "step"]


def test_damage_to_any_file_is_noticed_and_retention_is_bounded(ranks: Ranks, tmp_path: Path) -> None:
    plain_one = CheckpointStore(tmp_path).save({"n": torch.ones(1)}, {})
    ranks.run(save_sharded, str(tmp_path), 2)
    store = CheckpointStore(tmp_path)
    newest, before = store.paths()
    assert [newest.name, before.name] == ["00000003.dcp", "00000002.dcp"]
    assert not plain_one.exists()  # one numbering, whoever writes
    assert sorted(path.name for path in tmp_path.iterdir()) == [before.name, newest.name]
    copy = tmp_path / "copy"
    shutil.copytree(newest, copy)
    names = sorted(path.name for path in newest.iterdir())
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json", "rest_00000.pt", "rest_00001.pt"]
    for name in names:
        for damage in ("truncate", "flip", "remove"):
            victim = newest / name
            raw = victim.read_bytes()
            victim.unlink()
            if damage == "truncate":
                victim.write_bytes(raw[: len(raw) // 2])
            elif damage == "flip":
                victim.write_bytes(raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:])
            if damage == "flip" and name == "manifest.json":
                victim.write_bytes(raw)
                continue
            if (name, damage) == ("manifest.json", "remove"):  # then it does not count at all
                assert CheckpointStore(tmp_path).newest_valid() == before
            else:
                with pytest.warns(UserWarning, match="damaged"):
                    assert CheckpointStore(tmp_path).newest_valid() == before
            victim.write_bytes(raw)
    assert CheckpointStore(tmp_path).newest_valid() == newest
    shutil.rmtree(copy)
    half = tmp_path / "00000004.dcp.tmp"  # a run that was killed
    half.mkdir()
    (half / "x").write_text("x")
    fourth = CheckpointStore(tmp_path).save({"n": torch.ones(1)}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [newest.name, "00000004.json", fourth.name]


def save_where_one_fails(folder: str, who: int) -> list[str]:
    group = join()
    try:
        model, optimizer = net()
        store, found = ShardedStore(folder, group), []
        for bad in (True, False):
            state = pack(model, optimizer)
            if bad and dist.get_rank() == who:
                state["model"]["cannot be pickled"] = lambda: None
            try:
                found.append(store.save(state, {}).name)
            except ShardedWriteError as error:
                found.append(str(error))
        return found
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_cannot_write_fails_the_save_on_all_and_the_next_one_works(
    ranks: Ranks, tmp_path: Path, who: int
) -> None:
    one, two = ranks.run(save_where_one_fails, str(tmp_path), who)
    assert one == two
    assert f"rank {who}" in one[0]
    assert one[1] == "00000001.dcp"
    assert [path.name for path in tmp_path.iterdir()] == ["00000001.dcp"]


def test_sharded_tensors_that_have_no_name_are_refused() -> None:
    state = {"optimizer": {"groups": [], "state": {"w": {"odd": [torch.ones(1)]}}}}
    assert split(state) == ({}, state)
