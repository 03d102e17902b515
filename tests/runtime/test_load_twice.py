"""A state in memory may be loaded more than once: training from it must not change it."""

from __future__ import annotations

import copy

import models
import torch

from icefrog.runtime import LayerElastic


def test_training_on_leaves_the_loaded_state_alone() -> None:
    model = models.bn_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    elastic = LayerElastic(model, optimizer, rule="none", env={})
    models.train(elastic, optimizer, 2)
    state = copy.deepcopy(elastic.state_dict())
    kept = copy.deepcopy(state)
    elastic.load_state_dict(state)
    models.train(elastic, optimizer, 2)
    elastic.close()
    for name, entry in kept["optimizer"]["state"].items():
        assert all(torch.equal(value, state["optimizer"]["state"][name][key]) for key, value in entry.items())
    assert all(torch.equal(value, state["model"][name]) for name, value in kept["model"].items())
