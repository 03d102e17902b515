"""Nodes that fail, nodes that are withdrawn: the schedule, what becomes of jobs, and every policy on top of it."""

from __future__ import annotations

from datetime import datetime
from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import workload

from icefrog import events as ev
from icefrog.errors import UserError
from icefrog.executors.sim.capacity import Capacity, planned_changes, read_capacity
from icefrog.executors.sim.failures import NodeChange, Outages, merged, node_failures
from icefrog.policies import policy_names
from icefrog.simulate import RunResult, SimSettings, icefrog_scenario, simulate
from icefrog.specfile import parse_cluster
from icefrog.state import ClusterState
from icefrog.testing.builders import cluster
from icefrog.types import GpuId

# -- the schedule ----------------------------------------------------------------------------------------------------------


def test_failures_are_the_same_again_and_those_of_a_node_do_not_depend_on_others() -> None:
    first = list(islice(node_failures(3, 100.0, 2.0, seed=5), 60))
    assert first == list(islice(node_failures(3, 100.0, 2.0, seed=5), 60))
    more = [change for change in islice(node_failures(9, 100.0, 2.0, seed=5), 400) if change.node < 3]
    assert more[:60] == first[: len(more[:60])]
    assert first != list(islice(node_failures(3, 100.0, 2.0, seed=6), 60))


def test_failures_have_the_stated_mean_and_repair_time() -> None:
    changes = list(islice(node_failures(1, 50.0, 3.0, seed=1), 20_000))
    assert [change.up for change in changes[:4]] == [False, True, False, True]
    repairs = [up.time_s - down.time_s for down, up in zip(changes[::2], changes[1::2], strict=True)]
    assert repairs == pytest.approx([3.0 * 3600] * len(repairs))
    serving = [down.time_s - up.time_s for up, down in pairwise([NodeChange(0.0, 0, True), *changes])][::2]
    mean_h = sum(serving) / len(serving) / 3600
    assert mean_h == pytest.approx(50.0, rel=0.04)  # 10,000 exponential draws: 4 standard errors


def test_a_node_serves_while_no_source_has_it_out() -> None:
    def down(time_s: float) -> NodeChange:
        return NodeChange(time_s, 0, up=False)

    def up(time_s: float) -> NodeChange:
        return NodeChange(time_s, 0, up=True)

    changes = merged([down(1), up(5), down(9), up(10)], [down(3), up(7)])
    assert [(change.time_s, change.up) for change in changes] == [(1, False), (7, True), (9, False), (10, True)]


def test_without_outages_nothing_changes() -> None:
    assert not list(Outages().changes(4, seed=0))


# -- capacity over time ----------------------------------------------------------------------------------------------------


def write(folder: Path, text: str) -> str:
    path = folder / "capacity.csv"
    path.write_text(text)
    return str(path)


def test_nodes_leave_from_the_end_and_come_back(tmp_path: Path) -> None:
    capacity = read_capacity(write(tmp_path, "time_s,nodes\n-50,4\n-10,3\n100,1\n200,4\n"))
    changes = planned_changes(capacity, cluster(4, 8))
    assert [(c.time_s, c.node, c.up) for c in changes] == [
        (0.0, 3, False),
        (100.0, 1, False),
        (100.0, 2, False),
        (200.0, 1, True),
        (200.0, 2, True),
        (200.0, 3, True),
    ]
    assert all(change.planned for change in changes)


def test_gpus_are_rounded_down_to_whole_nodes(tmp_path: Path) -> None:
    capacity = read_capacity(write(tmp_path, "time_s,gpus\n10,15\n20,0\n30,16\n"))
    changes = planned_changes(capacity, parse_cluster("1x8+2x4"))
    assert [(c.time_s, c.node, c.up) for c in changes][:2] == [(10.0, 2, False), (20.0, 0, False)]
    assert [(c.node, c.up) for c in changes][-3:] == [(0, True), (1, True), (2, True)]


def test_a_helios_file_by_virtual_cluster(tmp_path: Path) -> None:
    path = write(tmp_path, "date,vcA,vcB,total\n2020-04-01,16,8,24\n2020-04-02,8,8,16\n2020-04-04,16,0,16\n")
    assert read_capacity(f"{path}:vcA").steps == ((0.0, 16), (86400.0, 8), (259200.0, 16))
    assert read_capacity(path).source == "capacity.csv:total"
    noon = read_capacity(f"{path}:vcB", datetime(2020, 4, 2, 12))
    assert noon.steps == ((-129600.0, 8), (-43200.0, 8), (129600.0, 0))
    assert [(c.time_s, c.node, c.up) for c in planned_changes(noon, cluster(2, 4))] == [
        (129600.0, 0, False),
        (129600.0, 1, False),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("time_s,nodes\n", "no rows"),
        ("time_s\n1\n", "columns time_s"),
        ("when,nodes\n1,2\n", "first column is 'when'"),
        ("time_s,nodes\n1,2\n1,3\n", "csv:3: times do not ascend"),
        ("time_s,nodes\nsoon,2\n", "csv:2: time 'soon'"),
        ("time_s,nodes\nnan,2\n", "csv:2: time 'nan'"),
        ("time_s,nodes\n1,2.5\n", "csv:2: '2.5' is not a count"),
        ("time_s,nodes\n1\n", "csv:2: '' is not a count"),
        ("time_s,nodes\n1,-1\n", "csv:2: '-1' is not a count"),
        ("date,vcA,total\n2020-13-01,1,2\n", "csv:2: '2020-13-01' is not a date"),
        ("time_s,nodes\n1,\x00\n", "is not a count"),
    ],
)
def test_wrong_capacity_files_are_named_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_capacity(write(tmp_path, text))


def test_a_capacity_needs_its_file_its_column_and_a_cluster_that_is_large_enough(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_capacity(str(tmp_path / "none.csv"))
    path = write(tmp_path, "date,vcA,total\n2020-04-01,16,24\n")
    with pytest.raises(UserError, match="no column 'vcX'") as error:
        read_capacity(f"{path}:vcX")
    assert "vcA, total" in error.value.hint
    with pytest.raises(UserError, match="up to 24 gpus, the cluster has 8"):
        planned_changes(read_capacity(path), cluster(2, 4))


@given(
    steps=st.lists(st.integers(0, 6), min_size=1, max_size=12),
    sizes=st.sampled_from(["6x1", "2x8+4x4", "3x2:t4+3x4:a100"]),
)
def test_as_many_nodes_serve_as_the_file_says(steps: list[int], sizes: str) -> None:
    capacity = Capacity("nodes", tuple((float(i), count) for i, count in enumerate(steps)), "made up")
    serving = set(range(6))
    changes = planned_changes(capacity, parse_cluster(sizes))
    for time_s, count in capacity.steps:
        for change in (change for change in changes if change.time_s == time_s):
            assert change.up == (change.node not in serving), "a node leaves twice, or comes back without having left"
            (serving.add if change.up else serving.discard)(change.node)
        assert serving == set(range(count))


# -- in a simulation -------------------------------------------------------------------------------------------------------

WORK = workload(18, seed=3, span_s=7200.0, max_gpus=4)
FAILING = Outages(node_mtbf_h=3.0, node_repair_h=0.5)
WITHDRAWN = Outages(
    planned=planned_changes(
        Capacity("nodes", ((1800.0, 1), (5400.0, 3), (7200.0, 0), (9000.0, 2), (12000.0, 3)), "a file"), cluster(3, 4)
    )
)


def run(policy: str, outages: Outages, seed: int = 0) -> RunResult:
    settings = SimSettings(seed=seed, outages=outages, check=True)
    return simulate(
        icefrog_scenario(WORK.specs, WORK.profiles, WORK.curves, cluster(3, 4), settings), policy, None, settings
    )


def check_service(result: RunResult) -> None:
    """No GPU of a node that is out is ever granted or held; a node leaves and comes back by turns."""
    state = ClusterState(cluster(3, 4))
    time_s = 0.0
    for record in result.records:
        if record.time_s > time_s:
            assert_service(state)
            time_s = record.time_s
        if isinstance(record, ev.NodeDown | ev.NodeUp):
            assert (record.node in state.down) == isinstance(record, ev.NodeUp)
        state.apply(record)
    assert_service(state)


def assert_service(state: ClusterState) -> None:
    for job in state.active.values():
        held: tuple[GpuId, ...] = job.holding.gpus if job.holding is not None else ()
        assert not {gpu.node for gpu in (*job.gpus, *held)} & state.down, job.job_id


@pytest.mark.parametrize("outages", [FAILING, WITHDRAWN], ids=["failing", "withdrawn"])
@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_survives_and_uses_no_gpu_that_is_out(policy: str, outages: Outages) -> None:
    result = run(policy, outages)
    assert result.stalled == ""
    assert {job.phase for job in result.state.jobs.values()} == {"completed"}
    assert any(isinstance(record, ev.NodeDown) for record in result.records)
    check_service(result)


def test_a_failure_kills_and_a_planned_leave_saves() -> None:
    failed = run("fifo", FAILING).records
    crashes = [record for record in failed if isinstance(record, ev.JobCrashed)]
    assert crashes
    assert {(crash.cause, crash.reason.split(" (")[0][:14]) for crash in crashes} == {("node", "lost with node")}
    left = run("fifo", WITHDRAWN).records
    assert not [record for record in left if isinstance(record, ev.JobCrashed)]
    warned = [record for record in left if isinstance(record, ev.JobWarned)]
    stopped = {(record.job_id, record.time_s) for record in left if isinstance(record, ev.JobStopped)}
    assert warned
    assert {(record.job_id, record.time_s) for record in warned} <= stopped
    assert "leaves service" in warned[0].message


def test_outages_are_the_same_under_every_policy_and_again() -> None:
    def changes(result: RunResult) -> list[tuple[float, int, bool]]:
        end_s = 10_000.0
        found = [r for r in result.records if isinstance(r, ev.NodeDown | ev.NodeUp) and r.time_s < end_s]
        return [(record.time_s, record.node, isinstance(record, ev.NodeUp)) for record in found]

    first = run("fifo", FAILING)
    assert changes(first) == changes(run("srtf", FAILING))
    assert first.records == run("fifo", FAILING).records
    assert changes(first) != changes(run("fifo", FAILING, seed=1))


def test_jobs_that_wait_for_a_cluster_that_is_out_are_no_stall_and_those_without_hope_are() -> None:
    changes = tuple(NodeChange(100.0, node, up=False, planned=True, reason="gone") for node in range(3))
    back = tuple(NodeChange(1e6, node, up=True, planned=True) for node in range(3))
    late = run("fifo", Outages(planned=(*changes, *back)))
    assert late.stalled == ""
    assert min(job.finish_s or 0.0 for job in late.state.jobs.values() if job.submit_s > 100.0) > 1e6
    assert run("fifo", Outages(planned=changes)).stalled


@pytest.mark.parametrize("policy", ["fifo", "icefrog"])
def test_a_job_that_is_lost_with_its_node_keeps_all_but_its_last_interval(policy: str) -> None:
    """Whether it reports (icefrog) or has nothing to tell (fifo): an interval is a twentieth of the job here, or less."""
    result = run(policy, FAILING)
    done: dict[str, float] = {}
    since: dict[str, ev.JobStarted] = {}
    for record in result.records:
        if isinstance(record, ev.JobStarted):
            since[record.job_id] = record
        elif isinstance(record, ev.JobStopped | ev.JobFinished):
            done[record.job_id] = record.effective_samples or 0.0
        elif isinstance(record, ev.JobCrashed):
            spec = result.state.jobs[record.job_id].spec
            total = 10_000.0 * spec.max_epochs
            left = record.effective_samples
            assert left is not None
            assert left >= done.get(record.job_id, 0.0) - 1e-6  # never less than what it had at its last stop
            if policy == "fifo":
                duration_s = result.state.jobs[record.job_id].oracle_duration_s
                assert duration_s is not None
                restart_s = 60.0 if since[record.job_id].attempt > 1 else 0.0
                ran_s = max(record.time_s - since[record.job_id].time_s - restart_s, 0.0)
                reached = done.get(record.job_id, 0.0) + total * ran_s / duration_s
                assert reached - total / 20 - 1e-3 <= left <= reached + 1e-3
            done[record.job_id] = left
