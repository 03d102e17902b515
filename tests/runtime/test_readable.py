"""What is in a checkpoint can be read back: said before the first step, not at the resume days later."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch

from icefrog.errors import UserError
from icefrog.runtime import LayerElastic
from icefrog.runtime.readable import read, refuse_unreadable


class Kept:
    """Whatever a user's object calls its state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["held"]


def start(folder: Path | None, **registered: Any) -> tuple[LayerElastic, torch.optim.Optimizer]:
    model = models.mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=np.float64(0.01))
    elastic = LayerElastic(model, optimizer, rule="none", env={}, checkpoint_dir=folder)
    for name, item in registered.items():
        elastic.register(name, item)
    return elastic, optimizer


def test_learning_rates_and_states_made_with_numpy_survive(tmp_path: Path) -> None:
    ends = []
    for stops in ([2], [1, 2]):
        for last in stops:
            elastic, optimizer = start(tmp_path / str(len(stops)))
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.cos(0.3 * step))
            elastic.register("schedule", schedule)
            held = Kept({"best": np.float32(0.5), "curve": np.arange(3), "flags": [np.bool_(True)], "n": np.int64(2)})
            elastic.register("held", held)
            for epoch in elastic.epochs(2):
                models.train(elastic, optimizer, 3)
                schedule.step()
                held.state["curve"] = held.state["curve"] + 1
                elastic.end_epoch()
                if epoch + 1 == last:
                    break
            elastic.close()
        ends.append((models.bytes_of(elastic.model), optimizer.param_groups[0]["lr"], held.state["curve"].tolist()))
    assert ends[0] == ends[1]
    assert ends[0][2] == [2, 3, 4]


@pytest.mark.parametrize(
    "value", [deque([1]), defaultdict(int), Path("x"), object(), np.array([None]), {1: [{Path()}]}]
)
def test_what_could_not_be_read_back_is_refused_before_the_first_step(tmp_path: Path, value: Any) -> None:
    elastic, _ = start(tmp_path, curve=Kept(value))
    with pytest.raises(UserError, match=r"the state of 'curve'\['held'\].* cannot be read back") as caught:
        elastic.begin(3)
    assert "state_dict()" in caught.value.hint
    elastic.close()
    elastic, _ = start(None, curve=Kept(value))
    elastic.begin(3)  # nothing is saved
    elastic.close()


def test_what_is_accepted_is_read_back(tmp_path: Path) -> None:
    value = {
        "plain": [None, True, 1, 2.5, 1j, "x", b"y", (1, 2), {3}],
        "torch": [torch.ones(2), torch.float16, torch.device("cpu"), torch.Size([2])],
        "numpy": [np.dtype(kind).type(1) for kind in "?bhilqBHILQefdFD"] + [np.ones(2, kind) for kind in "?ilfdD"],
        "ordered": OrderedDict(a=1),
    }
    refuse_unreadable(value, "it")
    torch.save(value, tmp_path / "it.pt")
    assert repr(read(tmp_path / "it.pt", "cpu")) == repr(value)
    torch.save({"it": Path("x")}, tmp_path / "it.pt")
    with pytest.raises(UserError, match="Unsupported"):
        read(tmp_path / "it.pt", "cpu")


def test_what_starts_anew_beside_a_resumed_job_is_told(tmp_path: Path) -> None:
    elastic, optimizer = start(tmp_path, schedule=Kept(1))
    for _ in elastic.epochs(3):
        models.train(elastic, optimizer, 1)
        elastic.end_epoch()
        break
    elastic.close()
    elastic, _ = start(tmp_path, average=Kept(1))
    with pytest.warns(UserWarning, match="'schedule' is in the checkpoint and not registered; 'average' is registered"):
        elastic.begin(3)
    elastic.close()
