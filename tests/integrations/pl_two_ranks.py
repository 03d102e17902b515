"""One of two processes of test_lightning_ranks.py; prints what it saw as one line of JSON."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pl_models
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from icefrog.integrations.lightning import LayerElasticCallback
from icefrog.runtime import Guards

torch.set_num_threads(1)
folder = Path(sys.argv[1])
seen: dict[str, Any] = {}


def digest(parts: dict[str, bytes]) -> str:
    return hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()


def run(name: str, callbacks: list[Any], **options: Any) -> Any:
    trainer, module = pl_models.fit(folder / name, callbacks, strategy="ddp", devices=2, **options)
    params = {key: value.detach().numpy().tobytes() for key, value in module.named_parameters()}
    seen[name] = {"losses": module.losses, "model": digest(params), "steps": trainer.global_step}
    return module


run("plain", [], accumulate_grad_batches=2, gradient_clip_val=0.5)
callback = LayerElasticCallback("val_acc", rule="none")
run("unfrozen", [callback], accumulate_grad_batches=2, gradient_clip_val=0.5)
seen["unfrozen"]["samples"] = callback.decisions[-1].effective_samples

callback = LayerElasticCallback("val_acc", rule="none")
kept: list[Any] = []


def prefix() -> dict[str, bytes]:
    layers = callback.elastic.layers[:2]
    tensors = {name: p for layer in layers for name, p in layer.params.items()}
    for layer in layers:
        for index, module in enumerate(layer.submodules()):
            tensors |= {f"{layer.name}.{index}.{key}": value for key, value in module.named_buffers(recurse=False)}
    return {name: p.detach().numpy().tobytes() for name, p in tensors.items()}


def freeze() -> None:
    callback.elastic.freeze(2)
    kept.append((digest(prefix()), callback.elastic._engine.statistics.bytes_reduced))


def later() -> None:
    kept.append((digest(prefix()), callback.elastic._engine.statistics.bytes_reduced))
    seen["live_bytes"] = sum(layer.param_bytes for layer in callback.elastic.layers[2:])


saver = ModelCheckpoint(folder / "saved", save_top_k=-1)
run("frozen", [callback, pl_models.At(2, freeze), pl_models.At(6, later), saver], enable_checkpointing=True)
seen["kept"] = kept
resumed = LayerElasticCallback("val_acc", rule="none")
dist.barrier()
run("resumed", [resumed], ckpt_path=str(next((folder / "saved").glob("epoch=0*"))))
seen["resumed"]["depth"] = resumed.decisions[-1].frozen_layers

tuned = LayerElasticCallback("val_acc", guards=Guards(0, 0, 0, 0))
run("tuned", [tuned], max_epochs=8)
seen["tuned"]["decisions"] = [(d.frozen_layers, d.metric) for d in tuned.decisions]
print("SEEN " + json.dumps(seen), flush=True)
