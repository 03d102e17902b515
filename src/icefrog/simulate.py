"""Replays jobs under a policy: the library behind ``icefrog simulate``. The result is an event log; reports are folded
from it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from icefrog import events as ev
from icefrog.candidate_cache import CandidateCache
from icefrog.controller import CandidateSource, Controller, ControllerConfig
from icefrog.driver import LogWriter, RealClock, StallError, Turn, VirtualClock, run
from icefrog.eventlog import JsonlLog, MemoryLog
from icefrog.executors.sim.base import SimWorld
from icefrog.executors.sim.executor import SimExecutor
from icefrog.executors.sim.failures import Outages
from icefrog.executors.sim.truth import Curves, WorldConfig
from icefrog.executors.sim.world import World
from icefrog.policies import make_policy
from icefrog.profile import Profile
from icefrog.spec import ClusterSpec, JobSpec
from icefrog.state import ClusterState


@dataclass(frozen=True, slots=True)
class SimSettings:
    """What is not the workload, the cluster or the policy."""

    seed: int = 0
    round_s: float = 300.0
    restart_s: float = 60.0
    event_driven: bool = True
    """Decide on arrivals and completions, too, and not only once a round."""
    first_round_s: float = 0.0
    """When the first round is due."""
    world: WorldConfig | None = None
    """Errors of the estimates, failures, ...; its seed and restart_s are replaced by the two above."""
    outages: Outages = field(default_factory=Outages)
    """What takes nodes out of service."""
    check: bool = False
    """Check the state's invariants after every turn (slow)."""

    def world_config(self) -> WorldConfig:
        """The world's settings with this run's seed and restart cost."""
        return replace(self.world or WorldConfig(), seed=self.seed, restart_s=self.restart_s)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a simulation is, for whoever shows it."""

    policy: str
    now_s: float
    finished: int
    total: int


@dataclass(frozen=True, slots=True)
class DecisionTimes:
    """Real seconds spent in the controller in turns with a decision. The only wall-clock values of a run."""

    count: int = 0
    mean_s: float = 0.0
    max_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RunResult:
    """One policy's run. ``records`` is the whole event log where no file was asked for, else empty."""

    policy: str
    seed: int
    events_path: Path | None
    records: tuple[ev.AnyRecord, ...]
    state: ClusterState
    decisions: DecisionTimes
    wall_s: float
    stalled: str = ""
    """Why the run ended with unfinished jobs; empty: it did not."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated, under whichever policy: a world, and what of it the scheduler is told."""

    cluster: ClusterSpec
    world: SimWorld
    num_jobs: int
    estimates: Mapping[str, Profile]
    """The profiles that the state hands to policies, by job id."""
    candidates: Callable[[Collection[str]], CandidateSource] = CandidateCache
    """A fresh source of candidates for each run; it is told the ids of the unfinished jobs, kept up to date."""
    policy_defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options of policies that this scenario is published with, where the caller gives none."""


def icefrog_scenario(
    specs: Sequence[JobSpec],
    profiles: Mapping[str, Profile],
    curves: Mapping[str, Curves],
    cluster: ClusterSpec,
    settings: SimSettings | None = None,
) -> Scenario:
    """The IceFrog world (``docs/notes/simulator-world.md``): catalogue profiles, gradient curves, estimates with errors.

    Args:
        specs: the jobs, with ``submit_s`` and, for a replay, ``duration_s``.
        profiles: catalogue profile by job id.
        curves: gradient statistics by job id.
        cluster: the nodes.
        settings: seed, restart cost and the world's errors.
    """
    world = World(tuple(specs), profiles, curves, cluster, (settings or SimSettings()).world_config())
    return Scenario(cluster, world, len(specs), world.estimates)


def simulate(
    scenario: Scenario,
    policy: str,
    options: Mapping[str, Any] | None = None,
    settings: SimSettings | None = None,
    out_dir: Path | None = None,
    progress: Callable[[Progress], None] | None = None,
    watcher: LogWriter | None = None,
) -> RunResult:
    """Run a scenario under one policy.

    Same arguments, same event log, to the byte; it holds no wall-clock value.

    Args:
        scenario: the jobs, the cluster and the world.
        policy: its name.
        options: its options, by name.
        settings: seed, round, restart cost; those the scenario was made with.
        out_dir: where to write ``<policy>/events.jsonl``; None: the log is returned in ``records``.
        progress: called after every turn.
        watcher: is given every record as it is logged (a :class:`icefrog.report.record.Folder`); nothing is kept then.

    Raises:
        UserError: unknown policy or option.
    """
    settings = settings or SimSettings()
    chosen = make_policy(policy, {**scenario.policy_defaults.get(policy, {}), **(options or {})})
    config = ControllerConfig(seed=settings.seed, restart_s=settings.restart_s, event_driven=settings.event_driven)
    state = ClusterState(scenario.cluster, scenario.estimates)
    controller = Controller(state, chosen, scenario.candidates(state.active), config)
    watch = _Watch(policy, scenario.num_jobs, state, settings.check, progress)
    path = None if out_dir is None else out_dir / policy / "events.jsonl"
    started_s = RealClock().now_s()
    records: tuple[ev.AnyRecord, ...] = ()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with JsonlLog(path) as lines:
            log = lines if watcher is None else _Tee(lines, watcher)
            stalled = _drive(controller, scenario.world, log, settings, watch)
    elif watcher is not None:
        stalled = _drive(controller, scenario.world, watcher, settings, watch)
    else:
        memory = MemoryLog()
        stalled = _drive(controller, scenario.world, memory, settings, watch)
        records = tuple(memory.records)
    wall_s = RealClock().now_s() - started_s
    return RunResult(policy, settings.seed, path, records, state, watch.decisions(), wall_s, stalled)


def _drive(controller: Controller, world: SimWorld, log: LogWriter, settings: SimSettings, watch: _Watch) -> str:
    clock = VirtualClock()
    changes = settings.outages.changes(len(world.cluster.gpus_per_node), settings.seed)
    executor = SimExecutor(world, clock, changes)
    if controller.policy.oracle:
        controller.state.true_remaining_s = executor.remaining_s
    try:
        with _few_collections():
            run(
                controller,
                executor,
                log,
                clock,
                round_s=settings.round_s,
                first_round_s=settings.first_round_s,
                on_turn=watch.turn,
            )
    except StallError as stall:
        return str(stall)
    return ""


@contextmanager
def _few_collections() -> Iterator[None]:
    """Let Python look for cyclic garbage seldom: a simulation makes next to none, and has much to look through."""
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS_A_COLLECTION, *before[1:])
    gc.freeze()  # the jobs of the trace stay: not to be looked through again
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


_OBJECTS_A_COLLECTION = 1_000_000


@dataclass(frozen=True, slots=True)
class _Tee:
    """One log, written to two places."""

    first: LogWriter
    second: LogWriter

    def append(self, records: Sequence[ev.AnyRecord]) -> None:
        self.first.append(records)
        self.second.append(records)


class _Watch:
    """Looks on: progress, decision times, invariants."""

    def __init__(
        self,
        policy: str,
        total: int,
        state: ClusterState,
        check: bool,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._policy, self._total, self._state = policy, total, state
        self._check, self._progress = check, progress
        self._count, self._sum_s, self._max_s = 0, 0.0, 0.0

    def turn(self, turn: Turn) -> None:
        if self._check:
            self._state.check()
        if turn.step.facts and turn.step.facts[-1].kind == "plan_decided":
            self._count += 1
            self._sum_s += turn.decision_s
            self._max_s = max(self._max_s, turn.decision_s)
        if self._progress is not None:
            finished = len(self._state.jobs) - len(self._state.active)
            self._progress(Progress(self._policy, turn.now_s, finished, self._total))

    def decisions(self) -> DecisionTimes:
        return DecisionTimes(self._count, self._sum_s / max(self._count, 1), self._max_s)
