"""Placement beside an exact search: all find a place where there is one for all, and no more jobs move than must."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from icefrog.placement import Placement, num_nodes, of_type, place
from icefrog.spec import ClusterSpec, NodeSpec
from icefrog.testing import builders as b
from icefrog.testing.builders import view
from icefrog.types import Candidate, GpuId, JobView, Plan, Snapshot

Wanted = dict[str, tuple[int, str]]  # job -> GPUs, their type


def option(num_gpus: int, gpu_type: str) -> Candidate:
    plain = b.candidate(num_gpus, 1.0)
    return Candidate(replace(plain.config, gpu_type=gpu_type), plain.estimate)


def nodes(*sizes: int | tuple[int, str]) -> ClusterSpec:
    kinds = [(size, "a100") if isinstance(size, int) else size for size in sizes]
    return ClusterSpec(nodes=tuple(NodeSpec(gpus=size, gpu_type=kind) for size, kind in kinds))


def placed(cluster: ClusterSpec, jobs: list[JobView], wanted: Wanted, down: frozenset[int] = frozenset()) -> Placement:
    plan = Plan({name: option(*want) for name, want in wanted.items()})
    return place(Snapshot(0.0, cluster, tuple(jobs), down=down), plan)


def moved(jobs: list[JobView], wanted: Wanted, found: Placement) -> set[str]:
    """Those that run, keep their count, and yet are elsewhere."""
    keeps = {job.job_id: job.gpus for job in jobs if job.job_id in wanted and job.num_gpus == wanted[job.job_id][0]}
    return {name for name, home in keeps.items() if name in found.allocation and found.allocation[name] != home}


def fewest_moves(cluster: ClusterSpec, sizes: tuple[int, ...], jobs: list[JobView], wanted: Wanted) -> int | None:
    """By trying everything, for jobs that fit in a node each; None: they do not fit together."""
    homes = {job.job_id: job.gpus for job in jobs if job.running}
    order = sorted(wanted, key=lambda name: -wanted[name][0])

    def tries(at: int, kept: frozenset[GpuId], elsewhere: tuple[int, ...], moves: int) -> Iterator[int]:
        if at == len(order):
            yield moves
            return
        name = order[at]
        count, kind = wanted[name]
        home = homes.get(name, ())
        keeps = len(home) == count
        stayable = keeps and num_nodes(home) == 1 and of_type(cluster, home, kind)
        if stayable and all(gpu.device < sizes[gpu.node] for gpu in home) and not kept.intersection(home):
            held = sum(gpu.node == home[0].node for gpu in kept)
            if held + count + elsewhere[home[0].node] <= sizes[home[0].node]:
                yield from tries(at + 1, kept.union(home), elsewhere, moves)
        for node, size in enumerate(sizes):
            held = sum(gpu.node == node for gpu in kept)
            if kind in ("any", cluster.node_types[node]) and held + count + elsewhere[node] <= size:
                more = (*elsewhere[:node], elsewhere[node] + count, *elsewhere[node + 1 :])
                yield from tries(at + 1, kept, more, moves + keeps)

    return min(tries(0, frozenset(), (0,) * len(sizes), 0), default=None)


@st.composite
def situations(draw: st.DrawFn) -> tuple[ClusterSpec, frozenset[int], list[JobView], Wanted]:
    """Up to three nodes of unlike size, one of them lost now and then; jobs on any of their GPUs."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
    free = [GpuId(node, device) for node, size in enumerate(sizes) for device in range(size)]
    down = frozenset(draw(st.sampled_from([(), (), (0,)])) if len(sizes) > 1 else ())
    jobs, wanted = [], {}
    left = sum(size for node, size in enumerate(sizes) if node not in down)
    largest = max(size for node, size in enumerate(sizes) if node not in down)
    for index in range(draw(st.integers(1, 7))):
        count = draw(st.integers(1, largest))
        there = [gpu for gpu in free if gpu.node == draw(st.integers(0, len(sizes) - 1))] if draw(st.booleans()) else []
        gpus = tuple(sorted(draw(st.permutations(there))[:count])) if len(there) >= count else ()
        free = [gpu for gpu in free if gpu not in gpus]
        jobs.append(view(f"j{index}", gpus))
        if draw(st.booleans()):
            count = draw(st.integers(1, largest))  # it grows or shrinks
        if count <= left:
            left -= count
            wanted[f"j{index}"] = (count, "any")
    return nodes(*sizes), down, jobs, wanted


@given(case=situations())
@settings(max_examples=400, deadline=None, derandomize=True)
def test_all_find_a_place_where_there_is_one_and_no_more_move_than_must(case) -> None:
    cluster, down, jobs, wanted = case
    found = placed(cluster, jobs, wanted, down)
    sizes = tuple(0 if node in down else size for node, size in enumerate(cluster.gpus_per_node))
    fewest = fewest_moves(cluster, sizes, jobs, wanted)
    assert bool(found.unplaced) == (fewest is None)
    assert fewest is None or len(moved(jobs, wanted, found)) == fewest


def test_who_goes_home_does_not_take_the_only_place_of_another() -> None:
    jobs = [view("large", b.gpus(3, node=1)), view("small", b.gpus(1, node=0)), view("two"), view("too")]
    wanted = {"large": (3, "any"), "two": (2, "any"), "too": (2, "any")}
    assert not placed(nodes(3, 4), jobs, wanted).unplaced


def test_who_may_have_any_type_makes_room_for_who_may_not() -> None:
    cluster = nodes((1, "t4"), (1, "a100"), (1, "a100"))
    jobs = [view("picky"), view("any", b.gpus(1, node=2)), view("bound", b.gpus(1, node=1))]
    wanted = {"picky": (1, "a100"), "any": (1, "any"), "bound": (1, "a100")}
    found = placed(cluster, jobs, wanted)
    assert not found.unplaced
    assert moved(jobs, wanted, found) == {"any"}


def test_a_larger_job_that_may_have_any_type_moves_rather_than_two_small_ones() -> None:
    cluster = nodes((4, "t4"), (2, "a100"), (2, "a100"))
    jobs = [
        view("new"),
        view("x", b.gpus(1, node=1)),
        view("y", b.gpus(1, node=1, first=1)),
        view("large", b.gpus(2, node=2)),
    ]
    wanted = {"new": (1, "a100"), "x": (1, "a100"), "y": (1, "a100"), "large": (2, "any")}
    found = placed(cluster, jobs, wanted)
    assert not found.unplaced
    assert moved(jobs, wanted, found) == {"large"}


def test_where_partners_change_one_of_the_new_pair_stays() -> None:
    """The GPU of the other one is kept by the partner that it had."""
    shared, alone = (GpuId(0, 0),), (GpuId(1, 2),)
    jobs = [view("a", shared), view("b", shared), view("c", alone)]
    plan = Plan({name: option(1, "any") for name in "abc"}, pairs=(("b", "c"),))
    found = place(Snapshot(0.0, nodes(4, 4), tuple(jobs)), plan)
    assert found.allocation == {"a": shared, "b": alone, "c": alone}
