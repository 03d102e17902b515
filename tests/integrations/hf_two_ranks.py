"""One of two processes of test_huggingface_ranks.py; prints what it saw as one line of JSON."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import hf_models as hf
import torch
import torch.distributed as dist
from transformers import Trainer

from icefrog.errors import UserError
from icefrog.integrations.huggingface import LayerElasticCallback
from icefrog.runtime import Guards

torch.set_num_threads(1)
folder = Path(sys.argv[1])
seen: dict[str, Any] = {}


def digest(parts: dict[str, bytes]) -> str:
    return hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()


def run(name: str, callbacks: list[Any], attach: LayerElasticCallback | None = None, **options: Any) -> Trainer:
    model = hf.bert(seed=dist.get_rank() if dist.is_initialized() else 0)  # ranks start apart: rank 0's weights count
    made = hf.trainer(folder / name, callbacks, model=model, gradient_accumulation_steps=2, **options)
    if attach is not None:
        attach.attach(made)
    made.train()
    seen[name] = {"losses": hf.losses(made), "model": digest(hf.bits(made.model)), "steps": made.state.global_step}
    return made


run("plain", [])
callback = LayerElasticCallback(rule="none")
run("unfrozen", [callback], callback)
seen["unfrozen"]["samples"] = callback.decisions[-1].effective_samples

callback = LayerElasticCallback(rule="none")
kept: list[Any] = []


def prefix() -> dict[str, bytes]:
    params = {name: p for layer in callback.elastic.layers[:3] for name, p in layer.params.items()}
    return {name: p.detach().numpy().tobytes() for name, p in params.items()}


def freeze() -> None:
    callback.elastic.freeze(3)
    kept.append((digest(prefix()), callback.elastic._engine.statistics.bytes_reduced))


def later() -> None:
    statistics = callback.elastic._engine.statistics
    kept.append((digest(prefix()), statistics.bytes_reduced))
    seen["live_bytes"] = sum(layer.param_bytes for layer in callback.elastic.layers[3:])


made = run(
    "frozen", [callback, hf.At(2, freeze), hf.At2(4, later)], callback, eval_strategy="epoch", save_strategy="epoch"
)
seen["kept"] = kept
resumed = LayerElasticCallback(rule="none")
again = hf.trainer(
    folder / "resumed",
    [resumed],
    model=hf.bert(seed=dist.get_rank()),
    gradient_accumulation_steps=2,
    eval_strategy="epoch",
)
resumed.attach(again)
dist.barrier()
again.train(resume_from_checkpoint=str(folder / "frozen" / "checkpoint-4"))
seen["resumed"] = {"losses": hf.losses(again), "model": digest(hf.bits(again.model))}
seen["resumed"]["depth"] = resumed.decisions[-1].frozen_layers

tuned = LayerElasticCallback("accuracy", guards=Guards(0, 0, 0, 0))
run("tuned", [tuned], tuned, eval_strategy="epoch", num_train_epochs=6)
seen["tuned"]["decisions"] = [(d.frozen_layers, d.metric) for d in tuned.decisions]
try:
    run("refused", [LayerElasticCallback()])
except UserError as error:
    seen["refused"] = error.hint
print("SEEN " + json.dumps(seen), flush=True)
dist.destroy_process_group()
