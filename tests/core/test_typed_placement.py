"""Placement on clusters of several GPU types."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from icefrog.changes import place_changes
from icefrog.controller import verify
from icefrog.placement import all_free, num_nodes, of_type, place
from icefrog.specfile import parse_cluster
from icefrog.testing import builders as b
from icefrog.testing.builders import view
from icefrog.types import Candidate, GpuId, JobView, Plan, Snapshot

MIXED = parse_cluster("2x4:rtx+3x4:a100+1x8:t4")  # nodes 0-1, 2-4, 5


def option(num_gpus: int, gpu_type: str) -> Candidate:
    plain = b.candidate(num_gpus, 1.0)
    return Candidate(replace(plain.config, gpu_type=gpu_type), plain.estimate)


def placed(jobs: list[JobView], wanted: dict[str, tuple[int, str]], down: frozenset[int] = frozenset()):
    plan = Plan({name: option(*want) for name, want in wanted.items()})
    return place(Snapshot(0.0, MIXED, tuple(jobs), down=down), plan)


def types_of(gpus: tuple[GpuId, ...]) -> set[str]:
    return {MIXED.node_types[gpu.node] for gpu in gpus}


def test_a_type_that_is_named_is_given():
    result = placed([view("a"), view("b"), view("c")], {"a": (2, "rtx"), "b": (8, "a100"), "c": (8, "t4")})
    assert {name: types_of(gpus) for name, gpus in result.allocation.items()} == {
        "a": {"rtx"},
        "b": {"a100"},
        "c": {"t4"},
    }
    assert num_nodes(result.allocation["c"]) == 1


def test_a_job_for_any_type_never_spans_two():
    result = placed([view("a"), view("b")], {"a": (12, "any"), "b": (8, "any")})
    assert types_of(result.allocation["a"]) == {"a100"}
    assert types_of(result.allocation["b"]) == {"t4"}  # it fits in one node there
    assert placed([view("a")], {"a": (16, "any")}).unplaced == ("a",)  # 28 GPUs, but not of one type


def test_jobs_bound_to_a_type_are_placed_before_those_that_are_not():
    result = placed([view("a"), view("b")], {"a": (12, "any"), "b": (4, "a100")})
    assert result.allocation["b"][0].node == 2
    assert result.unplaced == ("a",)
    result = placed([view("a"), view("b")], {"a": (8, "any"), "b": (12, "a100")})
    assert not result.unplaced


def test_a_job_moves_when_another_type_is_named_and_stays_otherwise():
    home = b.gpus(2, node=0)
    assert placed([view("a", home)], {"a": (2, "any")}).allocation["a"] == home
    assert placed([view("a", home)], {"a": (2, "rtx")}).allocation["a"] == home
    assert types_of(placed([view("a", home)], {"a": (2, "t4")}).allocation["a"]) == {"t4"}
    grown = placed([view("a", home)], {"a": (3, "any")}).allocation["a"]
    assert set(grown) >= set(home)


def test_a_job_on_two_types_does_not_stay():
    astray = (GpuId(1, 0), GpuId(2, 0))
    assert len(types_of(placed([view("a", astray)], {"a": (2, "any")}).allocation["a"])) == 1


def test_a_type_out_of_service_has_no_place():
    assert placed([view("a")], {"a": (1, "t4")}, down=frozenset({5})).unplaced == ("a",)
    assert types_of(placed([view("a")], {"a": (8, "any")}, down=frozenset({5})).allocation["a"]) == {"a100"}


def test_gpus_of_one_type() -> None:
    assert of_type(MIXED, b.gpus(2, node=0), "rtx")
    assert of_type(MIXED, b.gpus(2, node=0))
    assert not of_type(MIXED, b.gpus(2, node=0), "a100")
    assert not of_type(MIXED, (GpuId(1, 0), GpuId(2, 0)))


def test_books_of_types_are_kept_while_jobs_come_and_go() -> None:
    free = all_free(MIXED, MIXED.gpus_per_node)
    first = free.find(8, gpu_type="t4")
    assert first == b.gpus(8, node=5)
    assert free.largest_of("rtx") == 4
    assert free.largest_of("any") == 8
    twin = free.copy()
    twin.hold(first)
    assert twin.find(1, gpu_type="t4") is None
    assert twin.find(8) is None  # fits in one node, though not now: it waits for that node
    assert types_of(twin.find(12) or ()) == {"a100"}
    assert free.find(1, gpu_type="t4") == b.gpus(1, node=5)
    assert free.find(1, gpu_type="k80") is None
    twin.release(first)
    assert twin.find(8, first) == first


@given(
    wanted=st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from(["any", "rtx", "a100", "t4"])), max_size=12
    ),
    down=st.frozensets(st.integers(0, 5), max_size=4),
    before=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_whatever_is_placed_is_sound(wanted: list[tuple[int, str]], down: frozenset[int], before: list[bool]) -> None:
    names = {f"j{i}": want for i, want in enumerate(wanted)}
    first = placed(
        [view(name) for name in names], {n: w for (n, w), yes in zip(names.items(), before, strict=False) if yes}
    )
    up = {n: gpus for n, gpus in first.allocation.items() if not down & {gpu.node for gpu in gpus}}
    jobs = [view(name, up.get(name, ())) for name in names]
    result = placed(jobs, names, down)
    assert set(result.allocation) | set(result.unplaced) == set(names)
    choices = {name: option(*names[name]) for name in result.allocation}
    plan = Plan(choices, gpus=result.allocation, reasons=dict.fromkeys(names, "of this test"))
    options = {name: (choice,) for name, choice in choices.items()}
    verify(plan, Snapshot(0.0, MIXED, tuple(jobs), down=down), options)
    for gpus in result.allocation.values():
        assert len(types_of(gpus)) == 1


def test_changes_place_those_that_name_a_type_first():
    wanted = {"x": option(4, "any"), **{name: option(4, "a100") for name in "abc"}}
    snapshot = Snapshot(0.0, MIXED, tuple(map(view, wanted)))
    result = place_changes(snapshot, Plan(wanted, keeps=True))
    assert not result.unplaced
    assert all(types_of(result.allocation[name]) == {"a100"} for name in "abc")
