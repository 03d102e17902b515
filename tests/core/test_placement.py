from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icefrog.placement import FreeGpus, Placement, num_nodes, place
from icefrog.testing import builders as b
from icefrog.testing.builders import view
from icefrog.types import GpuId, JobView, Plan, Snapshot


def placed(jobs: list[JobView], counts: dict[str, int], nodes: int, gpus: int = 4, pairs=()):
    shared = {job_id for pair in pairs for job_id in pair}
    plan = Plan({j: b.candidate(c, 1.0, shared=j in shared) for j, c in counts.items()}, pairs=tuple(pairs))
    return place(Snapshot(0.0, b.cluster(nodes, gpus), tuple(jobs)), plan)


def test_a_job_that_fits_in_one_node_never_spans_two():
    result = placed([view("a"), view("b"), view("c")], {"a": 3, "b": 3, "c": 2}, nodes=3)
    assert not result.unplaced
    assert all(num_nodes(gpus) == 1 for gpus in result.allocation.values())


def test_small_jobs_fill_the_fullest_node_and_leave_whole_nodes_free():
    result = placed([view("a"), view("b"), view("big")], {"a": 1, "b": 1, "big": 8}, nodes=3)
    assert result.allocation["a"][0].node == result.allocation["b"][0].node
    assert num_nodes(result.allocation["big"]) == 2


def test_two_multi_node_jobs_never_share_a_node():
    result = placed([view("a"), view("b")], {"a": 6, "b": 6}, nodes=3)
    assert result.unplaced == ("b",)  # 4+2 and then only one whole node is left
    result = placed([view("a"), view("b")], {"a": 6, "b": 6}, nodes=4)
    nodes = [{gpu.node for gpu in gpus} for gpus in result.allocation.values()]
    assert not result.unplaced
    assert nodes[0].isdisjoint(nodes[1])


def test_running_jobs_stay_where_they_are():
    home = b.gpus(2, node=1, first=2)
    result = placed([view("a", home), view("b")], {"a": 2, "b": 2}, nodes=2)
    assert result.allocation["a"] == home
    assert result.allocation["b"][0].node == 1  # the fullest node that fits


def test_a_grown_job_stays_in_its_node_when_it_can():
    result = placed([view("a", b.gpus(2, node=1, first=1)), view("b")], {"a": 3, "b": 1}, nodes=2)
    assert set(result.allocation["a"]) >= set(b.gpus(2, node=1, first=1))


def test_fragmented_nodes_are_repacked_by_migration():
    jobs = [view("a", b.gpus(2, node=0)), view("b", b.gpus(2, node=1)), view("c")]
    result = placed(jobs, {"a": 2, "b": 2, "c": 4}, nodes=2)
    assert not result.unplaced
    assert {gpu.node for gpu in result.allocation["a"]} == {gpu.node for gpu in result.allocation["b"]}


def moved(jobs: list[JobView], result: Placement) -> set[str]:
    """Running jobs that restart, although their count is the same."""
    return {job.job_id for job in jobs if job.running and set(result.allocation[job.job_id]) != set(job.gpus)}


def ones(names: str, node: int) -> list[JobView]:
    """Jobs of one GPU each, side by side on a node."""
    return [view(name, b.gpus(1, node=node, first=device)) for device, name in enumerate(names)]


def test_a_small_gap_costs_one_move_not_all():
    jobs = [*ones("abc", 0), *ones("def", 1), view("full", b.gpus(4, node=2)), view("new")]
    result = placed(jobs, {**dict.fromkeys("abcdef", 1), "full": 4, "new": 2}, nodes=3)
    assert not result.unplaced
    assert len(moved(jobs, result)) == 1


def test_one_larger_job_moves_rather_than_two_small_ones():
    jobs = [*ones("ab", 0), view("c", b.gpus(2, node=1)), view("d", b.gpus(2, node=2)), view("new")]
    result = placed(jobs, {"a": 1, "b": 1, "c": 2, "d": 2, "new": 4}, nodes=3)
    assert not result.unplaced
    assert len(moved(jobs, result)) == 1
    assert moved(jobs, result) < {"c", "d"}


def test_a_single_job_moves_rather_than_a_pair():
    pair = [view(name, b.gpus(1, node=0), shared=True) for name in "ab"]
    jobs = [*pair, view("c", b.gpus(2, node=0, first=1)), *ones("def", 1), view("new")]
    counts = {**dict.fromkeys("abdef", 1), "c": 2, "new": 2}
    result = placed(jobs, counts, nodes=2, pairs=[("a", "b")])
    assert not result.unplaced
    assert len(moved(jobs, result) & {"d", "e", "f"}) == 1
    assert len(moved(jobs, result)) == 1


def test_who_is_resized_makes_room_before_who_stays():
    jobs = [*ones("ab", 0), view("shrinks", b.gpus(2, node=1)), *ones("c", 2), view("new")]
    result = placed(jobs, {"a": 1, "b": 1, "c": 1, "shrinks": 1, "new": 8}, nodes=3)
    assert not result.unplaced
    assert moved(jobs, result) == {"c", "shrinks"}


def test_whole_nodes_are_cleared_where_fewest_run():
    jobs = [*ones("abc", 0), *ones("d", 1), *ones("ef", 2), view("new")]
    result = placed(jobs, {**dict.fromkeys("abcdef", 1), "new": 8}, nodes=4)
    assert not result.unplaced
    assert moved(jobs, result) == {"d"}
    assert {gpu.node for gpu in result.allocation["new"]} == {1, 3}


def test_who_spans_nodes_is_in_nobodys_way():
    large = view("large", b.gpus(4, node=0) + b.gpus(2, node=1))
    jobs = [large, *ones("ab", 2), *ones("cd", 3), view("new")]
    result = placed(jobs, {"large": 6, **dict.fromkeys("abcd", 1), "new": 4}, nodes=4)
    assert not result.unplaced
    assert moved(jobs, result) in ({"a", "b"}, {"c", "d"})


def test_nobody_moves_where_the_plan_forbids_it():
    jobs = [*ones("abc", 0), *ones("def", 1), view("new")]
    plan = Plan({**{j: b.candidate(1, 1.0) for j in "abcdef"}, "new": b.candidate(2, 1.0)}, migrate=False)
    result = place(Snapshot(0.0, b.cluster(2, 4), tuple(jobs)), plan)
    assert result.unplaced == ("new",)
    assert not moved(jobs, result)


def test_counts_that_add_up_but_do_not_fit_are_returned():
    result = placed([view("a"), view("b"), view("c")], {"a": 3, "b": 3, "c": 2}, nodes=2)
    assert result.unplaced == ("c",)


def test_a_pair_shares_one_gpu_where_one_of_them_runs():
    home = b.gpus(1, node=0, first=3)
    result = placed([view("a"), view("b", home)], {"a": 1, "b": 1}, nodes=1, pairs=[("a", "b")])
    assert result.allocation == {"a": home, "b": home}


def test_sharers_that_part_do_not_stay_on_one_gpu():
    home = b.gpus(1)
    result = placed([view("a", home, shared=True), view("b", home, shared=True)], {"a": 1, "b": 1}, nodes=1)
    assert result.allocation["a"] != result.allocation["b"]


@given(
    counts=st.lists(st.sampled_from([1, 2, 4, 8, 16]), max_size=24),
    sizes=st.sampled_from([(12, 4), (6, 8), (3, 16)]),
    before=st.lists(st.integers(0, 23), max_size=24),
)
def test_powers_of_two_always_fit_and_no_gpu_is_used_twice(counts, sizes, before):
    nodes, per_node = sizes
    total, kept = 0, []
    for count in counts:
        if total + count <= nodes * per_node:
            kept.append(count)
            total += count
    names = {f"j{i}": count for i, count in enumerate(kept)}
    # Some run already: wherever a first placement of a subset put them.
    some = {f"j{i}": names[f"j{i}"] for i in before if f"j{i}" in names}
    first = placed([view(name) for name in names], some, nodes, per_node)
    jobs = [view(name, first.allocation.get(name, ())) for name in names]
    result = placed(jobs, names, nodes, per_node)
    assert not result.unplaced
    used = [gpu for gpus in result.allocation.values() for gpu in gpus]
    assert len(used) == len(set(used)) == total
    for name, gpus in result.allocation.items():
        assert len(gpus) == names[name]
        assert num_nodes(gpus) == max(1, names[name] // per_node)


@given(
    sizes=st.lists(st.sampled_from([0, 1, 4, 8]), min_size=1, max_size=5),
    steps=st.lists(st.tuples(st.sampled_from([1, 1, 2, 3, 5, 8, 12]), st.booleans()), max_size=25),
)
def test_free_gpus_are_kept_account_of_while_jobs_come_and_go(sizes: list[int], steps: list[tuple[int, bool]]) -> None:
    free = FreeGpus(sizes)
    held: list[tuple[GpuId, ...]] = []
    for count, leaves in steps:
        if leaves and held:
            free.release(held.pop(count % len(held)))
        gpus = free.find(count)
        if gpus is not None:
            assert len(set(gpus)) == count
            assert free.are_free(gpus)
            assert count > free.largest or num_nodes(gpus) == 1
            free.hold(gpus)
            held.append(gpus)
        elif count <= free.largest:
            assert all(free.free_in(node) < count for node in range(len(sizes)))
        taken = [gpu for gpus in held for gpu in gpus]
        assert len(set(taken)) == len(taken) == sum(sizes) - free.num_free
        nodes = [node for gpus in held if num_nodes(gpus) > 1 for node in {gpu.node for gpu in gpus}]
        assert len(set(nodes)) == len(nodes), "two jobs that span nodes share one"


def test_gpus_are_held_and_released_once() -> None:
    free = FreeGpus((2, 2))
    free.hold(b.gpus(2))
    with pytest.raises(ValueError, match="not all free"):
        free.hold(b.gpus(1))
    with pytest.raises(ValueError, match="was free already"):
        free.release(b.gpus(1, node=1))
    assert not free.are_free([GpuId(7, 0)])
    assert free.find(3) is None
    assert free.find(1, home=[GpuId(1, 1)]) == (GpuId(1, 1),)
