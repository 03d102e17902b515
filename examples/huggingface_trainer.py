"""A small vision transformer from a configuration, trained by the Hugging Face Trainer on scikit-learn's digits.

Nothing is downloaded. Lines marked <- make it layer-elastic. Needs ``pip install 'icefrog[huggingface,examples]'``; under
a minute on a CPU. In several processes: ``torchrun --nproc-per-node 2 examples/huggingface_trainer.py``.
"""

from __future__ import annotations

import tempfile

import torch
from digits_data import digits
from transformers import EvalPrediction, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from icefrog.integrations.huggingface import LayerElasticCallback  # <-


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


torch.manual_seed(0)
train, val = ([{"pixel_values": x, "labels": int(y)} for x, y in part] for part in digits())
sizes = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 96}
model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **sizes))
callback = LayerElasticCallback("accuracy", target=0.85)  # <-
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        tempfile.mkdtemp(),
        num_train_epochs=12,
        per_device_train_batch_size=64,
        per_device_eval_batch_size=360,
        learning_rate=3e-3,
        warmup_steps=20,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=train,
    eval_dataset=val,
    compute_metrics=accuracy,
    callbacks=[callback],  # <-
)
callback.attach(trainer)  # <- only needed in several processes
trainer.train()
if trainer.is_world_process_zero():
    for epoch, decision in enumerate(callback.decisions):
        depth, reason = decision.frozen_layers, decision.reason
        print(f"epoch {epoch}: accuracy {decision.metric:.3f}, {depth} layers frozen: {reason}")
