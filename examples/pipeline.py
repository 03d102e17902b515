"""A network in pipeline stages that freezes while it trains. Small enough for two processes on a laptop's CPU:

torchrun --nproc-per-node 2 examples/pipeline.py
torchrun --nproc-per-node 4 examples/pipeline.py --stages 2      # hybrid: two replicas of two stages
python examples/pipeline.py                                      # one process: the same program, one stage
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from icefrog.runtime import LayerElastic, Pipeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=None, help="default: every process is a stage")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--freeze", type=int, default=None, help="layers to freeze by hand after the first epoch")
    args = parser.parse_args()

    torch.manual_seed(0)
    x = torch.randn(4096, 16)
    y = (x[:, :8].sum(1) > 0).long() + (x[:, 8:].sum(1) > 0).long()
    train, (val_x, val_y) = TensorDataset(x[:3584], y[:3584]), (x[3584:], y[3584:])

    # A chain of layers, each called on the output of the one before, whole on every process.
    blocks = [nn.Sequential(nn.Linear(16 if i == 0 else 32, 32), nn.Tanh()) for i in range(6)]
    model = nn.Sequential(*blocks, nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    pipeline = Pipeline(nn.functional.cross_entropy, num_stages=args.stages, micro_batches=4)
    rule = "tuner" if args.freeze is None else "none"
    elastic = LayerElastic(model, optimizer, parallel=pipeline, rule=rule, global_batch=64)
    model = elastic.model  # from here on this process holds its own stage
    loader = DataLoader(train, batch_sampler=elastic.sampler(len(train)))

    for epoch in elastic.epochs(args.epochs):
        for batch, labels in loader:
            loss = elastic.train_step(batch, labels)  # in place of forward and backward
            optimizer.step()
            optimizer.zero_grad()
        if args.freeze is not None:
            elastic.freeze(args.freeze)
        model.eval()
        with torch.no_grad():
            accuracy = float((model(val_x).argmax(1) == val_y).double().mean())  # every process calls it
        model.train()
        decision = elastic.end_epoch(metric=accuracy)
        if elastic.rank == 0:
            frozen = f"{decision.frozen_layers}/{len(elastic.layers)}"
            print(f"epoch {epoch}: loss {float(loss):.3f}, accuracy {accuracy:.3f}, {frozen} layers frozen")
    elastic.close()


if __name__ == "__main__":
    main()
