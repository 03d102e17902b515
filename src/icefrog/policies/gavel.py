"""Gavel: which job should spend how much of its time on which GPU type, and rounds that bring that about."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from icefrog.gpu_types import ANY_GPU
from icefrog.policies import base, gavel_allocation
from icefrog.profile import FloatArray
from icefrog.types import Candidate, Candidates, JobView, Plan, Pricing, Snapshot

_DIGITS = 6  # of what is remembered
_LEAST_S = 1e-3
_LEAST_SHARE = 1e-6

Objective = Literal["las", "makespan", "finish-time-fairness"]


@dataclass(slots=True)
class _Account:
    """What is remembered of one job; lists by GPU type."""

    share: list[float]  # X: of its time, as last allocated; empty: never yet
    owed_s: list[float]  # integral of X over time
    got_s: list[float]  # time that it ran there
    isolated_s: float = 0.0  # what its progress so far would have taken with 1/M of the cluster
    left: float | None = None  # samples left when that was last brought up to date

    def to_json(self) -> list[Any]:
        """In the order of the fields."""
        lists = [[round(value, _DIGITS) for value in values] for values in (self.share, self.owed_s, self.got_s)]
        return [*lists, round(self.isolated_s, _DIGITS), self.left]


@dataclass(frozen=True, slots=True)
class _Memory:
    """What is remembered of the last decision."""

    turn: int
    at_s: float
    accounts: Mapping[str, _Account]

    @classmethod
    def of(cls, snapshot: Snapshot, types: Sequence[str]) -> _Memory | None:
        """None: there was no decision yet, or the cluster had other GPU types."""
        memory = snapshot.memory
        if not isinstance(memory, dict) or memory.get("types") != list(types):
            return None
        accounts = {job_id: _Account(*map(copy, fields)) for job_id, fields in memory["jobs"].items()}
        return cls(memory["turn"], memory["at_s"], accounts)


@dataclass(frozen=True, slots=True)
class _Table:
    """The jobs that can run at their requested count, row by row, on the GPU types, column by column."""

    jobs: tuple[JobView, ...]
    types: tuple[str, ...]
    capacity: FloatArray  # GPUs in service, (J,)
    num_gpus: FloatArray  # (M,)
    options: tuple[tuple[Candidate | None, ...], ...]
    throughput: FloatArray  # (M, J); 0: cannot run there
    remaining_s: FloatArray  # (M, J); inf: cannot run there
    placed: tuple[int | None, ...]  # the column that each job runs in


class Gavel:
    """Heterogeneity-aware time sharing at the requested GPU counts (section 4 and 5 of the paper).

    Every round a linear program (:mod:`icefrog.policies.gavel_allocation`) says which share X[m, j] of its time each job m
    should spend on GPU type j. Then jobs take turns: (job, type) pairs are served by priority while GPUs last, where

        priority[m, j] = X[m, j] / f[m, j],    f: the share of its time that the job has spent there

    with X averaged over the job's life, since it changes as jobs come and go; a pair that never ran comes first. A pair
    with X = 0 is served last: no GPU idles while a job waits that can use it. Between rounds running jobs stay, and GPUs
    that come free are given out in the same order.

    On a cluster of one type it is least attained service: every job gets the same GPU time.
    """

    name: ClassVar[str] = "gavel"
    source: ClassVar[str] = "Gavel (OSDI'20): heterogeneity-aware max-min fairness, makespan or finish-time fairness"
    oracle: ClassVar[bool] = False

    class Options(base.Options):
        """Knobs of ``gavel``."""

        objective: Objective = Field(
            default="las", description="las: max-min fairness; makespan: least total duration; finish-time-fairness"
        )
        heterogeneity_aware: bool = Field(
            default=True, description="false: all types are taken for equally fast (the paper's baseline)"
        )
        round_s: float = Field(default=360.0, gt=0, description="length of a turn, s (6 minutes in the paper)")

    def __init__(self, options: Options) -> None:
        self.options = options

    @property
    def pricing(self) -> Pricing:
        """The requested count on every type; how far jobs are matters to all objectives but shares of time."""
        return Pricing(by_gpu_type=True, counts="requested", reads_progress=self.options.objective != "las")

    def decide(self, snapshot: Snapshot, candidates: Candidates) -> Plan:
        """Keep the accounts; allocate anew if a round begins; hand out GPUs by priority."""
        table = self._table(snapshot, candidates)
        turn = math.floor(snapshot.now_s / self.options.round_s)
        last = _Memory.of(snapshot, table.types)
        accounts = _accounts(snapshot, table.types, last)
        begins = last is None or last.turn != turn
        if begins and table.jobs:
            for job, shares in zip(table.jobs, self._allocate(snapshot, table, accounts).tolist(), strict=True):
                accounts[job.job_id].share = shares
        chosen = _serve(table, accounts, keep=not begins)
        return self._plan(snapshot, table, accounts, chosen, turn)

    # -- what there is -----------------------------------------------------------------------------------------------------

    def _table(self, snapshot: Snapshot, candidates: Candidates) -> _Table:
        there = snapshot.gpus_by_type
        types = tuple(there)
        jobs, options = [], []
        for job in snapshot.jobs:
            wanted = job.spec.requested_gpus
            by_type = {
                c.config.gpu_type if c.config.gpu_type in there else types[0]: c
                for c in candidates.get(job.job_id, ())
                if not c.config.shared and c.config.num_gpus == wanted
            }
            row = tuple(by_type.get(t) if wanted <= there[t] else None for t in types)
            if any(row):
                jobs.append(job)
                options.append(row)
        shape = (len(jobs), len(types))
        throughput, remaining_s = np.zeros(shape), np.full(shape, np.inf)
        for index, (job, row) in enumerate(zip(jobs, options, strict=True)):
            for column, option in enumerate(row):
                if option is not None:
                    throughput[index, column] = option.estimate.effective_progress
                    remaining_s[index, column] = max(base.remaining_s(option, job, snapshot.now_s), _LEAST_S)
        if not self.options.heterogeneity_aware and jobs:
            able = throughput > 0.0
            throughput = np.where(able, 1.0, 0.0)
            remaining_s = np.where(able, remaining_s.min(axis=1, keepdims=True), np.inf)
        return _Table(
            jobs=tuple(jobs),
            types=types,
            capacity=np.array([float(there[t]) for t in types]),
            num_gpus=np.array([float(job.spec.requested_gpus) for job in jobs]),
            options=tuple(options),
            throughput=throughput,
            remaining_s=remaining_s,
            placed=tuple(_column(job, snapshot, types) for job in jobs),
        )

    # -- how much of its time where ----------------------------------------------------------------------------------------

    def _allocate(self, snapshot: Snapshot, table: _Table, accounts: Mapping[str, _Account]) -> FloatArray:
        """X, shape (M, J)."""
        if self.options.objective == "las":
            weight = np.array([job.spec.weight for job in table.jobs])
            gains = gavel_allocation.las_gains(table.throughput, table.num_gpus, weight, table.capacity)
            return gavel_allocation.max_min(gains, table.num_gpus, table.capacity)
        if self.options.objective == "makespan":
            return gavel_allocation.max_min(1.0 / table.remaining_s, table.num_gpus, table.capacity)
        age_s = np.array([max(snapshot.now_s - job.submit_s, 0.0) for job in table.jobs])
        isolated_s = self._isolated_s(table, accounts)
        return gavel_allocation.finish_time_fair(table.remaining_s, age_s, isolated_s, table.num_gpus, table.capacity)[
            0
        ]

    def _isolated_s(self, table: _Table, accounts: Mapping[str, _Account]) -> FloatArray:
        """D_m: from submission to end with 1/M of the cluster, s, shape (M,); M as it was while the job made progress."""
        shares = gavel_allocation.isolated(table.num_gpus, table.capacity)
        left_s = 1.0 / np.maximum((shares / table.remaining_s).sum(axis=1), np.finfo(float).tiny)
        total_s = left_s.copy()
        for row, job in enumerate(table.jobs):
            account, left = accounts[job.job_id], job.remaining_samples
            if left is not None and account.left is not None and left < account.left:
                account.isolated_s += (account.left - left) / left * float(left_s[row])
            account.left = left
            total_s[row] += account.isolated_s
        return np.asarray(total_s)

    # -- back --------------------------------------------------------------------------------------------------------------

    def _plan(
        self,
        snapshot: Snapshot,
        table: _Table,
        accounts: Mapping[str, _Account],
        chosen: Mapping[int, int],
        turn: int,
    ) -> Plan:
        choices: dict[str, Candidate] = {}
        reasons = {job.job_id: f"cannot run on {job.spec.requested_gpus} GPUs here" for job in snapshot.jobs}
        settled = True  # until a job comes or goes
        for row, job in enumerate(table.jobs):
            column = chosen.get(row)
            if column is None:
                reasons[job.job_id] = "waits for its turn: others are owed more time"
                settled = False
                continue
            option = table.options[row][column]
            assert option is not None
            choices[job.job_id] = option
            kind = "" if table.types[column] == ANY_GPU else f"{table.types[column]} "
            reasons[job.job_id] = f"its turn on {job.spec.requested_gpus} {kind}GPUs"
            share = accounts[job.job_id].share
            settled = settled and bool(share) and sum(x > 0.0 for x in share) == (share[column] > 0.0)
        memory = {
            "turn": turn,
            "at_s": snapshot.now_s,
            "types": list(table.types),
            "jobs": {job_id: account.to_json() for job_id, account in accounts.items()},
        }
        stands_until_s = math.inf if settled else (turn + 1) * self.options.round_s
        return Plan(choices, reasons=reasons, memory=memory, stands_until_s=stands_until_s)


def _accounts(snapshot: Snapshot, types: Sequence[str], last: _Memory | None) -> dict[str, _Account]:
    """Every job's account, brought up to now."""
    accounts: dict[str, _Account] = {}
    for job in snapshot.jobs:
        known = last.accounts.get(job.job_id) if last is not None else None
        account = accounts[job.job_id] = known or _Account([], [0.0] * len(types), [0.0] * len(types))
        if last is None or known is None:
            continue
        passed_s = max(snapshot.now_s - last.at_s, 0.0)
        for column, share in enumerate(account.share):
            account.owed_s[column] += share * passed_s
        column_now = _column(job, snapshot, types)
        if column_now is not None:
            since_s = last.at_s if job.holding_since_s is None else max(job.holding_since_s, last.at_s)
            account.got_s[column_now] += max(snapshot.now_s - since_s, 0.0)
    return accounts


def _column(job: JobView, snapshot: Snapshot, types: Sequence[str]) -> int | None:
    """The type that the job runs on."""
    return types.index(snapshot.cluster.node_types[job.gpus[0].node]) if job.gpus else None


def _serve(table: _Table, accounts: Mapping[str, _Account], *, keep: bool) -> dict[int, int]:
    """Row -> column of the jobs that run: the running ones first if they are to be kept, then pairs by priority."""
    free = table.capacity.copy()
    chosen: dict[int, int] = {}

    def give(row: int, column: int) -> None:
        if row not in chosen and table.num_gpus[row] <= free[column]:
            chosen[row] = column
            free[column] -= table.num_gpus[row]

    if keep:
        for row, job in enumerate(table.jobs):
            column = table.placed[row]
            if column is not None and job.num_gpus == job.spec.requested_gpus and table.options[row][column]:
                give(row, column)
    relative = table.throughput / np.maximum(table.throughput.max(axis=1, initial=0.0, keepdims=True), _LEAST_S)
    pairs = [
        (_rank(accounts[job.job_id], column, float(relative[row, column]), table.placed[row] == column), row, column)
        for row, job in enumerate(table.jobs)
        if row not in chosen
        for column in range(len(table.types))
        if table.options[row][column] is not None
    ]
    for _, row, column in sorted(pairs):
        give(row, column)
    return chosen


def _rank(account: _Account, column: int, relative: float, runs_there: bool) -> tuple[int, float, bool, float]:
    """The smaller, the earlier served: never ran there, then by priority, then pairs that were allocated nothing.

    Of equal priorities whoever runs goes on (a change costs a restart), then the faster type.
    """
    if not account.share:  # it came while the round was under way
        return 0, 0.0, not runs_there, -relative
    share = account.share[column]
    if share <= _LEAST_SHARE:
        return 2, 0.0, not runs_there, -relative
    if account.got_s[column] <= 0.0:
        return 0, -share, not runs_there, -relative
    return 1, -account.owed_s[column] / account.got_s[column], not runs_there, -relative
