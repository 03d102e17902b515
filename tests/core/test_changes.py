"""Plans that name changes only, and the books that make them cheap."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icefrog import events as ev
from icefrog.changes import free_gpus, num_granted, place_changes
from icefrog.controller import Controller, PolicyError, verify
from icefrog.lazymap import LazyMap
from icefrog.occupied import OccupiedGpus
from icefrog.placement import FreeGpus
from icefrog.policies.base import Options
from icefrog.state import ClusterState, Phase
from icefrog.testing import builders as b
from icefrog.types import GpuId, Plan, Pricing

WAITS = "waits: others came first"


class Scripted:
    """Returns the plans it is given, made of (job -> GPU count) and whom to preempt."""

    name, source, oracle, Options = "scripted", "tests", False, Options
    pricing = Pricing(reads_progress=False)

    def __init__(self, *plans):
        self.plans = list(plans)
        self.priced = []

    def decide(self, snapshot, candidates):
        counts, preempted = self.plans.pop(0)
        choices = {j: next(c for c in candidates[j] if c.config.num_gpus == n) for j, n in counts.items()}
        reasons = dict.fromkeys((*choices, *preempted), "named")
        return Plan(
            choices,
            reasons=reasons,
            keeps=True,
            preempted=frozenset(preempted),
            waiting_reason=WAITS,
            stands_until_s=math.inf,
        )


def submitted(name, at=0.0):
    return ev.JobSubmitted(time_s=at, job=b.job_spec(name, gpus=(1, 2, 4)))


class Rig:
    """A controller with a scripted policy, and what was priced."""

    def __init__(self, state, *plans):
        self.priced = []
        self.state = state
        self.controller = Controller(state, Scripted(*plans), self.offers)

    def offers(self, view, cluster, now_s, pricing):
        self.priced.append(view.job_id)
        return tuple(b.candidate(count, 100.0 / count) for count in view.spec.gpus)

    def handle(self, *events):
        return self.controller.handle(events)


def started(rig, name, at=1.0, attempt=1):
    rig.handle(ev.JobStarted(time_s=at, job_id=name, attempt=attempt))


def test_unnamed_jobs_keep_their_gpus_and_are_not_even_priced(state):
    rig = Rig(state, ({"a": 2}, ()), ({"b": 1}, ()), ({}, ()))
    rig.handle(submitted("a"))
    started(rig, "a")
    rig.priced.clear()
    step = rig.handle(submitted("b", at=2.0))
    assert [(c.kind, c.job_id) for c in step.commands] == [("start", "b")]
    assert rig.priced == ["b"]
    decided = step.facts[0]
    assert (decided.gpus_granted, decided.waiting) == (3, 0)
    assert rig.handle(ev.Tick(time_s=3.0)).commands == []
    assert state.jobs["a"].phase is Phase.RUNNING


def test_a_preempted_job_leaves_and_its_gpus_are_placed_at_once(state):
    rig = Rig(state, ({"a": 4, "b": 4}, ()), ({"c": 4}, ("a",)))
    rig.handle(submitted("a"), submitted("b"))
    home = state.jobs["a"].gpus
    started(rig, "a")
    started(rig, "b")
    step = rig.handle(submitted("c", at=2.0))
    assert [(c.kind, c.job_id) for c in step.commands] == [("preempt", "a"), ("start", "c")]
    assert state.jobs["c"].gpus == home
    assert step.facts[0].gpus_granted == 8


def test_the_common_reason_is_told_once_to_each_job(state):
    rig = Rig(state, ({}, ()), ({}, ()), ({"a": 1}, ()), ({}, ("a",)), ({}, ()))
    first = rig.handle(submitted("a"), submitted("b")).facts[0]
    assert first.reasons == {"a": WAITS, "b": WAITS}
    assert first.waiting_reason == WAITS
    again = rig.handle(submitted("c", at=1.0)).facts[0]
    assert (again.reasons, again.waiting_reason) == ({"c": WAITS}, None)
    assert rig.handle(ev.Tick(time_s=2.0)).facts[0].reasons == {"a": "named"}
    started(rig, "a", at=2.0)
    rig.handle(ev.Tick(time_s=3.0))
    after = rig.handle(ev.JobStopped(time_s=4.0, job_id="a", attempt=1)).facts[0]
    assert after.reasons == {"a": WAITS}
    assert {job.reason for job in state.jobs.values()} == {WAITS}


def test_a_replayed_log_knows_what_was_said(state):
    rig = Rig(state, ({}, ()), ({}, ()))
    events = [submitted("a")]
    facts = rig.handle(*events).facts
    replayed = ClusterState(state.cluster)
    replayed.replay([*events, *facts])
    assert replayed.unsaid == state.unsaid == {}
    assert replayed.waiting_reason == WAITS


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan({}, keeps=True), "no reason given for"),
        (Plan({}, preempted=frozenset({"a"}), reasons={"a": "x", "b": "x"}), "say keeps"),
        (Plan({}, keeps=True, preempted=frozenset({"b"}), reasons={"b": "x"}), "does not run"),
        (Plan({"b": b.candidate(4, 25.0)}, keeps=True, reasons={"b": "x"}), "uses 4 GPUs of 3"),
        (
            Plan({"b": b.candidate(1, 100.0)}, keeps=True, reasons={"b": "x"}, gpus={"b": (GpuId(0, 0),)}),
            "held by a job that keeps it",
        ),
    ],
)
def test_plans_of_changes_are_verified(plan, message):
    state = ClusterState(b.cluster(1, 4))
    rig = Rig(state, ({"a": 1}, ()))
    rig.handle(submitted("a"))
    started(rig, "a")
    state.apply(submitted("b"))
    snapshot = state.snapshot()
    options = {view.job_id: rig.offers(view, None, 0.0, None) for view in snapshot.jobs}
    with pytest.raises(PolicyError, match=message):
        verify(plan, snapshot, options)


def test_views_of_untouched_jobs_are_the_same_objects(state):
    state.apply(submitted("a"))
    state.apply(submitted("b"))
    before = state.snapshot()
    assert state.snapshot().jobs is before.jobs
    state.apply(ev.Start(time_s=1.0, job_id="b", attempt=1, gpus=b.gpus(2), grant=b.grant(2)))
    after = state.snapshot()
    assert after.jobs[0] is before.jobs[0]
    assert after.jobs[1].running
    assert not before.jobs[1].running  # a snapshot stays as it was


@given(
    moves=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=30),
    down=st.lists(st.sampled_from([frozenset(), frozenset({1})]), min_size=30, max_size=30),
)
def test_books_kept_from_snapshot_to_snapshot_equal_books_made_anew(moves, down):
    cluster = b.cluster(3, 4)
    books, held = OccupiedGpus(), {}
    for (job, count), now_down in zip(moves, down, strict=False):
        free_now = _anew(cluster, now_down, {k: v for k, v in held.items() if k != str(job)})
        found = free_now.find(count) if count else ()
        held[str(job)] = found or ()
        kept = books.update(cluster, now_down, {str(job): held[str(job)]})
        made = _anew(cluster, now_down, held)
        assert kept.num_free == made.num_free
        assert [kept.free_in(node) for node in range(3)] == [made.free_in(node) for node in range(3)]


def _anew(cluster, down, held):
    free = FreeGpus([0 if node in down else size for node, size in enumerate(cluster.gpus_per_node)])
    for gpus in held.values():
        there = tuple(gpu for gpu in gpus if gpu.node not in down)
        if there:
            free.hold(there)
    return free


def test_sharers_free_their_gpu_when_both_have_left():
    books, cluster = OccupiedGpus(), b.cluster(1, 2)
    one = b.gpus(1)
    assert books.update(cluster, frozenset(), {"a": one, "b": one}).num_free == 1
    assert books.update(cluster, frozenset(), {"a": ()}).num_free == 1
    assert books.update(cluster, frozenset(), {"b": ()}).num_free == 2


def test_a_named_job_of_the_same_count_stays_and_others_go_elsewhere(state):
    rig = Rig(state, ({"a": 2, "b": 1}, ()))
    rig.handle(submitted("a"), submitted("b"))
    snapshot = state.snapshot()
    plan = Plan({"a": b.candidate(2, 1.0), "b": b.candidate(4, 1.0)}, keeps=True)
    placed = place_changes(snapshot, plan)
    assert placed.allocation["a"] == state.jobs["a"].gpus
    assert len({gpu.node for gpu in placed.allocation["b"]}) == 1
    assert num_granted(snapshot, plan, placed.allocation) == (6, 2)
    assert free_gpus(snapshot).num_free == 5


def test_a_lazy_map_makes_values_when_asked_and_knows_its_keys():
    made = []
    lazy = LazyMap({"a": 1, "b": 2}, lambda key: made.append(key) or key.upper(), {})
    assert list(lazy) == ["a", "b"]
    assert len(lazy) == 2
    assert made == []
    assert lazy["a"] == lazy["a"] == "A"
    assert made == ["a"]
    with pytest.raises(KeyError):
        lazy["c"]


def test_a_content_plan_stands_when_a_job_ends_but_not_when_one_is_lost(state):
    rig = Rig(state, ({"a": 2, "b": 2, "c": 2}, ()), ({"c": 2}, ()))
    decide = rig.controller.policy.decide
    rig.controller.policy.decide = lambda *args: replace(decide(*args), content=True)
    rig.controller._pricing = Pricing(shares=False)
    rig.handle(submitted("a"), submitted("b"), submitted("c"))
    for name in "abc":
        started(rig, name)
    step = rig.handle(ev.JobFinished(time_s=5.0, job_id="a", attempt=1, outcome="completed"))
    assert step.facts == []  # no decision
    assert rig.controller.round_needed_s == math.inf
    step = rig.handle(ev.JobCrashed(time_s=6.0, job_id="c", attempt=1, reason="lost"))
    assert [command.kind for command in step.commands] == ["start"]


def test_a_plan_that_stands_is_looked_at_again_when_a_job_says_anew_what_it_costs(state):
    rig = Rig(state, ({"a": 2}, ()), ({"a": 2}, ()))
    rig.handle(submitted("a"))
    started(rig, "a")
    assert rig.controller.round_needed_s == math.inf
    told = ev.ProgressReported(time_s=5.0, job_id="a", attempt=1, epoch=1, effective_samples=10.0)
    assert rig.controller.round_needed_after([told]) == math.inf
    assert rig.handle(told).facts == []
    assert rig.controller.round_needed_s == math.inf
    anew = told.model_copy(update={"time_s": 6.0, "profile": b.profile()})
    assert rig.controller.round_needed_after([anew]) == -math.inf
    assert rig.handle(anew).facts == []  # in the next round, not at once
    assert rig.controller.round_needed_s == -math.inf


def test_a_job_may_say_what_it_costs_when_it_comes_up(state):
    """One that goes on from a checkpoint of another cluster brings the profile along."""
    rig = Rig(state, ({"a": 2}, ()))
    rig.handle(submitted("a"))
    up = ev.JobStarted(time_s=1.0, job_id="a", attempt=1, total_samples=100.0)
    assert rig.controller.round_needed_after([up]) == math.inf
    told = up.model_copy(update={"profile": b.profile()})
    assert rig.controller.round_needed_after([told]) == -math.inf
    assert rig.handle(told).facts == []
    assert rig.controller.round_needed_s == -math.inf


def test_a_plan_that_depends_on_progress_stands_until_a_report(state):
    rig = Rig(state, ({"a": 2}, ()), ({"a": 2}, ()))
    decide = rig.controller.policy.decide
    rig.controller.policy.decide = lambda *args: replace(decide(*args), until_report=True)
    rig.handle(submitted("a"))
    started(rig, "a")
    assert rig.controller.round_needed_s == math.inf
    told = ev.ProgressReported(time_s=5.0, job_id="a", attempt=1, epoch=1, effective_samples=10.0)
    assert rig.controller.round_needed_after([told]) == -math.inf
    assert rig.handle(told).facts == []  # in the next round, not at once
    assert rig.controller.round_needed_s == -math.inf


def test_a_running_job_that_finds_no_place_for_its_new_count_leaves_what_others_were_given(state):
    rig = Rig(state, ({"a": 2, "b": 1, "x": 1, "c": 1}, ()), ({"a": 4, "d": 2}, ("x",)))
    rig.controller.config = replace(rig.controller.config, max_replans=1)
    rig.handle(submitted("a"), submitted("b"), submitted("x"), submitted("c"))
    home = state.jobs["a"].gpus
    for name in "abxc":
        started(rig, name)
    step = rig.handle(submitted("d", at=2.0))  # b and c leave three GPUs on each node: no place for a, and d gets a's
    assert [(c.kind, c.job_id) for c in step.commands] == [("preempt", "a"), ("preempt", "x"), ("start", "d")]
    assert state.jobs["d"].gpus == home
    assert step.facts[0].gpus_granted == 4
    assert "do not lie together" in state.jobs["a"].reason
