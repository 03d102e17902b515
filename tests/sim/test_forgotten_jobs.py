"""What a simulation remembers of its jobs does not grow with the trace."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
from worlds import workload

from icefrog.candidate_cache import CandidateCache
from icefrog.lazymap import WhileActive
from icefrog.simulate import icefrog_scenario, simulate
from icefrog.testing.builders import cluster

SPARE = 16


def test_the_options_of_finished_jobs_are_forgotten() -> None:
    work = workload(60, span_s=1e6)
    caches: list[CandidateCache] = []

    def watched(active: Collection[str]) -> CandidateCache:
        caches.append(CandidateCache(active))
        return caches[-1]

    scenario = icefrog_scenario(work.specs, work.profiles, work.curves, cluster(3, 4))
    result = simulate(replace(scenario, candidates=watched), "optimus")
    assert not result.stalled
    assert 0 < len(caches[0]._known) < 40  # the last ones; far fewer than 60 are there at a time


@pytest.mark.parametrize("num_active", [0, 3, 100])
def test_who_is_active_is_remembered(num_active: int) -> None:
    active = {f"active-{number}" for number in range(num_active)}
    kept = WhileActive[int](active)
    for number, job_id in enumerate(sorted(active)):
        kept.put(job_id, number)
    for number in range(1000):
        kept.put(f"gone-{number}", number)
    assert [kept.get(job_id) for job_id in sorted(active)] == list(range(num_active))
    assert len(kept) <= 2 * num_active + SPARE
    assert kept.get("gone-0") is None
