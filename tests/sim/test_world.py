"""The truth apart from the estimates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import workload

from icefrog.candidate_cache import CandidateCache
from icefrog.candidates import LAYER_ELASTIC, candidates
from icefrog.estimate.throughput import step_s, throughput
from icefrog.executors.sim.world import World, WorldConfig, calibrated, sharing_speed
from icefrog.profile import Link, Parallel, Pipelined, Profile, Sharded, SyncCurve, altered
from icefrog.testing.builders import cluster, job_spec
from icefrog.testing.policies import CONTRACT, Case, cases
from icefrog.types import Pricing
from icefrog.workloads import job_profile, load_catalogue

WORK = workload(30)


def world(**changes: float) -> World:
    return World(WORK.specs, WORK.profiles, WORK.curves, cluster(3, 4), WorldConfig(**changes))  # type: ignore[arg-type]


def full_speed(profile: Profile, gpus: int, nodes: int, batch: int) -> float:
    """Samples/s with the fewest micro-steps."""
    micro = -(-batch // gpus // profile.max_local_batch)
    return batch / float(step_s(profile, gpus, nodes, batch // gpus // micro, 0, micro))


def test_a_job_run_as_logged_takes_the_logged_time() -> None:
    for spec in WORK.specs:
        truth = calibrated(spec, WORK.profiles[spec.job_id], cluster(3, 4))
        gpus = spec.requested_gpus
        speed = full_speed(truth, gpus, -(-gpus // 4), spec.batch.initial)
        assert spec.max_epochs * truth.samples_per_epoch / speed == pytest.approx(spec.duration_s, rel=1e-9)


def test_without_noise_estimates_are_the_truth() -> None:
    for job in world(noise=0.0, occupancy_noise=0.0).jobs.values():
        assert job.estimate == job.profile


def test_estimates_err_by_as_much_as_was_asked_for() -> None:
    errors = []
    for job in world(noise=0.2).jobs.values():
        truth, guess = job.profile.throughput, job.estimate.throughput
        errors += [
            np.log(guess.fwd.beta_s / truth.fwd.beta_s),
            np.log(guess.sync.inter_beta_s / truth.sync.inter_beta_s),
        ]
    assert 0.15 < np.std(errors) < 0.25
    assert abs(np.mean(errors)) < 0.1


@pytest.mark.parametrize(
    "kind",
    [
        Sharded(gather=SyncCurve(intra_alpha_s=0.02, inter_alpha_s=0.1), gather_alpha_s=0.001, gather_gamma=2.0),
        Pipelined(num_stages=2, link=Link(intra_alpha_s=0.01, inter_alpha_s=0.2)),
    ],
    ids=lambda kind: kind.kind,
)
def test_other_kinds_of_parallelism_take_the_logged_time_and_are_estimated_with_errors(kind: Parallel) -> None:
    profiles = {spec.job_id: altered(WORK.profiles[spec.job_id], parallel=kind) for spec in WORK.specs}
    where = World(WORK.specs, profiles, WORK.curves, cluster(3, 4), WorldConfig(noise=0.2))
    for spec in WORK.specs[:8]:
        job = where.jobs[spec.job_id]
        gpus = spec.requested_gpus
        speed = full_speed(job.profile, gpus, -(-gpus // 4), spec.batch.initial)
        assert spec.max_epochs * job.profile.samples_per_epoch / speed == pytest.approx(spec.duration_s, rel=1e-9)
        assert job.estimate.parallel.kind == kind.kind
        assert job.estimate.parallel != job.profile.parallel


def test_a_job_s_luck_does_not_depend_on_the_others() -> None:
    few = World(WORK.specs[5:7], WORK.profiles, WORK.curves, cluster(3, 4), WorldConfig())
    assert few.estimates["job005"] == world().estimates["job005"]
    assert (
        World(WORK.specs, WORK.profiles, WORK.curves, cluster(3, 4), WorldConfig(seed=1)).estimates != world().estimates
    )


@given(own=st.floats(0, 100), other=st.floats(0, 100), more=st.floats(0, 50))
def test_sharing_costs_more_the_busier_the_partner(own: float, other: float, more: float) -> None:
    speed = sharing_speed(own, other)
    assert 0.4 < speed <= 1.0
    assert sharing_speed(own, min(other + more, 100.0)) <= speed


def test_light_pairs_lose_a_few_percent_and_full_ones_half() -> None:
    assert sharing_speed(40, 40) == pytest.approx(0.96)
    assert sharing_speed(100, 100) == pytest.approx(0.45)


@given(case=cases())
@CONTRACT
def test_cached_candidates_are_the_candidates(case: Case) -> None:
    """At first sight, later, and after the job has moved on."""
    cache = CandidateCache({job.job_id for job in case.snapshot.jobs})
    for job in case.snapshot.jobs:
        for pricing in (LAYER_ELASTIC, Pricing()):
            for now_s in (case.snapshot.now_s, case.snapshot.now_s + 777.7):
                fresh = candidates(job, case.snapshot.cluster, now_s, pricing)
                assert cache(job, case.snapshot.cluster, now_s, pricing) == fresh


@pytest.mark.parametrize("name", sorted(load_catalogue()))
def test_a_catalogue_job_on_two_nodes_takes_the_logged_time_too(name: str) -> None:
    """Every term of the throughput model must be scaled with the rest, the one for exactly two nodes included."""
    catalogue = load_catalogue()
    batch = 8 * catalogue[name].profile.min_local_batch
    spec = job_spec(
        "a",
        command=None,
        workload=name,
        gpus=(8,),
        num_gpus=8,
        batch={"global": batch},
        max_epochs=10,
        duration_s=3600.0,
    )
    where = cluster(2, 4)
    truth = calibrated(spec, job_profile(spec, catalogue, 4), where)
    samples = spec.max_epochs * truth.samples_per_epoch
    assert samples / float(throughput(truth, 8, 2, batch / 8)) == pytest.approx(3600.0, rel=1e-3)
