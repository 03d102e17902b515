"""A program: trains with the prefix cache in a /dev/shm that has too little room, in a mount namespace of its own.

    unshare --map-root-user --mount python full_memory.py

A frozen layer hands on 4 KiB a sample; 512 samples do not fit into 1 MiB. Prints ``off_reason`` of two caches: one that
fills the memory by itself, and one whose room is taken while it completes batches that it has seen in part.
"""

from __future__ import annotations

import subprocess
import warnings
from pathlib import Path

import torch
from torch import nn

from icefrog.runtime import LayerElastic

SHARED = Path("/dev/shm")


def steps(elastic: LayerElastic, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor]) -> None:
    """One on each batch."""
    for x in batches:
        elastic.model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def off_reason(*, taken_later: bool) -> str:
    """Of a cache after training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 1024), nn.Linear(1024, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    elastic = LayerElastic(model, optimizer, rule="none", env={})
    cache = elastic.cache_prefix("memory", budget_bytes=64e6)
    elastic.begin(1)
    elastic.freeze(1)
    x = torch.randn(512, 4)
    if taken_later:
        steps(elastic, optimizer, [x[:64], x[64:128]])
        assert not cache.off_reason, cache.off_reason
        with (SHARED / "ballast").open("wb") as ballast:
            ballast.write(b"x" * 400_000)
        steps(elastic, optimizer, [torch.cat([x[:2], x[128:190]])])
        (SHARED / "ballast").unlink()
    else:
        steps(elastic, optimizer, list(x.split(64)))
    steps(elastic, optimizer, [x[:64]])
    assert not [path for path in SHARED.rglob("*") if path.is_file()], "room is kept that others need"
    elastic.close()
    assert not any(SHARED.iterdir())
    return cache.off_reason


if __name__ == "__main__":
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(SHARED)], check=True)
    warnings.simplefilter("ignore")
    for later in (False, True):
        print(off_reason(taken_later=later))
