"""Learning rates for another global batch than the one they were chosen for (fault S2: a batch that grows unannounced).

AdaScale: Johnson et al., "AdaScale SGD: A User-Friendly Algorithm for Distributed Training", ICML 2020. Pollux uses the
same gain. By default the global batch is constant (accumulation), and no rule is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import torch

from icefrog.errors import UserError
from icefrog.runtime.engine import Engine
from icefrog.runtime.reporting import Counters

LrRule: TypeAlias = Literal["none", "linear", "sqrt", "adascale"]


def check_rule(rule: str) -> LrRule:
    """The rule itself.

    Raises:
        UserError: unknown.
    """
    known: dict[str, LrRule] = {name: name for name in get_args(LrRule)}
    if rule not in known:
        raise UserError(f"unknown lr_rule {rule!r}", f"choose one of {', '.join(known)}")
    return known[rule]


def adascale_gain(batch: int, base_batch: int, variance: float, sqr_norm: float) -> float:
    """r = (S/M0 + |G|^2) / (S/M + |G|^2): steps at M0 that one step at M is worth, between 1 and M/M0.

    Args:
        batch: M, samples.
        base_batch: M0, samples.
        variance: S, per-sample variance of the gradient summed over what trains; the paper's sigma^2 is S / M0.
        sqr_norm: |G|^2 of the same, the paper's mu^2.
    """
    base = variance / base_batch + sqr_norm
    return base / (variance / batch + sqr_norm) if base > 0.0 else 1.0


def lr_factor(rule: LrRule, batch: int, base_batch: int, variance: float, sqr_norm: float) -> float:
    """What the learning rate is multiplied by; arguments as of :func:`adascale_gain`.

    ``linear``: M/M0 (Goyal et al. 2017); ``sqrt``: its square root (usual for Adam); ``adascale``: the gain, 1 while there
    are no statistics.
    """
    if rule == "linear":
        return batch / base_batch
    if rule == "sqrt":
        return math.sqrt(batch / base_batch)
    if rule == "adascale":
        return adascale_gain(batch, base_batch, variance, sqr_norm)
    return 1.0


def step_at(optimizer: torch.optim.Optimizer, factor: float, real_step: Callable[[], Any]) -> Any:
    """One step with every group's learning rate multiplied; afterwards the groups are as schedulers left them."""
    if factor == 1.0:
        return real_step()
    own = [group["lr"] for group in optimizer.param_groups]
    try:
        for group, rate in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = rate * factor
        return real_step()
    finally:
        for group, rate in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = rate


class LrScaling:
    """Owned by :class:`~icefrog.runtime.elastic.LayerElastic`: each step at the rate that its global batch asks for.

    Args:
        rule: see :func:`lr_factor`.
        base_batch: M0 in samples; None: the job's first step.
        engine: knows the global batch and the statistics, and holds the optimizer.

    Raises:
        UserError: an unknown rule.
    """

    def __init__(self, rule: str, base_batch: int | None, engine: Engine) -> None:
        self.rule: LrRule = check_rule(rule)
        self._base_batch = base_batch
        self._engine = engine

    def base_batch(self, at: Counters) -> int:
        """M0 in samples."""
        return self._base_batch or at.base_batch or self._engine.counting.global_batch

    def step(self, real_step: Callable[[], Any], at: Counters) -> Any:
        """What ``real_step`` returns; M0 is kept in ``at``, where a checkpoint finds it."""
        engine, batch = self._engine, self._engine.counting.global_batch
        at.base_batch = self.base_batch(at)
        if self.rule == "none":
            return real_step()
        live = slice(engine.freezer.frozen_layers, None)
        variance, signal = engine.tracker.variance[live].sum(), engine.tracker.sqr_norm[live].sum()
        factor = lr_factor(self.rule, batch, at.base_batch, float(variance), float(signal))
        return step_at(engine.optimizer, factor, real_step)
