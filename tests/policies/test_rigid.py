"""The queue and the order of priority, by hand: fifo, sjf, srtf, edf."""

from __future__ import annotations

import pytest
from stage import Role, Stage

from icefrog.policies import make_policy


def test_a_job_that_does_not_fit_blocks_those_behind_it() -> None:
    stage = Stage("fifo", [Role("a", 100, 3), Role("wide", 10, 4), Role("small", 10)], gpus=4).play()
    assert stage.finish_s == {"a": 100, "wide": 110, "small": 120}


def test_whoever_fits_passes_it_and_can_delay_it() -> None:
    stage = Stage("fifo", [Role("a", 100, 3), Role("wide", 10, 4), Role("small", 150)], gpus=4, backfill=True).play()
    assert stage.finish_s == {"a": 100, "small": 150, "wide": 160}


# EASY: "a" ends at 100, when "wide" (3 of 4 GPUs) is to start; one GPU is left over beside it then.
SHADOW = [Role("a", 100, 2), Role("wide", 50, 3, submit_s=1)]


@pytest.mark.parametrize(
    ("behind", "start_s"),
    [
        (Role("ends-in-time", 90, 2, submit_s=2), 2),
        (Role("ends-too-late", 120, 2, submit_s=2), 150),
        (Role("needs-no-reserved-gpu", 1000, 1, submit_s=2), 2),
    ],
    ids=lambda value: value.name if isinstance(value, Role) else "",
)
def test_easy_lets_pass_who_does_not_delay_the_first(behind: Role, start_s: float) -> None:
    stage = Stage("fifo", [*SHADOW, behind], gpus=4, backfill="easy").play()
    assert stage.finish_s["wide"] == 150
    assert stage.finish_s[behind.name] == start_s + behind.length_s


def test_easy_gives_the_spare_gpus_away_only_once() -> None:
    late = [Role(f"long{i}", 1000, 1, submit_s=2) for i in range(2)]
    stage = Stage("fifo", [*SHADOW, *late], gpus=4, backfill="easy").play()
    assert stage.finish_s["wide"] == 150
    assert stage.finish_s["long0"] == 1002
    assert stage.finish_s["long1"] == 1150  # beside "wide" only two would fit: it waits for it


def test_easy_reserves_gpus_that_lie_together() -> None:
    """Two GPUs are free at 100 by the count, but not on one node: the reservation is for 200."""
    roles = [Role("a", 100, 3), Role("b", 200, 3), Role("pair", 10, 2, submit_s=1), Role("one", 150, 1, submit_s=2)]
    stage = Stage("fifo", roles, nodes=2, gpus=4, backfill="easy").play()
    assert stage.finish_s["pair"] == 110
    wide = [Role("a", 100, 3), Role("b", 200, 3), Role("all", 10, 8, submit_s=1), Role("one", 150, 1, submit_s=2)]
    stage = Stage("fifo", wide, nodes=2, gpus=4, backfill="easy").play()
    assert (stage.finish_s["one"], stage.finish_s["all"]) == (152, 210)


def test_back_filling_options_of_version_0_1_are_understood() -> None:
    for given, meant in ((True, "aggressive"), ("false", "none"), ("easy", "easy")):
        assert make_policy("fifo", {"backfill": given}).options.backfill == meant  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", ["sjf", "srtf"])
@pytest.mark.parametrize(("minutes", "mean"), [((20, 20), 30), ((100, 5), 55)])
def test_published_example_of_two_tasks_on_one_gpu(policy: str, minutes: tuple[int, int], mean: int) -> None:
    """Titan (SoCC'22), Table 2: two tasks one after the other, the shorter first."""
    roles = [Role(f"task{i}", 60 * length) for i, length in enumerate(minutes)]
    assert Stage(policy, roles).play().mean_jct_s == 60 * mean


def test_a_short_job_waits_under_sjf_and_preempts_under_srtf() -> None:
    roles = [Role("long", 100), Role("short", 10, submit_s=20)]
    assert Stage("sjf", roles).play().finish_s == {"long": 100, "short": 110}
    assert Stage("srtf", roles).play().finish_s == {"short": 30, "long": 110}
    nearly_done = [Role("long", 100), Role("short", 10, submit_s=95)]
    assert Stage("srtf", nearly_done).play().finish_s == {"long": 100, "short": 110}


def test_short_is_what_needs_few_gpu_seconds_if_one_says_so() -> None:
    roles = [Role("now", 10, 4), Role("narrow", 50, 1, submit_s=1), Role("wide", 30, 4, submit_s=1)]
    assert Stage("sjf", roles, gpus=4).play().finish_s == {"now": 10, "wide": 40, "narrow": 90}
    assert Stage("sjf", roles, gpus=4, size="gpu_time").play().finish_s == {"now": 10, "narrow": 60, "wide": 90}


def test_the_last_in_line_is_displaced_and_looks_for_another_place() -> None:
    """A job that needs a whole node takes that of the job with the most time left, which moves to the other node."""
    roles = [Role("filler", 20), Role("large", 200, 3), Role("small", 400), Role("urgent", 10, 4, submit_s=50)]
    stage = Stage("srtf", roles, nodes=2, gpus=4).play(until_s=50)
    assert {job.job_id: {gpu.node for gpu in job.gpus} for job in stage.snapshot.jobs} == {"large": {0}, "small": {1}}
    plan = stage.decide()
    assert plan.gpus is not None
    assert {job_id: {gpu.node for gpu in gpus} for job_id, gpus in plan.gpus.items()} == {"urgent": {1}, "small": {0}}
    assert not plan.preempted
    assert stage.play().finish_s == {"filler": 20, "urgent": 60, "large": 200, "small": 400}


def test_nobody_moves_for_a_job_that_comes_later_in_the_order() -> None:
    roles = [Role("short", 100, 1), Role("long", 1000, 4, submit_s=1)]
    stage = Stage("srtf", roles, gpus=4).play()
    assert stage.finish_s == {"short": 100, "long": 1100}


def test_a_job_over_nodes_displaces_whole_nodes() -> None:
    roles = [Role(f"j{i}", 500 + i, 1) for i in range(3)]
    stage = Stage("srtf", [*roles, Role("big", 10, 8, submit_s=5)], nodes=2, gpus=4).play()
    assert stage.finish_s["big"] == 15
    assert stage.finish_s["j0"] == 510


def due(name: str, length_s: float, deadline_s: float | None, submit_s: float = 0.0) -> Role:
    return Role(name, length_s, submit_s=submit_s, spec={} if deadline_s is None else {"deadline_s": deadline_s})


def test_edf_meets_deadlines_that_fifo_misses() -> None:
    roles = [due("any-time", 50, None), due("late", 40, 200), due("soon", 30, 60, submit_s=10)]
    assert Stage("edf", roles).play().finish_s == {"soon": 40, "late": 70, "any-time": 120}
    assert Stage("fifo", roles).play().jct_s["soon"] > 60
    gentle = Stage("edf", roles, preempt=False).play()
    assert gentle.finish_s == {"late": 40, "soon": 70, "any-time": 120}
    assert gentle.jct_s["soon"] == 60


def test_edf_passes_over_a_lost_job_if_one_says_so() -> None:
    """The domino effect: a job that is late already makes the next one late, too."""
    roles = [due("lost", 100, 50), due("next", 60, 120)]
    assert Stage("edf", roles).play().finish_s == {"lost": 100, "next": 160}
    stage = Stage("edf", roles, late="last")
    stage.play(until_s=50)
    assert stage.plans[-1].stands_until_s == 50
    assert stage.play().finish_s == {"next": 110, "lost": 160}


def test_a_job_file_may_name_a_deadline_after_submission() -> None:
    spec = due("a", 1, 90.0)
    assert Stage("edf", [spec]).decide().choices.keys() == {"a"}
    with pytest.raises(ValueError, match="greater than 0"):
        Stage("edf", [due("a", 1, 0.0)]).decide()


def test_nobody_is_displaced_in_vain() -> None:
    """Room for two GPUs: the last in line has one, the one before it two, which are enough by themselves."""
    roles = [Role("first", 100), Role("two", 200, 2), Role("last", 300), Role("pair", 10, 2, submit_s=5)]
    plan = Stage("srtf", roles, gpus=4).play(until_s=5).decide()
    assert plan.preempted == {"two"}
