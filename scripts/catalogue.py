"""Regenerates src/icefrog/workloads/catalogue.json: FLOPs, parameters and saved activations of every freezable unit.

The models are built from their real architectures on the meta device (no weights, no memory) and run once; PyTorch's
own FLOP counter and autograd's saved tensors are what is counted. Needs, in an environment of its own:

    pip install torch==2.13.0 transformers==5.24.0 diffusers==0.42.1
    python scripts/catalogue.py            # writes the file; --check compares instead
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from darknet import YoloV3
from diffusers import UNet2DModel
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    MobileNetV2Config,
    MobileNetV2ForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
)

OUTPUT = Path(__file__).parents[1] / "src/icefrog/workloads/catalogue.json"
BACKWARD_PER_FORWARD = 2.0  # gradients of inputs and of weights: two products for each one of the forward pass
Units = list[tuple[str, list[str]]]


@dataclass(frozen=True)
class Model:
    """How to build one model: the module, one sample's inputs, and its units as module-name prefixes."""

    source: str
    sample: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    units: Callable[[nn.Module], Units]
    param_dtype_bytes: int = 4


def _meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def _tokens(length: int) -> dict[str, Any]:
    return {"input_ids": torch.empty((1, length), dtype=torch.long, device="meta")}


def _masked_tokens(length: int) -> dict[str, Any]:
    # a ready-made 4-d mask: building the causal one asks for values, which meta tensors do not have
    return {**_tokens(length), "attention_mask": _meta(1, 1, length, length)}


# --- image classification -------------------------------------------------------------------------------------------


def _resnet(depths: list[int], widths: list[int], kind: str, labels: int, cifar: bool) -> nn.Module:
    config = ResNetConfig(depths=depths, hidden_sizes=widths, layer_type=kind, num_labels=labels)
    model = ResNetForImageClassification(config)
    if cifar:  # the usual CIFAR variant: 3x3 stem without stride, no pooling
        model.resnet.embedder.embedder.convolution = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        model.resnet.embedder.pooler = nn.Identity()
    return model


def _resnet_units(model: nn.Module) -> Units:
    units: Units = [("stem", ["resnet.embedder"])]
    for i, stage in enumerate(model.resnet.encoder.stages):
        units += [(f"stage{i + 1}.{j}", [f"resnet.encoder.stages.{i}.layers.{j}"]) for j in range(len(stage.layers))]
    return [*units, ("head", ["classifier"])]


def _mobilenet(labels: int, cifar: bool) -> nn.Module:
    model = MobileNetV2ForImageClassification(MobileNetV2Config(num_labels=labels, tf_padding=False))
    if cifar:  # the usual CIFAR variant: strides of the stem and of the second stage are 1
        model.mobilenet_v2.conv_stem.first_conv.convolution.stride = (1, 1)
        model.mobilenet_v2.layer[0].conv_3x3.convolution.stride = (1, 1)
    return model


def _mobilenet_units(model: nn.Module) -> Units:
    blocks = [(f"block{i + 1}", [f"mobilenet_v2.layer.{i}"]) for i in range(len(model.mobilenet_v2.layer))]
    return [
        ("stem", ["mobilenet_v2.conv_stem"]),
        *blocks,
        ("conv_1x1", ["mobilenet_v2.conv_1x1"]),
        ("head", ["classifier"]),
    ]


# --- language -------------------------------------------------------------------------------------------------------


def _bert() -> nn.Module:
    config = BertConfig(attn_implementation="eager")  # the defaults are BERT-base, uncased
    return BertForQuestionAnswering(config)


def _bert_units(model: nn.Module) -> Units:
    layers = [(f"layer{i + 1}", [f"bert.encoder.layer.{i}"]) for i in range(len(model.bert.encoder.layer))]
    return [("embeddings", ["bert.embeddings"]), *layers, ("head", ["qa_outputs"])]


_LLAMA = {
    "3b": {"hidden_size": 3200, "intermediate_size": 8640, "num_hidden_layers": 26, "num_attention_heads": 32},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
}


def _llama(size: str, head: type[nn.Module]) -> nn.Module:
    return head(
        LlamaConfig(vocab_size=32000, attn_implementation="eager", use_cache=False, pad_token_id=0, **_LLAMA[size])
    )


def _llama_units(base: str, head: str) -> Callable[[nn.Module], Units]:
    def units(model: nn.Module) -> Units:
        layers = [(f"layer{i + 1}", [f"{base}.layers.{i}"]) for i in range(len(getattr(model, base).layers))]
        return [("embeddings", [f"{base}.embed_tokens"]), *layers, ("head", [f"{base}.norm", head])]

    return units


# --- diffusion ------------------------------------------------------------------------------------------------------


def _ddpm() -> nn.Module:
    return UNet2DModel(  # the published configuration of google/ddpm-cifar10-32
        sample_size=32,
        block_out_channels=(128, 256, 256, 256),
        layers_per_block=2,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=None,
        downsample_padding=0,
        flip_sin_to_cos=False,
        freq_shift=1,
        norm_eps=1e-6,
    )


def _ddpm_units(model: nn.Module) -> Units:
    units: Units = [("conv_in", ["time_embedding", "conv_in"])]
    for kind in ("down", "mid", "up"):
        blocks = (
            [("mid_block", model.mid_block)]
            if kind == "mid"
            else [(f"{kind}_blocks.{i}", block) for i, block in enumerate(getattr(model, f"{kind}_blocks"))]
        )
        for path, block in blocks:
            units += _unet_block(path, block, kind)
    return [*units, ("conv_out", ["conv_norm_out", "conv_out"])]


def _unet_block(path: str, block: nn.Module, kind: str) -> Iterator[tuple[str, list[str]]]:
    attentions = getattr(block, "attentions", None) or []
    for i in range(len(block.resnets)):
        parts = [f"{path}.resnets.{i}"]
        partner = i if kind != "mid" else i - 1  # in the middle block the attention stands between the two
        if 0 <= partner < len(attentions):
            parts.append(f"{path}.attentions.{partner}")
        yield f"{path}.{i}", parts
    for name in ("downsamplers", "upsamplers"):
        if getattr(block, name, None):
            yield f"{path}.{name[:-1]}", [f"{path}.{name}.0"]


# --- counting -------------------------------------------------------------------------------------------------------


def _inside(name: str, prefixes: list[str]) -> bool:
    return any(name == p or name.startswith(p + ".") for p in prefixes)


def count(model_of: Model) -> dict[str, Any]:
    """Every unit's forward FLOPs x 3, parameter bytes and bytes saved for backward, of one sample."""
    with torch.device("meta"):
        model = model_of.build().train()
    units = model_of.units(model)
    saved = {name: 0 for name, _ in units}
    seen: set[int] = {p.untyped_storage()._cdata for p in model.parameters()}
    keep: list[torch.Tensor] = []
    current = ["(outside)"]
    saved["(outside)"] = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            keep.append(tensor)  # alive, so that no other tensor gets the same address
            saved[current[-1]] += storage.nbytes()
        return tensor

    modules = dict(model.named_modules())
    for name, prefixes in units:
        for prefix in prefixes:
            modules[prefix].register_forward_pre_hook(lambda *_, n=name: current.append(n))
            modules[prefix].register_forward_hook(lambda *_: void(current.pop()))
    counter = FlopCounterMode(display=False, depth=None)
    with counter, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = model(**model_of.inputs())
    del output
    flops = {k.split(".", 1)[1]: sum(v.values()) for k, v in counter.get_flop_counts().items() if "." in k}
    rows = []
    for name, prefixes in units:
        params = sum(p.numel() for n, p in model.named_parameters() if _inside(n, prefixes))
        forward = float(sum(flops.get(p, 0) for p in prefixes))
        rows.append(
            {
                "name": name,
                "flops": forward * (1 + BACKWARD_PER_FORWARD),
                "param_bytes": float(params * model_of.param_dtype_bytes),
                "saved_bytes": float(saved[name]),
            }
        )
    total = float(counter.get_total_flops())
    parameters = sum(p.numel() for p in model.parameters())
    covered = sum(r["flops"] for r in rows) / (1 + BACKWARD_PER_FORWARD)
    if (
        abs(covered - total) > 1e-4 * total
        or sum(r["param_bytes"] for r in rows) != parameters * model_of.param_dtype_bytes
    ):
        raise SystemExit(f"{model_of.source}: units cover {covered} of {total} FLOPs, {rows}")
    return {
        "source": model_of.source,
        "sample": model_of.sample,
        "parameters": parameters,
        "forward_macs": total / 2,
        "weighted_modules": sum(isinstance(m, nn.Conv2d | nn.Linear) for m in model.modules()),
        "param_dtype_bytes": model_of.param_dtype_bytes,
        "layers": rows,
    }


def void(_: object) -> None:
    """A forward hook that returns something would replace the output."""


def models() -> dict[str, Model]:
    """The catalogue, and under names with '/' the published reference variants that the counting is checked with."""
    tf, r18, r50 = "transformers 5.24.0", [64, 128, 256, 512], [256, 512, 1024, 2048]
    image = lambda size: lambda: {"pixel_values": _meta(1, 3, size, size)}  # noqa: E731
    resnet50 = Model(
        f"{tf} ResNet-50",
        "3x224x224 image",
        lambda: _resnet([3, 4, 6, 3], r50, "bottleneck", 1000, False),
        image(224),
        _resnet_units,
    )
    return {
        "resnet18-cifar10": Model(
            f"{tf} ResNet-18, 3x3 stem for CIFAR",
            "3x32x32 image",
            lambda: _resnet([2, 2, 2, 2], r18, "basic", 10, True),
            image(32),
            _resnet_units,
        ),
        "resnet50-imagenet": resnet50,
        "mobilenetv2-cifar10": Model(
            f"{tf} MobileNetV2 1.0, stem and second stage without stride for CIFAR",
            "3x32x32 image",
            lambda: _mobilenet(10, True),
            image(32),
            _mobilenet_units,
        ),
        "yolov3-voc": Model(
            "Darknet-53 and YOLOv3 heads of arXiv:1804.02767, 20 classes",
            "3x416x416 image",
            lambda: YoloV3(20),
            lambda: {"image": _meta(1, 3, 416, 416)},
            lambda m: m.units(),
        ),
        "ddpm-cifar10": Model(
            "diffusers 0.42.1 UNet2DModel, configuration of google/ddpm-cifar10-32",
            "3x32x32 image",
            _ddpm,
            lambda: {"sample": _meta(1, 3, 32, 32), "timestep": 1},
            _ddpm_units,
        ),
        "bert-squad": Model(
            f"{tf} BERT-base, question answering head", "384 tokens", _bert, lambda: _masked_tokens(384), _bert_units
        ),
        "llama-3b-squad": Model(
            f"{tf} LLaMA, configuration of OpenLLaMA-3B, question answering head",
            "384 tokens",
            lambda: _llama("3b", LlamaForQuestionAnswering),
            lambda: _masked_tokens(384),
            _llama_units("transformer", "qa_outputs"),
            2,
        ),
        "llama-7b-sst2": Model(
            f"{tf} LLaMA-7B, classification head",
            "128 tokens",
            lambda: _llama("7b", LlamaForSequenceClassification),
            lambda: _masked_tokens(128),
            _llama_units("model", "score"),
            2,
        ),
        "check/resnet18-imagenet": Model(
            f"{tf} ResNet-18",
            "3x224x224 image",
            lambda: _resnet([2, 2, 2, 2], r18, "basic", 1000, False),
            image(224),
            _resnet_units,
        ),
        "check/mobilenetv2-imagenet": Model(
            f"{tf} MobileNetV2 1.0", "3x224x224 image", lambda: _mobilenet(1000, False), image(224), _mobilenet_units
        ),
        "check/yolov3-coco": Model(
            "YOLOv3, 80 classes",
            "3x416x416 image",
            lambda: YoloV3(80),
            lambda: {"image": _meta(1, 3, 416, 416)},
            lambda m: m.units(),
        ),
        "check/openllama-3b": Model(
            f"{tf} OpenLLaMA-3B, language-model head",
            "128 tokens",
            lambda: _llama("3b", LlamaForCausalLM),
            lambda: _masked_tokens(128),
            _llama_units("model", "lm_head"),
            2,
        ),
        "check/llama-7b": Model(
            f"{tf} LLaMA-7B, language-model head",
            "128 tokens",
            lambda: _llama("7b", LlamaForCausalLM),
            lambda: _masked_tokens(128),
            _llama_units("model", "lm_head"),
            2,
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed file, write nothing")
    parser.add_argument("--only", help="one model, printed")
    args = parser.parse_args()
    known = models()
    if args.only:
        print(json.dumps(count(known[args.only]), indent=1))
        return 0
    counted = {name: count(model) for name, model in known.items()}
    for name, entry in counted.items():
        saved = sum(layer["saved_bytes"] for layer in entry["layers"])
        print(
            f"{name:28} {len(entry['layers']):3} units {entry['parameters'] / 1e6:9.2f} M parameters "
            f"{entry['forward_macs'] / 1e9:9.3f} GMACs {saved / 1e6:9.1f} MB saved"
        )
    table = {
        "schema": 1,
        "about": "written by scripts/catalogue.py; flops = 3 x forward FLOPs (2 per multiply-add) of one sample; "
        "saved_bytes = what autograd keeps for the backward pass of one sample in float32",
        "models": {n: e for n, e in counted.items() if "/" not in n},
        "checks": {
            n[6:]: {k: e[k] for k in ("source", "parameters", "forward_macs")} for n, e in counted.items() if "/" in n
        },
    }
    text = json.dumps(table, indent=1) + "\n"
    if args.check:
        same = OUTPUT.read_text() == text
        print("up to date" if same else f"{OUTPUT} differs")
        return 0 if same else 1
    OUTPUT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
