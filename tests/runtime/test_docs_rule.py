"""The rule in docs/elastic-training.md is run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import models
import pytest
import torch

from icefrog.runtime.rules import RULES
from icefrog.testing.rules import RuleContract

PAGE = (Path(__file__).parents[2] / "docs" / "elastic-training.md").read_text()


def example() -> dict[str, Any]:
    """The names that the example defines."""
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "class OnPlateau" in block]
    model = models.mlp()
    names: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.05)}
    exec(compile(code, "docs/elastic-training.md", "exec"), names)
    return names


def test_the_example_freezes_on_a_plateau() -> None:
    names = example()
    elastic, depths = names["elastic"], []
    for epoch in elastic.epochs(20):
        models.train(elastic, names["optimizer"], 4)
        depths.append(elastic.end_epoch(metric=[0.1, 0.2, 0.2, 0.2, 0.3, 0.4][epoch]).frozen_layers)
        if epoch == 5:
            break
    assert depths == [0, 0, 1, 2, 2, 2]


@pytest.mark.parametrize("make", [example()["OnPlateau"]], ids=["example"])
class TestExample(RuleContract):
    pass


def test_the_page_names_every_rule() -> None:
    for name in RULES:
        assert f"`{name}`" in PAGE
