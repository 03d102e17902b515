"""What ends training under a framework that stays in charge: the callback's own target, or the scheduler's."""

from __future__ import annotations

import os

from icefrog.errors import UserError
from icefrog.runtime.agent import Agent
from icefrog.spec import Mode, Target


def find_target(
    metric: str | None, value: float | None, mode: Mode | None, default_metric: str | None
) -> tuple[str | None, Mode | None, Target | None]:
    """Of the metric that is followed: its name, whether more is better, and what it must reach; None where there is none.

    Args:
        metric: the callback's.
        value: the callback's target; with one, the grant's does not count.
        mode: whether more is better; None: by the metric's name.
        default_metric: followed where neither the callback nor the grant names one.

    Raises:
        UserError: there is a target and no metric, or the grant is invalid.
    """
    grant = Agent(os.environ).grant
    granted = grant.target if grant is not None and value is None else None
    name = metric or (granted.metric if granted is not None else None) or default_metric
    if name is None:
        if value is not None:
            raise UserError("a target needs a metric", f"LayerElasticCallback('val_acc', target={value})")
        return None, mode, granted
    mode = mode or ("min" if name.endswith("loss") else "max")
    return name, mode, granted if value is None else Target(metric=name, value=value, mode=mode)
