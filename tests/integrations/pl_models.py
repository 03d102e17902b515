"""A LightningModule as people write them, and a DataModule, for the tests of the Lightning adapter."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def data(samples: int, seed: int) -> TensorDataset:
    x = torch.randn(samples, 12, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, :3] + 0.3 * x[:, 3:6]).argmax(1))


class Points(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(data(128, 1), batch_size=16, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(data(64, 2), batch_size=32)


class Classifier(pl.LightningModule):
    """Calls its backbone and head directly in training, as many do, not ``self(x)``."""

    def __init__(self, schedule: str = "step", optimizer: str = "adamw") -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3)]
        self.backbone = nn.Sequential(*blocks)
        self.head = nn.Linear(12, 3)
        self.schedule, self.optimizer_name = schedule, optimizer
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.head(self.backbone(x)), y)
        self.losses.append(float(loss.detach()))
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.log("val_acc", (logits.argmax(1) == y).float().mean(), sync_dist=True)
        self.log("val_loss", nn.functional.cross_entropy(logits, y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.optimizer_name == "sgd":
            optimizer: Any = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.schedule}}


def fit(
    folder: Path,
    callbacks: list[Any],
    module: Any = None,
    ckpt_path: str | None = None,
    points: Any = None,
    **options: Any,
) -> tuple[pl.Trainer, Classifier]:
    pl.seed_everything(0, verbose=False)
    module = module or Classifier()
    settings = {"max_epochs": 3, "logger": False, "enable_checkpointing": False, "accelerator": "cpu", "devices": 1}
    trainer = pl.Trainer(
        default_root_dir=folder,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        **(settings | options),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*num_workers.*|.*log_every_n_steps.*|.*CUDA initialization.*")
        trainer.fit(module, datamodule=points or Points(), ckpt_path=ckpt_path)
    return trainer, module


class At(pl.Callback):
    """Calls ``action`` behind an optimizer step."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action = step, action

    @property
    def state_key(self) -> str:
        return f"At {self.step}"

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step and trainer.fit_loop._should_accumulate() is False:
            self.action()


def bits(module: nn.Module) -> dict[str, bytes]:
    return {name: tensor.detach().numpy().tobytes() for name, tensor in module.state_dict().items()}
