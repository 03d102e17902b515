"""A tiny play: jobs with true lengths under one policy, on exact GPUs, without an engine. For worked examples by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from icefrog.policies import make_policy
from icefrog.testing.builders import cluster, job_spec
from icefrog.testing.policies import Case, after
from icefrog.types import Candidate, Config, Estimate, JobView, Plan, Snapshot


@dataclass(frozen=True)
class Role:
    """A job of the play: how long it runs on the GPUs it asks for, and what the scheduler believes of it."""

    name: str
    length_s: float
    gpus: int = 1
    submit_s: float = 0.0
    believed_s: float | None = None
    util_pct: float | None = None  # given: it may share a GPU
    mem_bytes: float = 1e9
    spec: Mapping[str, Any] = field(default_factory=dict)


def view(role: Role) -> JobView:
    """The job before anything happened to it."""
    spec = {"gpus": (role.gpus,), "batch": {"global": 64 * role.gpus}, "submit_s": role.submit_s, **role.spec}
    return JobView(
        spec=job_spec(role.name, **spec), profile=None, submit_s=role.submit_s, gpus=(), shared=False, running=False,
        config=None, effective_samples=0.0, remaining_samples=role.believed_s or role.length_s, frozen_layers=0, stats=None,
        attained_gpu_s=0.0, holding_since_s=None, waiting_since_s=role.submit_s, restart_s=0.0, num_restarts=0,
    )  # fmt: skip


class Stage:
    """Jobs progress at speed 1 while they have GPUs (sharers too); decisions on arrivals, completions and ``round_s``."""

    def __init__(self, policy: str, roles: list[Role], nodes: int = 1, gpus: int = 1, **options: Any) -> None:
        self.policy = make_policy(policy, options)
        self.roles = {role.name: role for role in roles}
        self.left_s = {role.name: role.length_s for role in roles}
        self.finish_s: dict[str, float] = {}
        self.gpu_s = dict.fromkeys(self.roles, 0.0)
        self.plans: list[Plan] = []
        self.snapshot = Snapshot(0.0, cluster(nodes, gpus), (), memory=None)

    def play(self, until_s: float = math.inf, round_s: float = math.inf) -> Stage:
        """Go on until everybody has finished, or until ``until_s``."""
        while self.snapshot.now_s < until_s and len(self.finish_s) < len(self.roles):
            self.decide()
            now_s = self.snapshot.now_s
            running = {job.job_id for job in self.snapshot.views.running}
            times = [now_s + self.left_s[name] for name in running]
            times += [role.submit_s for role in self.roles.values() if role.submit_s > now_s]
            times.append((math.floor(now_s / round_s) + 1) * round_s if running and round_s < math.inf else math.inf)
            self._pass(min(*times, until_s), running)
        return self

    def decide(self) -> Plan:
        """One decision, carried out at once."""
        now_s, there = self.snapshot.now_s, {job.job_id for job in self.snapshot.jobs}
        new = [r for r in self.roles.values() if r.submit_s <= now_s and r.name not in there | self.finish_s.keys()]
        jobs = (*self.snapshot.jobs, *map(view, sorted(new, key=lambda role: role.submit_s)))
        told = dict(self.left_s) if self.policy.oracle else None
        self.snapshot = replace(self.snapshot, jobs=jobs, oracle_remaining_s=told)
        plan = self.policy.decide(self.snapshot, {job.job_id: self._options(job) for job in jobs})
        self.plans.append(plan)
        self.snapshot = after(Case(self.snapshot, frozenset()), self.policy, plan).snapshot
        if plan.memory is not None:
            self.snapshot = replace(self.snapshot, memory=json.loads(json.dumps(plan.memory)))
        return plan

    def _pass(self, now_s: float, running: set[str]) -> None:
        passed_s = now_s - self.snapshot.now_s
        jobs = []
        for job in self.snapshot.jobs:
            name = job.job_id
            if name in running:
                self.left_s[name] -= passed_s
                self.gpu_s[name] += passed_s * len(job.gpus)
                left = max((job.remaining_samples or 0.0) - passed_s, 1.0)
                job = replace(job, effective_samples=job.effective_samples + passed_s, remaining_samples=left)
            if self.left_s[name] > 1e-9:
                jobs.append(job)
            else:
                self.finish_s[name] = now_s
        memory = self.snapshot.memory
        self.snapshot = replace(self.snapshot, now_s=now_s, jobs=tuple(jobs), memory=memory)

    def _options(self, job: JobView) -> tuple[Candidate, ...]:
        role, left_s = self.roles[job.job_id], job.remaining_samples or 0.0
        tta_s = self.snapshot.now_s - job.submit_s + left_s
        estimate = Estimate(1.0, 1.0, 1.0, 1.0, role.mem_bytes, role.util_pct or 90.0, tta_s)
        alone = Candidate(Config(role.gpus, 64), estimate)
        return (alone,) if role.util_pct is None else (alone, Candidate(Config(1, 64, shared=True), estimate))

    @property
    def jct_s(self) -> dict[str, float]:
        """Completion times after submission."""
        return {name: finish_s - self.roles[name].submit_s for name, finish_s in self.finish_s.items()}

    @property
    def mean_jct_s(self) -> float:
        """Their mean."""
        return sum(self.jct_s.values()) / len(self.jct_s)
