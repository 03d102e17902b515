"""The Lightning adapter against the real Trainer. Run by ``make test-adapters``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lightning.pytorch", reason="pip install 'icefrog[lightning]', or make test-adapters")

import pl_models  # noqa: E402 - the library comes first
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from icefrog.errors import UserError  # noqa: E402
from icefrog.integrations.lightning import LayerElasticCallback  # noqa: E402
from icefrog.runtime import Guards, protocol  # noqa: E402

pytestmark = [
    pytest.mark.adapters,
    pytest.mark.filterwarnings(
        "ignore:.*num_workers.*", "ignore:.*log_every_n_steps.*", "ignore:.*Checkpoint directory.*"
    ),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def by_hand(*args: Any, **options: Any) -> LayerElasticCallback:
    return LayerElasticCallback(*args, rule="none", **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 3},
        {"precision": "bf16-mixed"},
        {"gradient_clip_val": 0.1, "val_check_interval": 3},
        {"max_epochs": -1, "max_steps": 20},
    ],
    ids=["plain", "accumulation", "bf16", "clipping", "max_steps"],
)
@pytest.mark.parametrize("schedule", ["step", "epoch"])
def test_with_nothing_frozen_training_is_the_same_to_the_bit(
    tmp_path: Path, options: dict[str, Any], schedule: str
) -> None:
    _, without = pl_models.fit(tmp_path, [], pl_models.Classifier(schedule), **options)
    _, with_it = pl_models.fit(tmp_path, [by_hand()], pl_models.Classifier(schedule), **options)
    assert with_it.losses == without.losses
    assert len(with_it.losses) >= 20
    assert pl_models.bits(with_it) == pl_models.bits(without)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_frozen_prefix_does_not_move_and_costs_no_backward(tmp_path: Path, optimizer: str) -> None:
    callback = by_hand()
    module = pl_models.Classifier(optimizer=optimizer)
    kept: list[dict[str, bytes]] = []
    flops: list[int] = []

    def prefix() -> dict[str, bytes]:
        elastic = callback.elastic
        found = {name: tensor for name, tensor in module.state_dict().items() if name < "backbone.2"}
        for name, param in elastic.layers[0].params.items() | elastic.layers[1].params.items():
            found |= {f"{name}.{key}": value for key, value in elastic.optimizer.state[param].items()}
        return {
            name: value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
            for name, value in found.items()
        }

    def freeze() -> None:
        callback.elastic.freeze(2)
        kept.append(prefix())

    def unfreeze() -> None:
        kept.append(prefix())
        callback.elastic.freeze(0)

    plain_backward = module.backward

    def counted(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        with FlopCounterMode(display=False) as counter:
            plain_backward(loss, *args, **kwargs)
        flops.append(counter.get_total_flops())

    module.backward = counted
    pl_models.fit(tmp_path, [callback, pl_models.At(6, freeze), pl_models.At(14, unfreeze)], module)
    assert kept[0] == kept[1]
    assert any(name.endswith("running_mean") for name in kept[0])
    assert flops[10] < 0.6 * flops[3]
    assert flops[20] == flops[3]
    assert all(param.requires_grad for param in module.parameters())
    assert not any(part._forward_pre_hooks for part in module.modules())


def test_it_decides_after_each_validation(tmp_path: Path) -> None:
    callback = LayerElasticCallback("val_acc", guards=Guards(0, 0, 0, 0))
    trainer, _ = pl_models.fit(tmp_path, [callback], val_check_interval=4, max_epochs=4)
    assert len(callback.decisions) == 8
    assert all(decision.metric is not None for decision in callback.decisions)
    assert callback.decisions[-1].metric == pytest.approx(float(trainer.callback_metrics["val_acc"]))
    assert [d.reason.startswith("not ready") for d in callback.decisions] == [True] * 5 + [False] * 3


def test_layers_that_open_behind_a_validation_train_as_before(tmp_path: Path) -> None:
    """Lightning then puts back the modes that it had found, those of frozen layers among them."""

    class Modes(pl_models.Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.asleep: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.asleep.append(sum(not block[1].training for block in self.backbone))
            return loss

    plan = [2, 1, 3, 0, 0]
    callback = LayerElasticCallback("val_acc", rule=lambda now: now.at(plan[now.epoch - 1] if now.epoch else 0, "plan"))
    _, module = pl_models.fit(tmp_path, [callback], Modes(), max_epochs=5)
    assert module.asleep == [0] * 8 + [2] * 8 + [1] * 8 + [3] * 8 + [0] * 8
    assert all(block[1].training for block in module.backbone)


def test_without_validation_it_decides_at_the_end_of_each_epoch(tmp_path: Path) -> None:
    callback = by_hand()
    pl_models.fit(tmp_path, [callback], limit_val_batches=0, accumulate_grad_batches=3)
    assert [(d.metric, d.effective_samples) for d in callback.decisions] == [(None, 128), (None, 256), (None, 384)]


def test_the_target_ends_training(tmp_path: Path) -> None:
    trainer, _ = pl_models.fit(tmp_path, [by_hand("val_loss", target=10.0)])
    assert trainer.global_step == 8
    trainer, _ = pl_models.fit(tmp_path, [by_hand("val_acc", target=1.1)])
    assert trainer.global_step == 24


@pytest.mark.parametrize(("metric", "mode"), [("val_loss", "min"), ("val_acc", "max")])
def test_without_a_target_too_it_knows_which_way_is_better(tmp_path: Path, metric: str, mode: str) -> None:
    told: list[str] = []
    rule = lambda now: (told.append(now.mode), now.stay("watching"))[1]  # noqa: E731
    pl_models.fit(tmp_path, [LayerElasticCallback(metric, rule=rule)], max_epochs=1)
    assert set(told) == {mode}


def test_a_metric_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"no metric 'f1' was logged; there are: .*val_acc"):
        pl_models.fit(tmp_path, [by_hand("f1")], max_epochs=1)


def test_a_resumed_training_goes_on_where_it_was(tmp_path: Path) -> None:
    def run(folder: Path, resume: Path | None = None, **options: Any) -> tuple[Any, LayerElasticCallback]:
        callback = by_hand("val_acc")
        moves = [
            pl_models.At(5, lambda: callback.elastic.freeze(2)),
            pl_models.At(20, lambda: callback.elastic.freeze(1)),
        ]
        saver = ModelCheckpoint(folder, save_top_k=-1, save_last=True)
        points = pl_models.Points()
        ordered = pl_models.DataLoader(pl_models.data(128, 1), batch_size=16)  # without random order or dropout:
        points.train_dataloader = lambda: ordered  # Lightning keeps no state of generators
        module = pl_models.Classifier()
        for part in module.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
        _, module = pl_models.fit(
            folder,
            [callback, *moves, saver],
            module,
            str(resume) if resume else None,
            points,
            enable_checkpointing=True,
            **options,
        )
        return module, callback

    whole, first = run(tmp_path / "a")
    resumed, second = run(tmp_path / "b", next((tmp_path / "a").glob("epoch=0*")))
    assert resumed.losses == whole.losses[8:]
    assert pl_models.bits(resumed) == pl_models.bits(whole)
    assert [d.frozen_layers for d in first.decisions] == [2, 2, 1]
    assert [(d.frozen_layers, d.metric) for d in second.decisions] == [
        (d.frozen_layers, d.metric) for d in first.decisions[1:]
    ]
    assert second.decisions[-1].effective_samples == first.decisions[-1].effective_samples
    last, third = run(tmp_path / "c", tmp_path / "a" / "last.ckpt", max_epochs=4)
    assert len(last.losses) == 8
    assert third.decisions[0].frozen_layers == 1


def test_beside_other_callbacks_and_for_a_second_training(tmp_path: Path) -> None:
    callback = by_hand("val_acc")
    trainer, module = pl_models.fit(
        tmp_path, [EarlyStopping("val_loss", patience=5), callback, pl_models.At(3, lambda: callback.elastic.freeze(2))]
    )
    assert trainer.validate(module, datamodule=pl_models.Points(), verbose=False)
    assert callback.elastic is None
    pl_models.fit(tmp_path, [callback], module)
    assert len(callback.decisions) == 3


def test_a_request_to_stop_saves_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(protocol.ENV_ATTEMPT_DIR, str(tmp_path))
    monkeypatch.setenv(protocol.ENV_CHECKPOINT_DIR, str(tmp_path / "own"))
    stop = tmp_path / protocol.STOP_FILE
    callback = by_hand("val_acc")
    assert callback.resume_from is None
    trainer, _ = pl_models.fit(tmp_path, [callback, pl_models.At(4, stop.touch)])
    assert trainer.global_step == 5
    lines = [protocol.decode(line) for line in (tmp_path / protocol.REPORTS_FILE).read_text().splitlines()]
    assert lines[0].kind == "started"
    assert [line.kind for line in lines if line.kind != "progress"][1:] == ["checkpointed", "stopped"]
    stop.unlink()
    callback = by_hand("val_acc")
    assert callback.resume_from == str(tmp_path / "own" / "lightning.ckpt")
    trainer, _ = pl_models.fit(tmp_path, [callback], ckpt_path=callback.resume_from)
    last = protocol.decode((tmp_path / protocol.REPORTS_FILE).read_text().splitlines()[-1])
    assert (last.kind, last.outcome, trainer.global_step) == ("finished", "completed", 24)


def test_a_rule_that_calls_the_model_by_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="egeria") as refused:
        pl_models.fit(tmp_path, [LayerElasticCallback("val_acc", rule="egeria")])
    assert "another rule" in refused.value.hint


def test_epochs_without_a_validation_have_no_metric_and_lack_none(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    callback = by_hand("val_acc")
    pl_models.fit(tmp_path, [callback], max_epochs=4, check_val_every_n_epoch=2)
    assert [d.metric is None for d in callback.decisions] == [True, False, True, False]
    assert not [w for w in recwarn if "no metric" in str(w.message)]


def test_two_optimizers_are_refused(tmp_path: Path) -> None:
    class Two(pl_models.Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.backbone, self.head)]

    with pytest.raises(UserError, match="2 optimizers"):
        pl_models.fit(tmp_path, [by_hand()], Two())
