"""Whole jobs under FSDP that save beside training: stopped and resumed, and resumed under other kinds of parallelism."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import models
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from two_ranks import Ranks

from icefrog.runtime import LayerElastic, sharded
from icefrog.runtime.checkpoint import CheckpointStore

BATCH = 16


def job(folder: str | None, kind: str, ops: list[tuple[str, int]], batch: int) -> dict[str, Any]:
    """From the newest checkpoint on: freeze, steps and saves by hand; ``batch`` samples a step on each rank."""
    model = models.mlp(dim=7)  # 7 rows over two ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    elastic = LayerElastic(model, optimizer, rule="none", parallel=kind, checkpoint_dir=folder, env=dict(os.environ))
    elastic.begin(10**6)
    resumed_at = elastic._at.step
    x, y = models.data(256, dim=7)
    for kind_of_op, count in ops:
        if kind_of_op == "freeze":
            elastic.freeze(count)
        elif kind_of_op == "save":
            elastic._saver.save(elastic._at)
        else:
            for _ in range(count):
                at = elastic._at.step * BATCH % len(x) + elastic.rank * batch
                nn.functional.cross_entropy(elastic.model(x[at : at + batch]), y[at : at + batch]).backward()
                optimizer.step()
                optimizer.zero_grad()
    elastic._keeper.wait()
    state = elastic.state_dict()
    found = {
        "resumed_at": resumed_at,
        "slices": sum(isinstance(param, DTensor) for param in model.parameters()),
        "params": {name: value.tolist() for name, value in state["model"].items()},
        "moments": {name: entry["exp_avg"].tolist() for name, entry in state["optimizer"]["state"].items()},
        **{key: state[key] for key in ("frozen_layers", "psi")},
        "effective_samples": elastic.effective_samples,
        "variance": elastic._engine.tracker.variance.tolist(),
    }
    elastic.close()
    return found


FIRST: list[tuple[str, int]] = [("steps", 5), ("freeze", 2), ("steps", 4), ("save", 0)]
LATER: list[tuple[str, int]] = [("steps", 2), ("save", 0), ("steps", 1), ("freeze", 1), ("steps", 3)]


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """But for rounding."""
    pairs = [(a[what][name], b[what][name]) for what in ("params", "moments") for name in a[what]]
    return all(torch.allclose(torch.tensor(mine), torch.tensor(theirs), atol=2e-5) for mine, theirs in pairs)


def test_saved_under_fsdp_and_resumed_under_fsdp_ddp_and_one_process(ranks: Ranks, tmp_path: Path) -> None:
    whole, _ = ranks.run(job, None, "fsdp", [*FIRST, *LATER], BATCH // 2)
    folder = str(tmp_path)
    saved, _ = ranks.run(job, folder, "fsdp", FIRST, BATCH // 2)
    (path,) = CheckpointStore(tmp_path).paths()
    assert path.suffix == ".dcp"
    assert {name: value.tolist() for name, value in sharded.load(path)["model"].items()} == saved["params"]
    again, other = ranks.run(job, folder, "fsdp", LATER, BATCH // 2)
    assert again["resumed_at"] == 9
    assert again["slices"] == other["slices"] == 8
    assert {**again, "resumed_at": 0} == whole  # to the bit, statistics included
    assert CheckpointStore(tmp_path).paths()[0].name == "00000002.dcp"
    for kind, run in (
        ("ddp", lambda: ranks.run(job, folder, "ddp", [("save", 0), *LATER[2:]], BATCH // 2)[0]),
        ("one process", lambda: job(folder, "auto", [("save", 0), *LATER[2:]], BATCH)),
        ("fsdp", lambda: ranks.run(job, folder, "fsdp", [("save", 0), *LATER[2:]], BATCH // 2)[0]),
    ):
        found = run()
        assert found["resumed_at"] == 11, kind
        assert found["frozen_layers"] == 1, kind
        assert same(found, whole), kind
    assert [path.suffix for path in CheckpointStore(tmp_path).paths()] == [".dcp", ".pt"]
