"""Tiny random models and data for the tests of the Hugging Face adapter; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DefaultFlowCallback,
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

LENGTH, WORDS = 12, 40


class Sentences(Dataset):
    """Random tokens; the label is whether the second one is large."""

    def __init__(self, samples: int = 128, seed: int = 1, language: bool = False) -> None:
        self.x = torch.randint(3, WORDS, (samples, LENGTH), generator=torch.Generator().manual_seed(seed))
        self.y = self.x if language else (self.x[:, 1] > WORDS // 2).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.x[index], "attention_mask": torch.ones(LENGTH).long(), "labels": self.y[index]}


def bert(seed: int = 0) -> BertForSequenceClassification:
    """Embeddings, three blocks, pooler, classifier: six layers."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **sizes))


def gpt2() -> GPT2LMHeadModel:
    """Its head shares the word embedding's weight."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2))


class At(TrainerCallback):
    """Calls ``action`` at the end of a step."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action = step, action

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.action()


class At2(At):
    """Trainer keeps one callback of a class."""


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def trainer(folder: Path, callbacks: list[Any], model: Any = None, data: Any = None, **options: Any) -> Trainer:
    """A Trainer with a log of every step's loss, 8 steps an epoch."""
    settings = {"num_train_epochs": 3, "save_strategy": "no", "learning_rate": 1e-3, "warmup_steps": 3} | options
    made = Trainer(
        model=bert() if model is None else model,
        args=TrainingArguments(
            str(folder),
            per_device_train_batch_size=16,
            per_device_eval_batch_size=64,
            report_to=[],
            logging_steps=1,
            disable_tqdm=True,
            use_cpu=True,
            **settings,
        ),
        train_dataset=Sentences() if data is None else data,
        eval_dataset=Sentences(64, seed=2),
        callbacks=callbacks,
        compute_metrics=accuracy if data is None else None,
    )
    made.remove_callback(PrinterCallback)
    assert any(isinstance(item, DefaultFlowCallback) for item in made.callback_handler.callbacks)
    return made


def losses(made: Trainer) -> list[float]:
    return [row["loss"] for row in made.state.log_history if "loss" in row]


def bits(model: torch.nn.Module) -> dict[str, bytes]:
    return {name: tensor.detach().numpy().tobytes() for name, tensor in model.state_dict().items()}
