"""The three lines that make a training loop layer-elastic (marked <-). Everything else is plain PyTorch."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from icefrog.runtime import LayerElastic

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
loader = DataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=50, shuffle=True)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

elastic = LayerElastic(model, optimizer)  # <-
model = elastic.model
for epoch in elastic.epochs(10):  # <-
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        accuracy = (model(x[1400:]).argmax(1) == y[1400:]).float().mean().item()
    decision = elastic.end_epoch(metric=accuracy)  # <-
    print(f"epoch {epoch}: accuracy {accuracy:.3f}, {decision.frozen_layers} layers frozen: {decision.reason}")
