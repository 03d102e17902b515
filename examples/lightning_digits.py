"""A small CNN on scikit-learn's digits, trained by Lightning; the lines marked <- are those that make it layer-elastic.

Needs ``pip install 'icefrog[lightning,examples]'``; under a minute on a CPU. ``--devices 2`` trains in two processes.
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import torch
from digits_data import digits, shifted
from torch import nn
from torch.utils.data import DataLoader

from icefrog.integrations.lightning import LayerElasticCallback  # <-


class Digits(pl.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.train_data, self.val_data = digits()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_data, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val_data, batch_size=360)


def block(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU())


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(block(1, 16), block(16, 32), nn.MaxPool2d(2), block(32, 32), block(32, 64))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x).mean((2, 3)))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(shifted(x)), y)

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        x, y = batch
        self.log("val_acc", (self(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1)
    devices = parser.parse_args().devices
    pl.seed_everything(0, verbose=False)
    callback = LayerElasticCallback("val_acc", target=0.97)  # <-
    trainer = pl.Trainer(
        max_epochs=30,
        callbacks=[callback],  # <-
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), datamodule=Digits(64 // devices))
    if trainer.is_global_zero:
        for number, decision in enumerate(callback.decisions):
            print(
                f"epoch {number}: accuracy {decision.metric:.3f}, {decision.frozen_layers} layers frozen: {decision.reason}"
            )
