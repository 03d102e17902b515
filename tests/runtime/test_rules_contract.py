"""Every freezing rule passes the published contract."""

from __future__ import annotations

import pytest

from icefrog.runtime.rules import Fixed, FreezeOut, Guards, Linear, NoFreezing, Tuner
from icefrog.testing.rules import RuleContract


@pytest.mark.parametrize(
    "make",
    [
        NoFreezing,
        lambda: Fixed(3),
        lambda: Fixed(1, start_share=0.5),
        Linear,
        lambda: Linear(0.0, 0.3),
        Tuner,
        lambda: Tuner(Guards(0, 0, 0, 0)),
        lambda: Tuner(Guards(stall_patience=1)),
        FreezeOut,
        lambda: FreezeOut(0.2),
        lambda: FreezeOut(0.4, "cubed"),
    ],
    ids=[
        "none",
        "fixed",
        "fixed-late",
        "linear",
        "linear-soon",
        "tuner",
        "tuner-unguarded",
        "tuner-stall",
        "freezeout-tuned",
        "freezeout",
        "freezeout-cubed",
    ],
)
class TestContract(RuleContract):
    pass
