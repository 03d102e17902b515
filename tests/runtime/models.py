"""Small models and loops that the runtime's tests share."""

from __future__ import annotations

import torch
from torch import nn


def mlp(dim: int = 6, depth: int = 4) -> nn.Sequential:
    """``depth`` layers: hidden Linear + Tanh blocks, then a head of 3 classes."""
    torch.manual_seed(0)
    hidden = [nn.Sequential(nn.Linear(dim, dim), nn.Tanh()) for _ in range(depth - 1)]
    return nn.Sequential(*hidden, nn.Linear(dim, 3))


def bn_net() -> nn.Sequential:
    """Three layers with batch normalisation and dropout, and a head."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(6, 3))


class Tied(nn.Module):
    """A language model whose head shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def data(samples: int = 64, dim: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """A learnable three-class problem."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, dim, generator=generator)
    return x, (x[:, :3] + 0.3 * x[:, 3:6]).argmax(1)


def train(elastic, optimizer, steps: int, batch: int = 16) -> None:  # type: ignore[no-untyped-def]
    """``steps`` plain steps of the user's loop."""
    x, y = data()
    for step in range(steps):
        at = step * batch % len(x)
        loss = nn.functional.cross_entropy(elastic.model(x[at : at + batch]), y[at : at + batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def bytes_of(layer_or_model) -> dict[str, bytes]:  # type: ignore[no-untyped-def]
    """Every parameter and buffer of a model or of an icefrog Layer, as bytes."""
    if isinstance(layer_or_model, nn.Module):
        tensors = dict(layer_or_model.state_dict())
    else:
        tensors = dict(layer_or_model.params)
        for index, module in enumerate(layer_or_model.submodules()):
            tensors |= {f"{index}.{key}": value for key, value in module.named_buffers(recurse=False)}
    return {name: tensor.detach().contiguous().numpy().tobytes() for name, tensor in tensors.items()}
