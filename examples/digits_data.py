"""What the digits examples share: the data (scikit-learn's 1,797 images, 8x8, one fixed split) and the training loop."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from icefrog.runtime import LayerElastic
from icefrog.spec import Target


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


def arguments(about: str | None, lr: float, width: int, target: float) -> argparse.Namespace:
    """The few options of an example, and one thread, one seed."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=40, help="largest number of epochs: P0 is this many")
    parser.add_argument("--batch", type=int, default=64, help="global batch, where no scheduler grants one")
    parser.add_argument("--target", type=float, default=target, help="accuracy, where no scheduler sets one")
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--width", type=int, default=width)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-freeze", action="store_true", help="train all layers all the time")
    parser.add_argument("--checkpoint", default=None, help="folder; default: the scheduler's, or none")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    return args


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train: TensorDataset,
    val: TensorDataset,
    args: argparse.Namespace,
    augment: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    *,
    cache_prefix: bool = False,
) -> None:
    """A plain training loop, made layer-elastic. ``cache_prefix``: only where nothing is augmented."""
    elastic = LayerElastic(
        model,
        optimizer,
        rule="none" if args.no_freeze else None,
        checkpoint_dir=args.checkpoint,
    )
    elastic.target = elastic.target or Target(value=args.target)
    if cache_prefix:
        elastic.cache_prefix()
    model = elastic.model
    batch = elastic.global_batch or args.batch
    loader = DataLoader(train, batch_sampler=elastic.sampler(len(train), global_batch=batch, seed=args.seed))
    begin, cpu_begin = time.perf_counter(), time.process_time()
    for epoch in elastic.epochs(args.epochs):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(augment(x)), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        decision = elastic.end_epoch(metric=accuracy(model, val))
        if elastic.rank == 0:
            print(
                f"epoch {epoch:3d}  {time.perf_counter() - begin:6.1f} s ({time.process_time() - cpu_begin:6.1f} s CPU)  "
                f"accuracy {decision.metric:.4f}  frozen {decision.frozen_layers}/{len(elastic.layers)}  "
                f"psi {decision.psi:.3f}  E {decision.effective_progress:.0f}/s  {decision.reason}",
                flush=True,
            )
    if elastic.rank == 0:
        print(f"{elastic.outcome} after {time.perf_counter() - begin:.1f} s", flush=True)
    elastic.close()
