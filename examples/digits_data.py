"""scikit-learn's digits (1,797 images, 8x8), split into training and validation parts; the same split everywhere."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import TensorDataset


def digits(seed: int = 0) -> tuple[TensorDataset, TensorDataset]:
    """1,437 training and 360 validation images, float in 0..1, shape (1, 8, 8); stratified by class."""
    images, labels = load_digits(return_X_y=True)
    train_x, val_x, train_y, val_y = train_test_split(
        images / 16.0, labels, test_size=360, random_state=seed, stratify=labels
    )

    def dataset(x, y):
        return TensorDataset(torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(y))

    return dataset(train_x, train_y), dataset(val_x, val_y)


def shifted(x: torch.Tensor) -> torch.Tensor:
    """Augmentation: each image moved by up to one pixel in each direction."""
    padded = torch.nn.functional.pad(x, (1, 1, 1, 1))
    rows = torch.randint(0, 3, (len(x), 1, 1)) + torch.arange(8).view(1, 8, 1)
    columns = torch.randint(0, 3, (len(x), 1, 1)) + torch.arange(8).view(1, 1, 8)
    index = torch.arange(len(x)).view(-1, 1, 1)
    return padded[index, 0, rows, columns].unsqueeze(1)


@torch.no_grad()
def accuracy(model: torch.nn.Module, data: TensorDataset) -> float:
    """Share of right answers."""
    model.eval()
    x, y = data.tensors
    right = (model(x).argmax(1) == y).float().mean().item()
    model.train()
    return right
