"""The ablation ``throughput=ddp-only``: what a sharded job looks like to somebody who knows replicas only."""

from __future__ import annotations

from dataclasses import replace

import pytest

from icefrog import events as ev
from icefrog.candidates import candidates
from icefrog.estimate.ddp_only import ddp_only
from icefrog.estimate.throughput import step_s
from icefrog.policies import make_policy
from icefrog.profile import Pipelined, Profile, Replicated, Sharded
from icefrog.spec import JobSpec
from icefrog.state import ClusterState
from icefrog.testing.builders import cluster, job_spec, profile
from icefrog.types import Candidate, Pricing
from icefrog.workloads import load_catalogue
from icefrog.workloads.modelled import as_sharded

PLACES = [(2, 1), (4, 1), (8, 2), (16, 4)]


def llama() -> Profile:
    return as_sharded(load_catalogue()["llama-7b-sst2"].profile)


def test_a_sharded_task_moves_its_traffic_and_keeps_the_volume() -> None:
    whole = load_catalogue()["llama-7b-sst2"].profile
    sharded = llama()
    assert isinstance(sharded.parallel, Sharded)
    parts = (sharded.throughput.sync, sharded.parallel.gather, sharded.parallel.gather)
    for name, seconds in whole.throughput.sync:
        assert sum(getattr(part, name) for part in parts) == pytest.approx(seconds)
    one = [float(step_s(p, 1, 1, p.max_local_batch)) for p in (whole, sharded)]
    assert one[0] == one[1]  # alone, nothing is sent
    # A part of the traffic hides behind the forward pass, which replicas' cannot.
    assert float(step_s(sharded, 4, 1, sharded.max_local_batch)) < float(step_s(whole, 4, 1, whole.max_local_batch))


@pytest.mark.parametrize(("num_gpus", "num_nodes"), PLACES)
def test_whole_steps_are_matched_and_frozen_ones_promise_too_much(num_gpus: int, num_nodes: int) -> None:
    sharded = llama()
    believed = ddp_only(sharded)
    assert isinstance(believed.parallel, Replicated)
    m, half = sharded.max_local_batch, sharded.num_layers // 2
    truth = [float(step_s(sharded, num_gpus, num_nodes, m, depth)) for depth in (0, half)]
    told = [float(step_s(believed, num_gpus, num_nodes, m, depth)) for depth in (0, half)]
    assert told[0] == pytest.approx(truth[0], rel=1e-9)
    assert told[1] < truth[1]  # as if what is gathered for the forward pass fell away, too


def test_other_jobs_stay_as_they_are_and_the_work_is_done_once() -> None:
    sharded = llama()
    assert ddp_only(sharded) is ddp_only(sharded)
    for other in (profile(4), profile(4, parallel=Pipelined(num_stages=2))):
        assert ddp_only(other) is other


def options(spec: JobSpec, cost: Profile, pricing: Pricing) -> list[Candidate]:
    state = ClusterState(cluster(4, 4), {spec.job_id: cost})
    state.apply(ev.JobSubmitted(time_s=0.0, job=spec))
    (view,) = state.snapshot().jobs
    return list(candidates(view, cluster(4, 4), 0.0, pricing))


def test_icefrog_prices_by_it_when_asked_to() -> None:
    aware, blind = make_policy("icefrog").pricing, make_policy("icefrog", {"throughput": "ddp-only"}).pricing
    assert (aware.throughput, blind.throughput) == ("layer-aware", "ddp-only")
    spec = job_spec("big", gpus=(4, 8, 16), batch={"global": 256}, share=False)
    sharded, plain = llama(), profile(4)
    assert options(spec, plain, aware) == options(spec, plain, blind)
    whole = replace(aware, freezing="none")
    steps = [[c.estimate.step_s for c in options(spec, cost, whole)] for cost in (sharded, ddp_only(sharded))]
    assert [c.estimate.step_s for c in options(spec, sharded, replace(blind, freezing="none"))] == steps[1] != steps[0]
