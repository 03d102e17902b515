"""Decisions once a round lie on the grid of rounds, also where rounds were spared."""

from __future__ import annotations

import pytest
from worlds import workload

from icefrog import events as ev
from icefrog.executors.sim import WorldConfig
from icefrog.simulate import SimSettings, icefrog_scenario, simulate
from icefrog.testing.builders import cluster


@pytest.mark.parametrize("policy", ["fifo", "tiresias"])
@pytest.mark.parametrize("first_round_s", [0.0, 100.0])
def test_decisions_lie_on_the_grid(policy: str, first_round_s: float) -> None:
    """Both policies say how long their plans stand; a job that comes meanwhile waits for the next round of the grid."""
    work = workload(12)
    settings = SimSettings(round_s=300.0, event_driven=False, first_round_s=first_round_s, world=WorldConfig(noise=0.0))
    scenario = icefrog_scenario(work.specs, work.profiles, work.curves, cluster(2, 4), settings)
    result = simulate(scenario, policy, settings=settings)
    decided = [record.time_s for record in result.records if isinstance(record, ev.PlanDecided)]
    assert len(decided) >= 12
    assert min(decided) >= first_round_s
    assert all((time_s - first_round_s) % 300.0 == 0.0 for time_s in decided)
