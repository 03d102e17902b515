"""A training script as users write it, small enough to be profiled in a test."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from icefrog.runtime import LayerElastic

torch.manual_seed(0)
x, y = torch.randn(256, 16), torch.randint(0, 2, (256,))
data = TensorDataset(x, y)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
elastic = LayerElastic(model, optimizer)
loader = DataLoader(data, batch_sampler=elastic.sampler(len(data), global_batch=64))
for _ in elastic.epochs(3):
    for inputs, labels in loader:
        nn.functional.cross_entropy(elastic.model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    elastic.end_epoch(metric=0.5)
