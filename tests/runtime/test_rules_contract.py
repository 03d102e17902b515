"""Every freezing rule passes the published contract."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from icefrog.runtime.layers import Layer
from icefrog.runtime.rules import (
    AutoFreeze,
    Egeria,
    Fixed,
    FreezeOut,
    FreezingRule,
    Guards,
    Hands,
    Linear,
    NoFreezing,
    PipeTransformer,
    Situation,
    Tuner,
)
from icefrog.testing.rules import RuleContract

RULES = {
    "none": NoFreezing,
    "fixed": lambda: Fixed(3),
    "fixed-late": lambda: Fixed(1, start_share=0.5),
    "linear": Linear,
    "linear-soon": lambda: Linear(0.0, 0.3),
    "tuner": Tuner,
    "tuner-unguarded": lambda: Tuner(Guards(0, 0, 0, 0)),
    "tuner-stall": lambda: Tuner(Guards(stall_patience=1)),
    "freezeout-tuned": FreezeOut,
    "freezeout": lambda: FreezeOut(0.2),
    "freezeout-cubed": lambda: FreezeOut(0.4, "cubed"),
    "pipetransformer": PipeTransformer,
}


@pytest.mark.parametrize("make", RULES.values(), ids=RULES)
class TestContract(RuleContract):
    pass


@pytest.mark.parametrize("make", [AutoFreeze, lambda: AutoFreeze(90.0)], ids=["median", "90"])
class TestAutoFreeze(RuleContract):
    def observe(self, rule: FreezingRule, now: Situation) -> None:
        """Three steps of gradients drawn from the situation's step; some overflow, some are not there."""
        rng = np.random.default_rng(now.step)
        layers = []
        for index in range(now.num_layers):
            param = nn.Parameter(torch.zeros(2))
            layers.append(Layer(str(index), [], {f"{index}.weight": param}))
        for step in range(now.step - 3, now.step):
            for layer in layers[now.frozen_layers :]:
                for param in layer.params.values():
                    scale = [1.0, 1.0, 0.0, float("inf")][rng.choice(4, p=[0.5, 0.3, 0.15, 0.05])]
                    param.grad = scale * torch.from_numpy(rng.random(2)).float() if rng.random() < 0.9 else None
            rule.observe(Hands(step, nn.Identity(), layers, now.frozen_layers))


@pytest.mark.parametrize("make", [Egeria, lambda: Egeria(1, 2, 0.9, 0.0)], ids=["default", "eager"])
class TestEgeria(RuleContract):
    def observe(self, rule: FreezingRule, now: Situation) -> None:
        """Evaluations that level off, with one that overflows now and then."""
        rng = np.random.default_rng(now.step)
        assert isinstance(rule, Egeria)
        for _ in range(6):
            values = (1.0 - np.exp(-now.step / 50) + 0.01 * rng.random(now.num_layers)).tolist()
            if rng.random() < 0.05:
                values[0] = float("nan")
            rule.take(now.frozen_layers, now.num_layers, values[now.frozen_layers : -1])
