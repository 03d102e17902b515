"""Simulations on clusters of several GPU types."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from worlds import Workload, workload

from icefrog import events as ev
from icefrog.estimate.throughput import step_s
from icefrog.executors.sim import World, WorldConfig
from icefrog.executors.sim.failures import Outages
from icefrog.policies import policy_names
from icefrog.profile import GpuCost
from icefrog.simulate import RunResult, SimSettings, icefrog_scenario, simulate
from icefrog.spec import ClusterSpec
from icefrog.specfile import parse_cluster
from icefrog.workloads.modelled import with_compute_scaled

EXACT = WorldConfig(noise=0.0, occupancy_noise=0.0, stats_noise=0.0)
SLOWER = 4.0  # compute on a T4, of these tests
MIXED = parse_cluster("2x4:a100+1x4:t4")


def typed(work: Workload, only_large: tuple[str, ...] = ()) -> Workload:
    """The same jobs with an A100's costs and a T4's; those of ``only_large`` need 20 GB."""
    profiles = {}
    for name, base in work.profiles.items():
        slow = with_compute_scaled(base.throughput, SLOWER, SLOWER)
        cost = GpuCost(throughput=slow, util_pct=base.occupancy.util_pct)
        mem = (20e9, 1e7, 1e9, 1e9) if name in only_large else base.occupancy.mem_bytes
        update = {"gpu_type": "a100", "by_gpu_type": {"t4": cost}}
        profiles[name] = base.model_copy(
            update={**update, "occupancy": base.occupancy.model_copy(update={"mem_bytes": mem})}
        )
    return replace(work, profiles=profiles)


def run(
    work: Workload, policy: str, cluster: ClusterSpec = MIXED, options=None, world: WorldConfig = EXACT
) -> RunResult:
    settings = SimSettings(world=world, check=True)
    return simulate(
        icefrog_scenario(work.specs, work.profiles, work.curves, cluster, settings), policy, options, settings
    )


def types_used(result: RunResult, cluster: ClusterSpec = MIXED) -> list[tuple[str, set[str]]]:
    starts = [record for record in result.records if isinstance(record, ev.Start | ev.Resize)]
    return [(start.job_id, {cluster.node_types[gpu.node] for gpu in start.gpus}) for start in starts]


WORK = workload(12, seed=11, span_s=1200.0, max_gpus=4)


@pytest.mark.parametrize("cluster", ["3x4:t4", "3x4:a100", "3x4:a800-80gb", "3x4:h100-80gb", "3x4"])
def test_on_one_type_whichever_it_is_the_log_is_the_truth(cluster: str) -> None:
    result = run(typed(WORK), "fifo", parse_cluster(cluster))
    for job in result.state.jobs.values():
        assert job.finish_s is not None
        assert job.first_start_s is not None
        assert job.finish_s - job.first_start_s == pytest.approx(job.oracle_duration_s, abs=1e-3)


def test_a_job_takes_the_logged_time_on_the_usual_type_and_longer_on_a_slower_one() -> None:
    work = typed(WORK)
    result = run(work, "fifo")
    kinds = dict(types_used(result))
    assert {kind for kinds_of in kinds.values() for kind in kinds_of} == {"a100", "t4"}
    for job_id, job in result.state.jobs.items():
        assert job.finish_s is not None
        assert job.first_start_s is not None
        assert job.oracle_duration_s is not None
        stretch = (job.finish_s - job.first_start_s) / job.oracle_duration_s
        gpus = job.spec.requested_gpus
        profile, batch = work.profiles[job_id], job.spec.batch.initial // gpus
        slow, fast = (float(step_s(profile.on(t), gpus, 1, batch)) for t in ("t4", "a100"))
        assert stretch == pytest.approx(slow / fast if kinds[job_id] == {"t4"} else 1.0, rel=1e-4)


@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_runs_on_a_mixed_cluster_and_no_job_spans_types(policy: str) -> None:
    large = tuple(spec.job_id for spec in WORK.specs[::5])
    result = run(typed(WORK, only_large=large), policy, world=WorldConfig())
    assert result.stalled == ""
    assert {job.phase for job in result.state.jobs.values()} == {"completed"}
    for job_id, kinds in types_used(result):
        assert kinds == {"a100"} if job_id in large else len(kinds) == 1


def test_grants_name_the_type_that_the_policy_asked_for() -> None:
    result = run(typed(WORK), "gavel")
    for record in result.records:
        if isinstance(record, ev.Start | ev.Resize):
            assert {MIXED.node_types[gpu.node] for gpu in record.gpus} == {record.grant.gpu_type}
    unaware = run(typed(WORK), "fifo")
    assert {r.grant.gpu_type for r in unaware.records if isinstance(r, ev.Start)} == {"any"}


@pytest.mark.parametrize("objective", ["las", "makespan", "finish-time-fairness"])
def test_gavel_with_each_objective_finishes(objective: str) -> None:
    result = run(typed(WORK), "gavel", options={"objective": objective})
    assert {job.phase for job in result.state.jobs.values()} == {"completed"}


def test_estimates_of_each_type_have_errors_of_their_own() -> None:
    work = typed(WORK)
    world = World(work.specs, work.profiles, work.curves, MIXED, WorldConfig(noise=0.1))
    job_id = work.specs[0].job_id
    truth, estimate = world.jobs[job_id].profile, world.estimates[job_id]
    errors = [np.log(estimate.on(t).throughput.fwd.beta_s / truth.on(t).throughput.fwd.beta_s) for t in ("a100", "t4")]
    assert all(0.0 < abs(error) < 0.5 for error in errors)
    assert errors[0] != errors[1]
    alike = World(work.specs, WORK.profiles, work.curves, MIXED, WorldConfig(noise=0.1))
    assert alike.estimates[job_id].throughput == estimate.throughput  # those of the usual type are what they were


@pytest.mark.parametrize("policy", ["gavel", "fifo", "tiresias", "icefrog"])
def test_types_and_failing_nodes_together(policy: str) -> None:
    settings = SimSettings(world=EXACT, outages=Outages(node_mtbf_h=2.0, node_repair_h=1.0), check=True)
    work = typed(WORK)
    scenario = icefrog_scenario(work.specs, work.profiles, work.curves, MIXED, settings)
    result = simulate(scenario, policy, None, settings)
    assert result.stalled == ""
    assert {job.phase for job in result.state.jobs.values()} == {"completed"}
    assert any(isinstance(record, ev.JobCrashed) for record in result.records)
    assert all(len(kinds) == 1 for _, kinds in types_used(result))
