"""The Hugging Face adapter against the real Trainer. Run by ``make test-adapters``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="pip install 'icefrog[huggingface]', or make test-adapters")
pytest.importorskip("accelerate", reason="pip install 'icefrog[huggingface]', or make test-adapters")

import hf_models as hf  # noqa: E402 - the library comes first
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from icefrog.errors import UserError  # noqa: E402
from icefrog.integrations.huggingface import LayerElasticCallback, last_checkpoint  # noqa: E402
from icefrog.runtime import Guards, protocol  # noqa: E402

pytestmark = pytest.mark.adapters


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def by_hand(**options: Any) -> LayerElasticCallback:
    return LayerElasticCallback(rule="none", **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 3},
        {"bf16": True},
        {"optim": "sgd", "lr_scheduler_type": "cosine", "max_grad_norm": 0.1},
        {"gradient_checkpointing": True},
    ],
    ids=["plain", "accumulation", "bf16", "sgd", "checkpointing"],
)
def test_with_nothing_frozen_training_is_the_same_to_the_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    without = hf.trainer(tmp_path / "a", [], **options)
    without.train()
    callback = by_hand()
    with_it = hf.trainer(tmp_path / "b", [callback], **options)
    with_it.train()
    assert hf.losses(with_it) == hf.losses(without)
    assert hf.bits(with_it.model) == hf.bits(without.model)
    assert len(hf.losses(without)) == (9 if "gradient_accumulation_steps" in options else 24)


@pytest.mark.parametrize(
    "options", [{}, {"bf16": True}, {"gradient_checkpointing": True}], ids=["plain", "bf16", "ckpt"]
)
def test_a_frozen_prefix_does_not_move_and_costs_no_backward(tmp_path: Path, options: dict[str, Any]) -> None:
    callback = by_hand()
    kept: list[dict[str, bytes]] = []
    flops: list[int] = []

    def prefix() -> dict[str, bytes]:
        elastic = callback.elastic
        assert elastic is not None
        params = {name: param for layer in elastic.layers[:3] for name, param in layer.params.items()}
        moments = {
            f"{name}.{key}": value
            for name, param in params.items()
            for key, value in elastic.optimizer.state[param].items()
        }
        return {name: tensor.detach().numpy().tobytes() for name, tensor in {**params, **moments}.items()}

    def freeze() -> None:
        callback.elastic.freeze(3)
        kept.append(prefix())

    def unfreeze() -> None:
        kept.append(prefix())
        callback.elastic.freeze(0)

    made = hf.trainer(tmp_path, [callback, hf.At(6, freeze), hf.At2(14, unfreeze)], eval_strategy="epoch", **options)
    plain_step = made.training_step

    def counted(*args: Any, **kwargs: Any) -> Any:
        with FlopCounterMode(display=False) as counter:
            loss = plain_step(*args, **kwargs)
        flops.append(counter.get_total_flops())
        return loss

    made.training_step = counted
    made.train()
    assert kept[0] == kept[1]
    names = list(kept[0])
    assert any(name.startswith("bert.embeddings") for name in names)
    assert any(name.startswith("bert.encoder.layer.1.") for name in names)
    assert flops[10] < 0.75 * flops[3]
    assert flops[20] == flops[3]
    assert hf.bits(made.model) != hf.bits(hf.bert())


def test_the_layers_of_an_encoder_and_of_a_decoder_with_a_tied_head(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    callback = by_hand()
    made = hf.trainer(tmp_path, [callback, hf.At(2, lambda: seen.append([x.name for x in callback.elastic.layers]))])
    made.train()
    assert seen[0] == ["bert.embeddings", *(f"bert.encoder.layer.{i}" for i in range(3)), "bert.pooler", "classifier"]

    callback = by_hand()
    kept: list[Any] = []

    def look() -> None:
        elastic = callback.elastic
        seen.append([layer.name for layer in elastic.layers])
        elastic.freeze(2)
        kept.append((hf.bits(made.model), elastic.layers[:2]))

    made = hf.trainer(tmp_path, [callback, hf.At(2, look)], model=hf.gpt2(), data=hf.Sentences(language=True))
    made.train()
    assert seen[1] == ["transformer.wpe", "transformer.h.0", "transformer.h.1", "lm_head"]
    before, layers = kept[0]
    after = hf.bits(made.model)
    frozen = [name for layer in layers for name in layer.params]
    assert frozen
    assert all(before[name] == after[name] for name in frozen)
    assert before["transformer.wte.weight"] != after["transformer.wte.weight"]  # tied: it trains with the head


def test_the_tuner_decides_after_each_evaluation(tmp_path: Path) -> None:
    callback = LayerElasticCallback("accuracy", guards=Guards(0, 0, 0, 0))
    made = hf.trainer(tmp_path, [callback], eval_strategy="steps", eval_steps=4, gradient_accumulation_steps=1)
    made.train()
    measured = [row["eval_accuracy"] for row in made.state.log_history if "eval_accuracy" in row]
    assert [decision.metric for decision in callback.decisions] == measured
    assert len(measured) == 6
    assert [d.reason.startswith("not ready") for d in callback.decisions] == [True] * 5 + [False]
    assert callback.decisions[-1].effective_samples == pytest.approx(3 * 128)


def test_without_evaluation_it_decides_at_the_end_of_each_epoch(tmp_path: Path) -> None:
    callback = by_hand()
    made = hf.trainer(tmp_path, [callback], gradient_accumulation_steps=3)
    made.train()
    assert [(d.metric, d.effective_samples) for d in callback.decisions] == [(None, 128), (None, 256), (None, 384)]


def test_the_target_ends_training(tmp_path: Path) -> None:
    callback = by_hand(metric="eval_loss", target=10.0)
    made = hf.trainer(tmp_path, [callback], eval_strategy="epoch")
    made.train()
    assert made.state.global_step == 8
    callback = by_hand(metric="accuracy", target=1.1)
    made = hf.trainer(tmp_path, [callback], eval_strategy="epoch")
    made.train()
    assert made.state.global_step == 24


@pytest.mark.parametrize(
    ("metric", "options", "mode"),
    [
        ({}, {}, "min"),  # the loss
        ({"metric": "accuracy"}, {}, "max"),
        ({}, {"metric_for_best_model": "accuracy", "greater_is_better": True}, "max"),
        ({"metric": "accuracy", "mode": "min"}, {}, "min"),
    ],
)
def test_without_a_target_too_it_knows_which_way_is_better(
    tmp_path: Path, metric: dict[str, Any], options: dict[str, Any], mode: str
) -> None:
    told: list[str] = []
    callback = LayerElasticCallback(rule=lambda now: (told.append(now.mode), now.stay("watching"))[1], **metric)
    hf.trainer(tmp_path, [callback], eval_strategy="epoch", num_train_epochs=1, **options).train()
    assert set(told) == {mode}


def test_a_metric_that_is_not_there_is_named(tmp_path: Path) -> None:
    made = hf.trainer(tmp_path, [by_hand(metric="f1")], eval_strategy="epoch", num_train_epochs=1)
    with pytest.warns(UserWarning, match=r"no metric 'f1' in this evaluation, only eval_loss, eval_accuracy"):
        made.train()


@pytest.mark.parametrize(("strategy", "at"), [("epoch", 8), ("steps", 12)])
def test_a_resumed_training_goes_on_to_the_bit(tmp_path: Path, strategy: str, at: int) -> None:
    def run(folder: Path, resume: Path | None) -> tuple[Any, LayerElasticCallback]:
        callback = by_hand()
        moves = [hf.At(5, lambda: callback.elastic.freeze(2)), hf.At2(20, lambda: callback.elastic.freeze(1))]
        options = {"save_strategy": strategy, "save_steps": at, "eval_strategy": "epoch"}
        told = str(resume) if resume and strategy == "epoch" else None  # else the callback cannot know the folder
        made = hf.trainer(folder, [callback, *moves], resume_from_checkpoint=told, **options)
        made.train(resume_from_checkpoint=str(resume) if resume else None)
        return made, callback

    whole, first = run(tmp_path / "a", None)
    elsewhere = (tmp_path / "a" / f"checkpoint-{at}").rename(tmp_path / "moved")
    resumed, second = run(tmp_path / "b", elsewhere)
    assert hf.losses(resumed)[at:] == hf.losses(whole)[at:]
    assert hf.bits(resumed.model) == hf.bits(whole.model)
    ended = [(d.frozen_layers, d.metric) for d in first.decisions]
    assert [depth for depth, _ in ended] == [2, 2, 1]
    assert [(d.frozen_layers, d.metric) for d in second.decisions] == ended[1:]
    # Where it does not know the folder, one step is not measured after a resume, so psi differs a little.
    near = 0.0 if strategy == "epoch" else 0.02
    assert second.decisions[-1].effective_samples == pytest.approx(first.decisions[-1].effective_samples, rel=near)


@pytest.mark.parametrize("rule", ["linear", "autofreeze"])
def test_a_resumed_training_decides_as_the_unbroken_one(tmp_path: Path, rule: str) -> None:
    def run(folder: Path, resume: str | None = None) -> tuple[Any, LayerElasticCallback]:
        callback = LayerElasticCallback("accuracy", rule=rule, tune_every_steps=4)
        options = {"save_strategy": "steps", "save_steps": 15, "num_train_epochs": 5}
        made = hf.trainer(folder, [callback], **options)
        made.train(resume_from_checkpoint=resume)
        return made, callback

    _, first = run(tmp_path)
    resumed, second = run(tmp_path / "again", str(tmp_path / "checkpoint-30"))
    assert second.decisions[-1].frozen_layers > 0
    ended = [(d.frozen_layers, d.effective_samples) for d in first.decisions]
    assert [(d.frozen_layers, d.effective_samples) for d in second.decisions] == ended[3:]
    assert resumed.state.global_step == 40


def test_a_boundary_that_a_later_callback_moves_is_in_the_checkpoint_of_that_step(tmp_path: Path) -> None:
    callback = by_hand()
    later = hf.At(4, lambda: callback.elastic.freeze(2))  # behind ours, which has looked at the boundary by then
    hf.trainer(tmp_path, [callback, later], save_strategy="steps", save_steps=4).train()
    resumed = by_hand()
    made = hf.trainer(tmp_path, [resumed, hf.At(5, lambda: seen.append(resumed.elastic.frozen_layers))])
    seen: list[int] = []
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert seen == [2]


def test_a_part_of_a_checkpoint_is_passed_over(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path / "not-yet") is None
    hf.trainer(tmp_path, [by_hand()], save_strategy="steps", save_steps=8).train()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-24")
    state = tmp_path / "checkpoint-24" / "trainer_state.json"
    state.write_text(state.read_text()[:100])  # killed in its middle
    (tmp_path / "checkpoint-32").mkdir()  # before it
    (tmp_path / "checkpoint-best").mkdir()
    with pytest.warns(UserWarning, match="only a part of a checkpoint"):
        newest = last_checkpoint(tmp_path)
    assert newest == str(tmp_path / "checkpoint-16")
    made = hf.trainer(tmp_path, [by_hand()])
    made.train(resume_from_checkpoint=newest)
    assert made.state.global_step == 24


def test_the_best_model_comes_back_whole_and_can_be_trained_again(tmp_path: Path) -> None:
    callback = by_hand()
    made = hf.trainer(
        tmp_path,
        [callback, hf.At(5, lambda: callback.elastic.freeze(3))],
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
    )
    made.train()
    best = type(made.model).from_pretrained(made.state.best_model_checkpoint)
    assert hf.bits(best) == hf.bits(made.model)
    assert all(param.requires_grad for param in made.model.parameters())
    assert not any(module._forward_pre_hooks for module in made.model.modules())
    assert callback.elastic is None
    made.train()
    assert len(callback.decisions) == 3
    assert math.isfinite(made.evaluate()["eval_loss"])


def test_a_grad_scaler_of_accelerate(tmp_path: Path) -> None:
    """fp16 itself needs a GPU; accelerate's scaler and its patched ``step`` are the same on the CPU."""

    def run(callbacks: list[Any]) -> Any:
        made = hf.trainer(tmp_path, callbacks, gradient_accumulation_steps=2, eval_strategy="epoch")
        made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=4)
        made.train()
        return made

    without, callback = run([]), by_hand()
    with_it = run([callback])
    assert with_it.accelerator.scaler.get_scale() == without.accelerator.scaler.get_scale()
    assert hf.losses(with_it) == hf.losses(without)
    assert hf.bits(with_it.model) == hf.bits(without.model)


def test_a_request_to_stop_saves_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(protocol.ENV_ATTEMPT_DIR, str(tmp_path))
    monkeypatch.setenv(protocol.ENV_CHECKPOINT_DIR, str(tmp_path / "own"))
    stop = tmp_path / protocol.STOP_FILE
    made = hf.trainer(tmp_path / "out", [by_hand(), hf.At(4, stop.touch)])
    made.train()
    assert made.state.global_step == 5
    lines = [protocol.decode(line) for line in (tmp_path / protocol.REPORTS_FILE).read_text().splitlines()]
    assert [line.kind for line in lines] == ["started", "checkpointed", "stopped"]
    assert Path(lines[1].path) == tmp_path / "out" / "checkpoint-5"
    assert Path(lines[1].path, "trainer_state.json").is_file()
    stop.unlink()
    again = hf.trainer(tmp_path / "out", [by_hand()])
    again.train(resume_from_checkpoint=True)
    last = protocol.decode((tmp_path / protocol.REPORTS_FILE).read_text().splitlines()[-1])
    assert (last.kind, last.outcome, last.effective_samples) == ("finished", "completed", 3 * 128)


def test_compilation_by_the_trainer_is_refused(tmp_path: Path) -> None:
    made = hf.trainer(tmp_path, [by_hand()], torch_compile=True, torch_compile_backend="eager")
    with pytest.raises(UserError, match="torch_compile") as refused:
        made.train()
    assert "TrainingArguments" in refused.value.hint


def test_data_parallel_in_one_process_is_refused(tmp_path: Path) -> None:
    made = hf.trainer(tmp_path, [by_hand()])
    made.args._n_gpu = 2
    with pytest.raises(UserError, match=r"nn\.DataParallel"):
        made.callback_handler.on_train_begin(made.args, made.state, made.control)
