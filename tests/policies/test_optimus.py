"""How long a plan of optimus stands."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from stage import Role, view

from icefrog.events import PlanDecided
from icefrog.policies import make_policy
from icefrog.simulate import icefrog_scenario, simulate
from icefrog.testing.builders import candidate, cluster
from icefrog.types import Candidate, Snapshot

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))
from worlds import workload


def curve(left_s: float) -> tuple[Candidate, ...]:
    """Of a job that needs so long on one GPU: two are faster, three are not faster than two."""
    options = [candidate(count, left_s * share) for count, share in ((1, 1.0), (2, 0.6), (3, 0.7))]
    return tuple(replace(c, estimate=replace(c.estimate, remaining_s=c.estimate.tta_s)) for c in options)


@pytest.mark.parametrize(("num_jobs", "counts", "stands"), [
    (1, [2], True), (2, [2, 2], True), (3, [2, 1, 1], False), (4, [1, 1, 1, 1], False), (5, [1, 1, 1, 1], False),
])  # fmt: skip
def test_it_stands_while_more_gpus_would_help_nobody(num_jobs: int, counts: list[int], stands: bool) -> None:
    """Four GPUs. What the jobs have left decides who gets more, but not whether anybody wants more."""
    jobs = tuple(view(Role(f"j{number}", 100.0)) for number in range(num_jobs))
    snapshot = Snapshot(0.0, cluster(1, 4), jobs)
    plan = make_policy("optimus").decide(snapshot, {job.job_id: curve(1000.0) for job in jobs})
    assert [choice.config.num_gpus for choice in plan.choices.values()] == counts
    assert plan.stands_until_s == math.inf
    assert plan.until_report == (not stands)  # how much is left is what a report tells


def test_a_job_of_thirty_years_is_not_looked_at_in_every_round() -> None:
    work = workload(1)
    specs = tuple(spec.model_copy(update={"duration_s": 1e9}) for spec in work.specs)
    scenario = icefrog_scenario(specs, work.profiles, work.curves, cluster(3, 4))
    result = simulate(scenario, "optimus")
    assert not result.stalled
    assert result.state.now_s > 1e8
    assert sum(isinstance(record, PlanDecided) for record in result.records) < 10
