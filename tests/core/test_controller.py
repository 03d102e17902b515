"""From events to commands, with scripted policies, and through the driver against a scripted executor."""

from __future__ import annotations

import pytest

from icefrog import events as ev
from icefrog.controller import Controller, ControllerConfig, PolicyError, verify
from icefrog.driver import StallError, VirtualClock, run
from icefrog.errors import UserError
from icefrog.policies import make_policy, policy_names
from icefrog.policies.base import Options
from icefrog.state import ClusterState, Phase
from icefrog.testing import builders as b
from icefrog.types import Plan, Pricing


def offers(view, cluster, now_s, pricing=None):
    counts = [a for a in view.spec.gpus if a <= cluster.num_gpus]
    options = [b.candidate(a, 1000.0 / a) for a in counts]
    return (*options, b.candidate(1, 1100.0, shared=True)) if view.spec.share else tuple(options)


class Scripted:
    """Gives each job what the script says; the rest waits."""

    name, source, oracle, Options = "scripted", "tests", False, Options
    pricing = Pricing(freezing="tuner")

    def __init__(self, *rounds, pairs=()):
        self.rounds = list(rounds)
        self.pairs = pairs

    def decide(self, snapshot, candidates):
        counts = self.rounds.pop(0) if len(self.rounds) > 1 else self.rounds[0]
        choices = {}
        for job in snapshot.jobs:
            count = counts.get(job.job_id)
            if count is not None:
                shared = count == 0.5
                found = [c for c in candidates[job.job_id] if c.config.shared == shared and c.config.num_gpus >= count]
                if found:
                    choices[job.job_id] = found[0]
        return Plan(choices, self.pairs, {job.job_id: "scripted" for job in snapshot.jobs})


def controller(state, *rounds, pairs=(), **config):
    return Controller(state, Scripted(*rounds, pairs=pairs), offers, ControllerConfig(**config))


def submitted(name="a", at=0.0, **changes):
    return ev.JobSubmitted(time_s=at, job=b.job_spec(name, gpus=(1, 2, 4), **changes))


def kinds(step):
    return [command.kind for command in step.commands]


def test_a_job_is_started_resized_and_preempted_as_the_plan_says(state):
    c = controller(state, {"a": 1}, {"a": 4}, {"a": 4}, {})
    step = c.handle([submitted()])
    assert kinds(step) == ["start"]
    assert step.commands[0].grant.num_gpus == 1
    c.handle([ev.JobStarted(time_s=1.0, job_id="a", attempt=1)])  # calls for no decision
    assert kinds(c.handle([ev.Tick(time_s=300.0)])) == ["resize"]
    stopped = ev.JobStopped(time_s=301.0, job_id="a", attempt=1)
    assert kinds(c.handle([stopped, ev.JobStarted(time_s=302.0, job_id="a", attempt=2)])) == []  # same plan: no command
    assert kinds(c.handle([ev.Tick(time_s=600.0)])) == ["preempt"]
    assert state.jobs["a"].phase is Phase.PREEMPTING


def test_a_job_that_is_still_leaving_gets_its_gpus_when_it_has_left(state):
    c = controller(state, {"a": 1}, {}, {"a": 2})
    c.handle([submitted()])
    c.handle([ev.JobStarted(time_s=1.0, job_id="a", attempt=1)])
    assert kinds(c.handle([ev.Tick(time_s=300.0)])) == ["preempt"]
    assert kinds(c.handle([ev.Tick(time_s=301.0)])) == []
    step = c.handle([ev.JobStopped(time_s=302.0, job_id="a", attempt=1)])
    assert kinds(step) == ["start"]
    assert step.commands[0].attempt == 2


def test_a_job_larger_than_the_cluster_is_refused_and_does_not_block(state):
    c = controller(state, {"huge": 16, "a": 1})
    step = c.handle([ev.JobSubmitted(time_s=0.0, job=b.job_spec("huge", gpus=(16,))), submitted()])
    assert state.jobs["huge"].phase is Phase.FAILED
    assert "needs at least 16 GPUs, the cluster has 8" in step.facts[0].reason
    assert state.jobs["a"].phase is Phase.STARTING


def test_a_job_that_keeps_dying_is_given_up(state):
    c = controller(state, {"a": 1}, max_crashes=2)
    c.handle([submitted()])
    for attempt in (1, 2, 3):
        assert state.jobs["a"].phase is Phase.STARTING
        c.handle([ev.JobCrashed(time_s=float(attempt), job_id="a", attempt=attempt, reason="boom")])
    assert state.jobs["a"].phase is Phase.FAILED
    assert state.jobs["a"].reason == "died 3 times in a row; the last: boom"


def test_a_job_that_gets_on_between_crashes_is_not_given_up(state):
    c = controller(state, {"a": 1}, max_crashes=1)
    c.handle([submitted()])
    for attempt in range(1, 8):
        at = {"time_s": float(attempt), "job_id": "a", "attempt": attempt}
        c.handle([ev.JobStarted(**at)])
        c.handle([ev.ProgressReported(**at, epoch=attempt, effective_samples=10.0 * attempt)])
        c.handle([ev.JobCrashed(**at, reason="killed")])
    assert state.jobs["a"].phase is Phase.STARTING
    assert state.jobs["a"].num_crashes == 7


@pytest.mark.parametrize("last", ["stopped", "crashed", "finished", "none"])
def test_a_cancelled_job_is_never_started_again(state, last):
    c = controller(state, {"a": 1})
    c.handle([submitted()])
    c.handle([ev.JobStarted(time_s=1.0, job_id="a", attempt=1)])
    end = {
        "stopped": ev.JobStopped(time_s=2.0, job_id="a", attempt=1),
        "crashed": ev.JobCrashed(time_s=2.0, job_id="a", attempt=1, reason="boom"),
        "finished": ev.JobFinished(time_s=2.0, job_id="a", attempt=1, outcome="completed"),
    }
    events = [ev.CancelRequested(time_s=2.0, job_id="a")]
    if last != "none":
        events.append(end[last])
    step = c.handle(events)
    if last == "none":
        assert kinds(step) == ["stop"]
        step = c.handle([end["stopped"]])
    assert state.jobs["a"].phase is (Phase.COMPLETED if last == "finished" else Phase.CANCELLED)
    assert "start" not in kinds(step)


def test_a_plan_that_finds_no_place_is_taken_back_to_the_policy(state):
    # 3 + 3 + 2 fits 8 GPUs in number, not on two nodes of 4.
    c = controller(state, {"a": 3, "b": 3, "c": 2})
    jobs = [
        ev.JobSubmitted(time_s=0.0, job=b.job_spec(n, gpus=g, batch={"global": 6}))
        for n, g in (("a", (3,)), ("b", (3,)))
    ]
    jobs.append(ev.JobSubmitted(time_s=0.0, job=b.job_spec("c", gpus=(1, 2), batch={"global": 6})))
    c.policy.rounds = [{"a": 3, "b": 3, "c": 2}, {"a": 3, "b": 3, "c": 1}]
    c.handle(jobs)
    assert {name: len(job.gpus) for name, job in state.jobs.items()} == {"a": 3, "b": 3, "c": 1}


def test_a_pair_shares_and_the_survivor_is_granted_the_whole_gpu_without_a_restart(state):
    both = {"a": 0.5, "b": 0.5}
    c = controller(state, both, pairs=(("a", "b"),))
    c.handle([submitted("a", share=True), submitted("b", share=True)])
    assert state.jobs["a"].gpus == state.jobs["b"].gpus
    c.handle([ev.JobStarted(time_s=1.0, job_id=name, attempt=1) for name in both])
    c.policy.rounds, c.policy.pairs = [{"b": 1}], ()
    step = c.handle([ev.JobFinished(time_s=9.0, job_id="a", attempt=1, outcome="completed")])
    assert kinds(step) == ["regrant"]
    assert not state.jobs["b"].shared


def test_reasons_are_logged_only_when_they_change(state):
    c = controller(state, {})
    assert c.handle([submitted()]).facts[-1].reasons == {"a": "scripted"}
    assert c.handle([ev.Tick(time_s=300.0)]).facts[-1].reasons == {}


class TestVerify:
    def problem(self, state, plan):
        state.apply(submitted("a", share=True))
        state.apply(submitted("b", share=True))
        snapshot = state.snapshot()
        options = {job.job_id: offers(job, snapshot.cluster, 0.0) for job in snapshot.jobs}
        verify(plan(options), snapshot, options)

    def test_too_many_gpus(self, state):
        state.cluster = b.cluster(1, 4)
        with pytest.raises(PolicyError, match="uses 8 GPUs of 4"):
            self.problem(state, lambda o: Plan({j: o[j][2] for j in o}, (), {"a": "", "b": ""}))

    def test_a_configuration_that_was_not_offered(self, state):
        with pytest.raises(PolicyError, match="did not offer"):
            self.problem(state, lambda o: Plan({"a": b.candidate(3, 1.0)}, (), {"a": "", "b": ""}))

    def test_a_sharer_without_a_partner(self, state):
        with pytest.raises(PolicyError, match="exactly one partner"):
            self.problem(state, lambda o: Plan({"a": o["a"][3]}, (), {"a": "", "b": ""}))

    def test_a_missing_reason(self, state):
        with pytest.raises(PolicyError, match="no reason given"):
            self.problem(state, lambda o: Plan({}, (), {"a": ""}))


class ScriptedExecutor:
    """Starts everything at once; each attempt runs for a fixed time."""

    def __init__(self, clock, arrivals, service_s):
        self.clock, self.queue, self.service_s = clock, sorted(arrivals, key=lambda e: e.time_s), service_s

    def adopt(self, state): ...

    def close(self): ...

    def submit(self, commands):
        for command in commands:
            now = self.clock.now_s()
            attempt = {"job_id": command.job_id, "attempt": command.attempt}
            if command.kind == "start":
                self.queue += [
                    ev.JobStarted(time_s=now, **attempt),
                    ev.JobFinished(time_s=now + self.service_s, outcome="completed", **attempt),
                ]
        self.queue.sort(key=lambda e: e.time_s)

    def poll(self, until_s):
        if not self.queue or self.queue[0].time_s > until_s:
            return []
        time_s = self.queue[0].time_s
        now = [e for e in self.queue if e.time_s == time_s]
        self.queue = self.queue[len(now) :]
        self.clock.wait_until(time_s)
        return now

    def idle(self):
        return not self.queue


class ListLog(list):
    def append(self, records):
        self.extend(records)


def drive(policy, arrivals, *, service_s=100.0, event_driven=True, cluster=None):
    clock, log = VirtualClock(), ListLog()
    state = ClusterState(cluster or b.cluster(1, 2))
    control = Controller(state, policy, offers, ControllerConfig(event_driven=event_driven))
    run(control, ScriptedExecutor(clock, arrivals, service_s), log, clock, round_s=300.0)
    return state, log


def test_the_driver_runs_fifo_to_the_end_and_the_log_replays_to_the_same_state():
    arrivals = [submitted(f"j{i}", at=10.0 * i, num_gpus=2) for i in range(3)]
    state, log = drive(make_policy("fifo"), arrivals)
    assert [job.finish_s for job in state.jobs.values()] == [100.0, 200.0, 300.0]
    replayed = ClusterState(state.cluster)
    replayed.replay(log)
    assert replayed.jobs == state.jobs


def test_without_event_driven_decisions_jobs_wait_for_the_round():
    state, _ = drive(make_policy("fifo"), [submitted("a", at=10.0, num_gpus=1)], event_driven=False)
    assert state.jobs["a"].first_start_s == 300.0


def test_an_idle_gap_of_a_year_costs_no_rounds():
    arrivals = [submitted("a", num_gpus=1), submitted("b", at=3.0e7, num_gpus=1)]
    _, log = drive(make_policy("fifo"), arrivals)
    assert sum(isinstance(record, ev.Tick) for record in log) < 20


def test_a_stall_names_the_job():
    with pytest.raises(StallError, match="forgotten"):
        drive(Scripted({}), [submitted("forgotten")])


def test_policies_are_made_by_name_with_checked_options():
    assert {"fifo", "srtf", "icefrog"} <= set(policy_names())
    assert make_policy("fifo", {"backfill": "true"}).options.backfill == "aggressive"
    with pytest.raises(UserError, match="no policy is called 'fido'") as error:
        make_policy("fido")
    assert "did you mean 'fifo'" in error.value.hint
    with pytest.raises(UserError, match="has no option 'backfil'"):
        make_policy("fifo", {"backfil": "1"})
    with pytest.raises(UserError, match=r"fifo\.backfill"):
        make_policy("fifo", {"backfill": "maybe"})


def test_backfilling_lets_small_jobs_pass():
    arrivals = [
        submitted("long", num_gpus=1),
        submitted("wide", at=1.0, num_gpus=2),
        submitted("small", at=2.0, num_gpus=1),
    ]
    plain, _ = drive(make_policy("fifo"), arrivals)
    filled, _ = drive(make_policy("fifo", {"backfill": True}), arrivals)
    assert plain.jobs["small"].first_start_s > plain.jobs["wide"].first_start_s
    assert filled.jobs["small"].first_start_s == 2.0


def test_srtf_preempts_the_longer_job():
    arrivals = [submitted("long", num_gpus=2, duration_s=1e4), submitted("short", at=5.0, num_gpus=2, duration_s=10.0)]
    state = ClusterState(b.cluster(1, 2))
    control = Controller(state, make_policy("srtf"), offers)
    control.handle(arrivals[:1])
    control.handle([ev.JobStarted(time_s=1.0, job_id="long", attempt=1)])
    assert kinds(control.handle(arrivals[1:])) == ["preempt", "start"]


def test_fifo_never_moves_a_running_job_to_make_room():
    state = ClusterState(b.cluster(2, 2))
    control = Controller(state, make_policy("fifo"), offers)
    control.handle([submitted(f"j{i}", num_gpus=1) for i in range(3)])  # two on the first node, one on the second
    control.handle([ev.JobStarted(time_s=1.0, job_id=f"j{i}", attempt=1) for i in range(3)])
    control.handle([ev.JobFinished(time_s=2.0, job_id="j0", attempt=1, outcome="completed")])
    assert kinds(control.handle([submitted("wide", at=3.0, num_gpus=2), submitted("late", at=3.0, num_gpus=1)])) == []
    assert "spread over nodes" in state.jobs["wide"].reason
    step = control.handle([ev.JobFinished(time_s=4.0, job_id="j2", attempt=1, outcome="completed")])
    assert [(c.kind, c.job_id) for c in step.commands] == [("start", "wide"), ("start", "late")]


def test_a_policy_is_handed_back_its_own_memory_and_no_other_s(state):
    state.apply(submitted())
    for policy, memory in (("one", {"x": 1}), ("two", {"y": 2})):
        state.apply(ev.PlanDecided(time_s=0.0, policy=policy, gpus_granted=0, waiting=1, memory=memory))
    assert state.snapshot(policy="one").memory == {"x": 1}
    assert state.snapshot(policy="three").memory is None


def test_a_sharer_whose_priced_batch_changes_is_restarted_with_it(state):
    both = {"a": 0.5, "b": 0.5}
    c = controller(state, both, pairs=(("a", "b"),))
    c.handle([submitted("a", share=True), submitted("b", share=True)])
    c.handle([ev.JobStarted(time_s=1.0, job_id=name, attempt=1) for name in both])
    assert kinds(c.handle([ev.Tick(time_s=300.0)])) == []
    smaller = b.candidate(1, 1100.0, shared=True, batch_per_gpu=16)
    c._candidates = lambda view, cluster, now_s, pricing: (smaller,)
    assert kinds(c.handle([ev.Tick(time_s=600.0)])) == ["resize", "resize"]
