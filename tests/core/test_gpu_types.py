"""GPU types through profiles, plans and the state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from icefrog import events as ev
from icefrog.controller import Controller, PolicyError, verify
from icefrog.gpu_types import GPU_TYPES, measured_as
from icefrog.policies import make_policy
from icefrog.profile import GpuCost, Profile
from icefrog.specfile import parse_cluster
from icefrog.state import ClusterState
from icefrog.testing import builders as b
from icefrog.types import Candidate, GpuId, Plan, Pricing, Snapshot

MIXED = parse_cluster("1x4:a100+1x2:t4")


def typed_profile() -> Profile:
    base = b.profile(gpu_type="a100")
    slow = base.throughput.model_copy(update={"flop_gamma": 0.5})
    return base.model_copy(update={"by_gpu_type": {"t4": GpuCost(throughput=slow, util_pct=(50.0, 0.0, 0.0, 0.0))}})


def typed(num_gpus: int, gpu_type: str, *, shared: bool = False) -> Candidate:
    option = b.candidate(num_gpus, 100.0, shared=shared)
    return Candidate(replace(option.config, gpu_type=gpu_type), option.estimate)


def test_a_profile_on_another_type_keeps_layers_and_memory():
    base = typed_profile()
    other = base.on("t4")
    assert other.gpu_type == "t4"
    assert other.throughput.flop_gamma == 0.5
    assert other.occupancy.util_pct == (50.0, 0.0, 0.0, 0.0)
    assert other.occupancy.mem_bytes == base.occupancy.mem_bytes
    assert other.layers == base.layers
    assert base.on("t4") is other  # so that tables derived from it are found again
    assert other.on("t4") is other


@pytest.mark.parametrize("name", ["any", "a100", "a800-80gb", "h100-80gb", "ours"])
def test_a_profile_on_its_own_type_or_an_unknown_one_is_itself(name):
    base = typed_profile()
    assert base.on(name) is base
    assert base.knows(name) == (name not in ("h100-80gb", "ours"))
    assert b.profile().knows(name)  # of any type


def test_names_stand_for_measured_types():
    assert measured_as("rtx") == "rtx2080ti"
    assert measured_as("h100-80gb") is None
    assert measured_as("ours") == "ours"
    assert all(kind.mem_bytes > 1e9 for kind in GPU_TYPES.values())


def test_a_profile_by_type_survives_its_file():
    base = typed_profile()
    base.on("t4")
    assert Profile.model_validate_json(base.model_dump_json(by_alias=True)) == base


def snapshot_of(*names: str, down: frozenset[int] = frozenset()) -> Snapshot:
    state = ClusterState(MIXED)
    for name in names:
        state.apply(ev.JobSubmitted(time_s=0.0, job=b.job_spec(name, share=True)))
    return replace(state.snapshot(), down=down)


def check(choices: dict[str, Candidate], **plan: object) -> None:
    snapshot = snapshot_of(*choices, down=plan.pop("down", frozenset()))  # type: ignore[arg-type]
    reasons = dict.fromkeys(choices, "because of it")
    options = {job_id: (choice,) for job_id, choice in choices.items()}
    verify(Plan(choices, reasons=reasons, **plan), snapshot, options)  # type: ignore[arg-type]


def test_a_plan_uses_no_more_of_a_type_than_there_is():
    check({"a": typed(2, "t4"), "b": typed(4, "a100")})
    with pytest.raises(PolicyError, match="3 GPUs of type t4, there are 2"):
        check({"a": typed(2, "t4"), "b": typed(1, "t4")})
    with pytest.raises(PolicyError, match="2 GPUs of type t4, there are 0"):
        check({"a": typed(2, "t4")}, down=frozenset({1}))
    with pytest.raises(PolicyError, match="of type k80"):
        check({"a": typed(1, "k80")})


def test_a_pair_is_on_one_type_and_counts_once():
    pair = (("a", "b"),)
    check({"a": typed(1, "t4", shared=True), "b": typed(1, "t4", shared=True), "c": typed(1, "t4")}, pairs=pair)
    with pytest.raises(PolicyError, match="different types"):
        check({"a": typed(1, "t4", shared=True), "b": typed(1, "a100", shared=True)}, pairs=pair)


def test_gpus_named_by_a_policy_are_of_the_type_chosen():
    check({"a": typed(2, "t4")}, gpus={"a": b.gpus(2, node=1)})
    with pytest.raises(PolicyError, match="not of the type chosen"):
        check({"a": typed(2, "t4")}, gpus={"a": b.gpus(2, node=0)})


def test_gpus_in_service_by_type():
    assert dict(snapshot_of().gpus_by_type) == {"a100": 4, "t4": 2}
    assert dict(snapshot_of(down=frozenset({1})).gpus_by_type) == {"a100": 4, "t4": 0}


def test_the_view_says_of_which_type_the_grant_is():
    state = ClusterState(MIXED)
    state.apply(ev.JobSubmitted(time_s=0.0, job=b.job_spec("a")))
    grant = b.grant(2).model_copy(update={"gpu_type": "t4"})
    state.apply(ev.Start(time_s=0.0, job_id="a", attempt=1, gpus=b.gpus(2, node=1), grant=grant))
    config = state.snapshot().jobs[0].config
    assert config is not None
    assert config.gpu_type == "t4"


def test_a_job_lost_with_its_node_is_not_at_fault():
    """Five crashes in a row give a job up; five lost nodes do not."""
    for cause, given_up in (("job", True), ("node", False)):
        state = ClusterState(b.cluster())
        controller = Controller(state, make_policy("fifo"), lambda *_: (b.candidate(2, 100.0),))
        controller.handle([ev.JobSubmitted(time_s=0.0, job=b.job_spec("a"))])
        for attempt in range(1, 6):
            now = {"time_s": float(attempt), "job_id": "a", "attempt": attempt}
            controller.handle([ev.JobStarted(**now)])
            controller.handle([ev.JobCrashed(**now, reason="lost", cause=cause)])
        assert state.jobs["a"].finished == given_up
        assert state.jobs["a"].num_crashes == 5


def test_without_any_node_everybody_waits():
    state = ClusterState(b.cluster())
    controller = Controller(state, make_policy("icefrog"), lambda *_: (b.candidate(2, 100.0),))
    step = controller.handle([ev.NodeDown(time_s=0.0, node=0), ev.JobSubmitted(time_s=0.0, job=b.job_spec("a"))])
    assert not step.commands
    assert state.jobs["a"].reason == "every node is out of service"
    step = controller.handle([ev.NodeUp(time_s=1.0, node=0)])
    assert [command.job_id for command in step.commands] == ["a"]


def test_equal_clusters_are_equal_whatever_was_asked_of_them():
    """Two runs in one process compare theirs; a cluster that held itself would never be done with it."""
    asked, also, fresh = b.cluster(2, 4), b.cluster(2, 4), b.cluster(2, 4)
    assert asked.parts == also.parts
    assert asked == also == fresh


class Naming:
    """A policy that names GPUs and knows nothing of types."""

    name, source, oracle, pricing = "naming", "of this test", False, Pricing()

    def decide(self, snapshot: Snapshot, candidates: object) -> Plan:
        """Two GPUs, one of each type."""
        gpus = {"a": (GpuId(0, 3), GpuId(1, 0))}
        return Plan({"a": b.candidate(2, 100.0)}, reasons={"a": "because of it"}, gpus=gpus)


def test_gpus_of_several_types_are_not_taken_from_a_policy_that_knows_of_none():
    state = ClusterState(MIXED)
    controller = Controller(state, Naming(), lambda *_: (b.candidate(2, 100.0),))
    controller.handle([ev.JobSubmitted(time_s=0.0, job=b.job_spec("a"))])
    assert {MIXED.node_types[gpu.node] for gpu in state.jobs["a"].gpus} == {"a100"}
