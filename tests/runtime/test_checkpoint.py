from __future__ import annotations

import json
import resource
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import models
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from icefrog.errors import UserError
from icefrog.runtime import LayerElastic, Stopped, protocol
from icefrog.runtime.checkpoint import CheckpointStore, load
from icefrog.runtime.named_state import load_optimizer_state, optimizer_state

SAMPLES = 64


def job(folder: Path, depth_at_epoch: dict[int, int], *, stop_after: int | None = None, epochs: int = 4, attempt="a"):  # type: ignore[no-untyped-def]
    """A run with boundaries by hand, stopped after so many steps as an executor would; returns (elastic, optimizer)."""
    attempt_dir = folder / attempt
    attempt_dir.mkdir(parents=True, exist_ok=True)
    model = models.bn_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    env = {protocol.ENV_ATTEMPT_DIR: str(attempt_dir), protocol.ENV_CHECKPOINT_DIR: str(folder / "checkpoints")}
    elastic = LayerElastic(model, optimizer, rule="none", global_batch=16, env=env)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    elastic.register("scheduler", scheduler)
    # Its own generator: a DataLoader draws a seed at the start of each pass, which would shift dropout after a resume.
    loader = DataLoader(
        TensorDataset(*models.data(SAMPLES)),
        batch_sampler=elastic.sampler(SAMPLES),
        generator=torch.Generator(),
    )
    steps = 0
    for epoch in elastic.epochs(epochs):
        if epoch in depth_at_epoch:
            elastic.freeze(depth_at_epoch[epoch])
        for x, y in loader:
            steps += 1
            if steps == stop_after:
                (attempt_dir / "stop").touch()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        elastic.end_epoch(metric=0.5)
    return elastic, optimizer


def reports(folder: Path) -> list[protocol.AnyReport]:
    return [protocol.decode(line) for line in (folder / "reports.jsonl").read_bytes().splitlines()]


@pytest.mark.parametrize("stop_after", [6, 8, 9])  # in mid-epoch, at the end of an epoch, at the start of the next
def test_stopped_and_resumed_is_bit_equal_to_never_stopped(tmp_path: Path, stop_after: int) -> None:
    boundaries = {1: 2, 3: 1}
    whole, whole_optimizer = job(tmp_path / "whole", boundaries)
    with pytest.raises(Stopped) as stopped:
        job(tmp_path / "parts", boundaries, stop_after=stop_after, attempt="a")
    assert stopped.value.code == 0
    resumed, resumed_optimizer = job(tmp_path / "parts", boundaries, attempt="b")
    assert models.bytes_of(resumed.model) == models.bytes_of(whole.model)
    for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        for key, value in whole_optimizer.state[theirs].items():
            assert torch.equal(resumed_optimizer.state[mine][key], value)
    assert resumed.frozen_layers == whole.frozen_layers == 1
    assert resumed.effective_samples == whole.effective_samples
    assert resumed._at.step == whole._at.step
    assert resumed_optimizer.param_groups[0]["lr"] == whole_optimizer.param_groups[0]["lr"]
    assert resumed._engine.tracker.variance.tolist() == whole._engine.tracker.variance.tolist()
    assert resumed.psi == whole.psi
    first, second = reports(tmp_path / "parts" / "a"), reports(tmp_path / "parts" / "b")
    assert isinstance(first[-1], protocol.StoppedReport)
    assert isinstance(first[-2], protocol.Checkpointed)
    assert isinstance(second[0], protocol.Started)
    assert second[0].resumed
    assert second[0].effective_samples == first[-1].effective_samples
    assert isinstance(second[-1], protocol.Finished)
    for kind in ("progress", "checkpointed"):  # checkpoints are reported when they are on disk, beside training
        counts = [r.effective_samples for r in [*first, *second] if r.kind == kind]
        assert counts
        assert counts == sorted(counts)


def test_the_mask_is_in_the_checkpoint(tmp_path: Path) -> None:  # F12
    job(tmp_path, {0: 2}, epochs=2)
    resumed, _ = job(tmp_path, {}, epochs=2, attempt="b")
    assert resumed.frozen_layers == 2
    assert [p.requires_grad for p in resumed.layers[1].params.values()] == [False] * 4
    assert [p.requires_grad for p in resumed.layers[2].params.values()] == [True] * 4


def test_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path) -> None:
    job(tmp_path, {}, epochs=3)
    store = CheckpointStore(tmp_path / "checkpoints")
    newest, earlier = store.paths()
    raw = bytearray(newest.read_bytes())
    raw[len(raw) // 2] ^= 1
    newest.write_bytes(bytes(raw))
    with pytest.warns(UserWarning, match="damaged"):
        assert store.newest_valid() == earlier
    with pytest.warns(UserWarning, match="damaged"):
        resumed, _ = job(tmp_path, {}, epochs=3, attempt="b")
    assert resumed._at.step == 12
    assert any(isinstance(r, protocol.Warned) for r in reports(tmp_path / "b"))


def test_a_damaged_checkpoint_does_not_push_out_the_good_one_before_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    first = store.save({"n": torch.tensor(1)}, {})
    store.save({"n": torch.tensor(2)}, {}).write_bytes(b"x")
    with pytest.warns(UserWarning, match="damaged"):
        assert store.newest_valid() == first
    third = store.save({"n": torch.tensor(3)}, {})
    assert store.paths() == [third, first]
    third.write_bytes(b"x")
    with pytest.warns(UserWarning, match="damaged"):
        assert CheckpointStore(tmp_path).newest_valid() == first


def test_a_checkpoint_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    first = store.save({"n": torch.tensor(1)}, {})
    before = sorted(tmp_path.iterdir())
    with pytest.raises(Exception, match="pickle"):
        store.save({"n": torch.tensor(2), "bad": lambda: None}, {})
    with pytest.raises(TypeError, match="JSON"):
        store.save({"n": torch.tensor(2)}, {"bad": object()})
    assert store.newest_valid() == first
    store.save({"n": torch.tensor(2)}, {})
    assert len(list(tmp_path.iterdir())) == len(before) + 2


def save_with_room_for(num_bytes: int, folder: Path) -> str:
    """In a process of its own: what is said where files may not grow further."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
    try:
        CheckpointStore(folder).save({"weight": torch.zeros(25_000)}, {})
    except OSError as error:
        return str(error)
    return "saved"


def test_a_file_that_ends_early_is_named_so_wherever_it_ends(tmp_path: Path) -> None:
    """PyTorch's own error then is about a position in an archive."""
    with ProcessPoolExecutor(1, torch.multiprocessing.get_context("spawn")) as pool:
        for num_bytes in (1_000, 50_000, 100_000):
            assert "File too large" in pool.submit(save_with_room_for, num_bytes, tmp_path).result(timeout=120)
            assert not list(tmp_path.iterdir())
        assert pool.submit(save_with_room_for, 10**6, tmp_path).result() == "saved"


def test_a_checkpoint_without_its_manifest_does_not_count(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    first = store.save({"n": torch.tensor(1)}, {})
    second = store.save({"n": torch.tensor(2)}, {})
    second.with_suffix(".json").unlink()  # killed between the two renames
    (tmp_path / "00000003.pt.tmp").write_bytes(b"half")
    assert store.newest_valid() == first
    again = store.save({"n": torch.tensor(3)}, {"epoch": 3})
    assert load(again, torch.device("cpu"))["n"] == 3
    assert json.loads(again.with_suffix(".json").read_text())["epoch"] == 3
    left = ["00000001.json", "00000001.pt", "00000002.json", "00000002.pt"]  # the number was free, the halves are gone
    assert sorted(p.name for p in tmp_path.iterdir()) == left


class KilledAfterSaving(CheckpointStore):
    """Is gone before it has forgotten old checkpoints."""

    calls = 0

    def forget_old(self) -> None:
        self.calls += 1
        if self.calls > 1:
            raise KeyboardInterrupt
        super().forget_old()


def test_runs_that_are_killed_between_saving_and_forgetting_do_not_pile_up(tmp_path: Path) -> None:
    for number in range(5):
        with pytest.raises(KeyboardInterrupt):
            KilledAfterSaving(tmp_path).save({"n": torch.tensor(number)}, {})
    assert [path.name for path in CheckpointStore(tmp_path).paths()] == ["00000005.pt", "00000004.pt", "00000003.pt"]


def test_only_two_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for number in range(5):
        store.save({"n": torch.tensor(number)}, {})
    assert [path.name for path in store.paths()] == ["00000005.pt", "00000004.pt"]


def test_optimizer_state_goes_by_name_not_by_position() -> None:  # F11
    model = models.mlp()  # three equal-shaped layers: by position the wrong moments would load silently
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x, y = models.data()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    saved = optimizer_state(model, optimizer)
    twin = models.mlp()
    reordered = torch.optim.Adam(list(reversed(list(twin.parameters()))), lr=0.5)
    load_optimizer_state(twin, reordered, saved)
    for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.equal(reordered.state[mine]["exp_avg"], optimizer.state[theirs]["exp_avg"])
    assert reordered.param_groups[0]["lr"] == 0.01


def test_other_groups_are_refused() -> None:  # F11
    model = models.mlp()
    saved = optimizer_state(model, torch.optim.Adam(model.parameters()))
    with pytest.raises(UserError, match=r"3\.weight"):
        load_optimizer_state(model, torch.optim.Adam(model[:3].parameters()), saved)


def test_another_model_is_refused(tmp_path: Path) -> None:
    job(tmp_path, {}, epochs=1)
    model = models.mlp(depth=3)
    optimizer = torch.optim.AdamW(model.parameters())
    elastic = LayerElastic(model, optimizer, checkpoint_dir=tmp_path / "checkpoints", env={})
    with pytest.raises(UserError, match="the checkpoint has layers"):
        next(elastic.epochs(1))


def test_a_loader_of_the_users_own_repeats_the_interrupted_epoch(tmp_path: Path) -> None:
    x, y = models.data(SAMPLES)

    def run(attempt: str, stop_after: int | None) -> LayerElastic:
        attempt_dir = tmp_path / attempt
        attempt_dir.mkdir()
        model = models.mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        env = {protocol.ENV_ATTEMPT_DIR: str(attempt_dir)}
        elastic = LayerElastic(model, optimizer, rule="none", checkpoint_dir=tmp_path / "c", env=env)
        steps = 0
        for _ in elastic.epochs(3):
            for at in range(0, SAMPLES, 16):
                steps += 1
                if steps == stop_after:
                    (attempt_dir / "stop").touch()
                nn.functional.cross_entropy(model(x[at : at + 16]), y[at : at + 16]).backward()
                optimizer.step()
                optimizer.zero_grad()
            elastic.end_epoch()
        return elastic

    with pytest.raises(Stopped):
        run("a", stop_after=6)
    resumed = run("b", None)
    # 96 samples before the stop, then whole epochs until P0 = 3 * 64 is reached: work is counted as it is done.
    assert resumed._at.samples_per_epoch == SAMPLES
    assert resumed.effective_samples == 96 + 2 * SAMPLES
    assert resumed.outcome == "completed"


def test_files_of_the_user_in_the_checkpoint_folder_are_left_alone(tmp_path: Path) -> None:
    mine = ["2023.csv", "1.jpg", "12.pt", "007.json", "20231231.json", "20231231.pt", "00000001.csv", "best.pt"]
    for name in mine:
        (tmp_path / name).write_text("mine")
    (tmp_path / "2023").mkdir()
    (tmp_path / "00000001.pt").mkdir()
    store = CheckpointStore(tmp_path)
    (tmp_path / "00000001.pt").rmdir()
    for number in range(4):
        path = store.save({"n": torch.tensor(number)}, {})
    assert path.name == "00000004.pt"
    assert store.newest_valid() == path
    assert [(tmp_path / name).read_text() for name in mine] == ["mine"] * len(mine)
    ours = {f"0000000{n}.{kind}" for n in (3, 4) for kind in ("pt", "json")}
    assert {p.name for p in tmp_path.iterdir()} == {*mine, "2023", *ours}


@pytest.mark.parametrize("manifest", ["[]", "1", "null", '"x"', "{", "", "{}", '{"sha256": [], "bytes": {}}'])
def test_a_manifest_of_the_wrong_kind_falls_back_to_the_checkpoint_before(tmp_path: Path, manifest: str) -> None:
    store = CheckpointStore(tmp_path)
    first = store.save({"n": torch.tensor(1)}, {})
    store.save({"n": torch.tensor(2)}, {}).with_suffix(".json").write_text(manifest)
    with pytest.warns(UserWarning, match="using the one before it"):
        assert store.newest_valid() == first


def test_when_every_checkpoint_is_damaged_the_last_warning_says_so(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for number in range(2):
        store.save({"n": torch.tensor(number)}, {}).write_bytes(b"x")
    with pytest.warns(UserWarning, match="damaged") as caught:
        assert store.newest_valid() is None
    assert "using the one before it" in str(caught[0].message)
    assert "training starts from the beginning" in str(caught[-1].message)
