"""Property: freeze, train, save, die and resume in any order equals the run that never died, to the bit (F11, F12)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import models
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from icefrog.runtime import LayerElastic

Op = tuple[str, int]
BATCH = 8


class Place:
    """How many operations are done; in the checkpoint."""

    def __init__(self) -> None:
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


class Life:
    """One process's worth of a job."""

    def __init__(self, folder: Path | None, stats_every: int | None) -> None:
        self.model = models.bn_net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, weight_decay=0.1)
        self.elastic = LayerElastic(
            self.model, self.optimizer, rule="none", env={}, checkpoint_dir=folder, stats_every=stats_every
        )
        self.place = Place()
        self.elastic.register("place", self.place)
        torch.manual_seed(7)
        self.elastic.begin(10**6)

    def do(self, op: Op) -> None:
        kind, count = op
        self.place.done += 1
        if kind == "freeze":
            self.elastic.freeze(count)
        elif kind == "steps":
            for _ in range(count):
                self.step()
        elif kind == "save":
            self.elastic._saver.save(self.elastic._at)
            self.elastic._keeper.join()

    def step(self) -> None:
        x, y = models.data()
        at = self.elastic._at.step * BATCH % len(x)
        frozen = [models.bytes_of(layer) for layer in self.elastic.layers[: self.elastic.frozen_layers]]
        nn.functional.cross_entropy(self.model(x[at : at + BATCH]), y[at : at + BATCH]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert frozen == [models.bytes_of(layer) for layer in self.elastic.layers[: self.elastic.frozen_layers]]

    def result(self) -> dict[str, Any]:
        state = self.elastic.state_dict()
        return {
            "model": models.bytes_of(self.model),
            "moments": {
                name: {key: value.tolist() for key, value in kept.items()}
                for name, kept in state["optimizer"]["state"].items()
            },
            "gradient": {name: grad.tolist() for name, grad in state["statistics"]["last"].items()},
            "trains": [param.requires_grad for param in self.model.parameters()],
            **{key: state[key] for key in ("frozen_layers", "psi", "tracker")},
            # Without the elastic sampler an interrupted epoch starts anew, and its samples are counted anew.
            "counters": {**state["counters"], "epoch_samples": None},
        }


def never_dies(ops: list[Op], stats_every: int | None) -> dict[str, Any]:
    life = Life(None, stats_every)
    for op in ops:
        life.do(op)
    return life.result()


def dies_and_resumes(ops: list[Op], deaths: set[int], stats_every: int | None) -> dict[str, Any]:
    """Before the operations in ``deaths`` (once each) the process is gone, with all that was not saved."""
    deaths = set(deaths)
    with tempfile.TemporaryDirectory() as folder:
        life = Life(Path(folder), stats_every)
        while life.place.done < len(ops):
            if life.place.done in deaths:
                deaths.remove(life.place.done)
                life = Life(Path(folder), stats_every)
            else:
                life.do(ops[life.place.done])
        return life.result()


OPS = st.lists(
    st.one_of(
        st.tuples(st.just("freeze"), st.integers(0, 3)),
        st.tuples(st.just("steps"), st.integers(1, 4)),
        st.just(("save", 0)),
    ),
    min_size=4,
    max_size=12,
)
EDGE: list[Op] = [
    *[("steps", 2), ("save", 0), ("freeze", 2), ("save", 0)],
    *[("steps", 1), ("save", 0), ("freeze", 1), ("steps", 2)],
]


@settings(max_examples=15, deadline=None, derandomize=True)
@given(OPS, st.sets(st.integers(0, 12), max_size=5), st.sampled_from([None, 1, 2, 3]))
@example(EDGE, {2}, 1)  # before the boundary moves,
@example(EDGE, {4}, 1)  # just after,
@example(EDGE, {6}, 1)  # and one step on
@example([*[("steps", 4), ("save", 0)] * 7, ("steps", 4)], {11, 13}, None)  # where statistics become less frequent
@example([("freeze", 3), ("steps", 2), ("save", 0), ("freeze", 0), ("steps", 3)], {4}, 1)
def test_any_sequence_of_freezing_saving_and_dying_equals_the_run_that_never_died(
    ops: list[Op], deaths: set[int], stats_every: int | None
) -> None:
    assert dies_and_resumes(ops, deaths, stats_every) == never_dies(ops, stats_every)
