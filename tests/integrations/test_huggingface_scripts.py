"""Other people's Hugging Face scripts, rebuilt in their usual shapes, with the callback added."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="pip install 'icefrog[huggingface]', or make test-adapters")
pytest.importorskip("accelerate", reason="pip install 'icefrog[huggingface]', or make test-adapters")

import hf_models as hf  # noqa: E402 - the library comes first
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

from icefrog.integrations.huggingface import LayerElasticCallback, last_checkpoint  # noqa: E402

pytestmark = pytest.mark.adapters

WORDS = [f"w{i}" for i in range(30)]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tokenizer() -> Any:
    vocabulary = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def sentences(samples: int, seed: int) -> list[tuple[str, int]]:
    """Of unequal lengths; the label is whether the first word is among the upper half."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(samples):
        length = int(torch.randint(3, 10, (), generator=draw))
        words = torch.randint(0, len(WORDS), (length,), generator=draw).tolist()
        found.append((" ".join(WORDS[word] for word in words), int(words[0] >= len(WORDS) // 2)))
    return found


def glue(folder: Path, callbacks: list[Any], stop_after: int | None = None) -> Any:
    """A text classifier in the shape of run_glue: tokenise, pad dynamically, resume, evaluate, predict, save."""
    words = tokenizer()
    torch.manual_seed(0)
    sizes = {"dim": 32, "n_layers": 3, "n_heads": 2, "hidden_dim": 64, "max_position_embeddings": 16}
    config = transformers.DistilBertConfig(vocab_size=len(words), num_labels=2, **sizes)
    model = transformers.DistilBertForSequenceClassification(config)
    train, val = ([{**words(text), "labels": y} for text, y in sentences(n, seed)] for n, seed in ((96, 1), (48, 2)))
    args = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=3,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        weight_decay=0.01,
        label_smoothing_factor=0.1,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=4,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=val,
        processing_class=words,
        data_collator=transformers.DataCollatorWithPadding(words, pad_to_multiple_of=4),
        compute_metrics=hf.accuracy,
        callbacks=[transformers.EarlyStoppingCallback(early_stopping_patience=5), *callbacks],
    )
    if stop_after is not None:
        trainer.add_callback(hf.At(stop_after, lambda: setattr(trainer.control, "should_training_stop", True)))
    trainer.train(resume_from_checkpoint=last_checkpoint(folder))
    trainer.save_model()
    trainer.save_state()
    metrics = trainer.evaluate()
    assert len(trainer.predict(val).predictions) == 48
    return trainer, metrics


def test_run_glue(tmp_path: Path) -> None:
    plain, plain_metrics = glue(tmp_path / "plain", [])
    callback = LayerElasticCallback(rule="none")
    trainer, metrics = glue(tmp_path / "with", [callback])
    assert hf.losses(trainer) == hf.losses(plain)
    assert hf.bits(trainer.model) == hf.bits(plain.model)
    assert metrics["eval_accuracy"] == plain_metrics["eval_accuracy"]
    evaluated = [row["eval_accuracy"] for row in trainer.state.log_history if "eval_accuracy" in row]
    measured = [
        d.metric for d in callback.decisions if d.metric is not None
    ]  # None: an epoch's end between evaluations
    assert measured == evaluated[: len(measured)]
    assert len(measured) == 5  # at 4, 8, 12, 16 and the last, 18
    assert callback.decisions[-1].effective_samples == trainer.state.global_step * 16

    frozen = LayerElasticCallback(rule="none")
    trainer, _ = glue(tmp_path / "frozen", [frozen, hf.At2(3, lambda: frozen.elastic.freeze(2))], stop_after=9)
    resumed = LayerElasticCallback(rule="none")
    trainer, _ = glue(tmp_path / "frozen", [resumed])
    assert trainer.state.global_step == 18
    assert {d.frozen_layers for d in resumed.decisions} == {2}
    loaded = type(trainer.model).from_pretrained(tmp_path / "frozen")
    assert hf.bits(loaded) == hf.bits(trainer.model)


def test_translation_with_generation_at_each_evaluation(tmp_path: Path) -> None:
    def run(callbacks: list[Any]) -> Any:
        torch.manual_seed(0)
        sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
        config = transformers.T5Config(vocab_size=hf.WORDS, decoder_start_token_id=0, pad_token_id=0, **sizes)
        model = transformers.T5ForConditionalGeneration(config)
        trainer = transformers.Seq2SeqTrainer(
            model=model,
            args=transformers.Seq2SeqTrainingArguments(
                str(tmp_path),
                num_train_epochs=3,
                per_device_train_batch_size=16,
                eval_strategy="epoch",
                save_strategy="no",
                predict_with_generate=True,
                generation_max_length=6,
                logging_steps=1,
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=hf.Sentences(64, language=True),
            eval_dataset=hf.Sentences(32, seed=2, language=True),
            compute_metrics=lambda p: {"length": float(p.predictions.shape[1])},
            callbacks=callbacks,
        )
        trainer.train()
        return trainer

    plain = run([])
    callback = LayerElasticCallback("length", rule="none")
    trainer = run([callback])
    assert hf.losses(trainer) == hf.losses(plain)
    assert hf.bits(trainer.model) == hf.bits(plain.model)

    kept: list[Any] = []
    callback = LayerElasticCallback("length", rule="none")

    def freeze() -> None:
        callback.elastic.freeze(3)
        kept.append([layer.name for layer in callback.elastic.layers])
        kept.append({name: p for layer in callback.elastic.layers[:3] for name, p in layer.params.items()})
        kept.append({name: p.detach().clone() for name, p in kept[1].items()})

    trainer = run([callback, hf.At(4, freeze)])
    assert kept[0][:2] == ["encoder.block.0", "encoder.block.1"]
    assert all(torch.equal(kept[1][name], before) for name, before in kept[2].items())
    assert any(name.startswith("encoder.block.1") for name in kept[1])
    generated = [row["eval_length"] for row in trainer.state.log_history if "eval_length" in row]
    assert [d.metric for d in callback.decisions] == generated


def test_a_trainer_of_somebody_elses_with_a_loss_of_its_own(tmp_path: Path) -> None:
    class Weighted(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weight=torch.tensor([1.0, 2.0]))
            return (loss, outputs) if return_outputs else loss

        def create_optimizer(self, *args: Any) -> Any:
            groups = [
                {"params": self.model.bert.parameters(), "lr": 1e-4},
                {"params": self.model.classifier.parameters()},
            ]
            self.optimizer = torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
            return self.optimizer

    def run(callbacks: list[Any]) -> Any:
        trainer = Weighted(
            model=hf.bert(),
            args=transformers.TrainingArguments(
                str(tmp_path), num_train_epochs=2, save_strategy="no", logging_steps=1, report_to=[], use_cpu=True
            ),
            train_dataset=hf.Sentences(64),
            callbacks=callbacks,
        )
        trainer.train()
        return trainer

    assert hf.losses(run([LayerElasticCallback(rule="none")])) == hf.losses(run([]))
    callback = LayerElasticCallback(rule="none")
    trainer = run([callback, hf.At(3, lambda: callback.elastic.freeze(5))])
    assert hf.bits(trainer.model) != hf.bits(hf.bert())
