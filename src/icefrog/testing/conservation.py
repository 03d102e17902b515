"""Conservation laws, audited from the lines of an event log alone.

Nothing of the state machine, the records' types or the report is used: what they account for can be held against sums that
are made here in another way. A line is a JSON object as ``events.jsonl`` holds it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

Line: TypeAlias = Mapping[str, Any]

_GRANTS = frozenset({"start", "resize"})
_ENDS = frozenset({"job_finished", "job_failed"})
_LEAVES = frozenset({"job_stopped", "job_crashed", "job_finished"})
_TIME_EPS_S = 1e-5  # times in a log are whole microseconds


@dataclass(slots=True)
class JobBooks:
    """One job, added up from the log. Times in seconds."""

    submit_s: float
    requested_gpus: int
    logged_s: float | None  # service time at the requested GPUs, of a job that is replayed
    finish_s: float | None = None
    waited_s: float = 0.0
    held_s: float = 0.0
    gpu_s: float = 0.0  # a sharer counts half
    starts: int = 0
    restarting_s: float = 0.0  # of held_s: what starts but the first cost, no progress
    as_logged: bool = (
        True  # every attempt: alone on the requested GPUs, nothing frozen, one batch, as few nodes as possible
    )
    promised: float | None = None  # P0
    counted: float | None = None  # effective samples at the end, by the last report and the rate that it gave
    gap: float | None = None
    """Largest |effective samples reported - what the report before it promised for now| / P0; None: there were no two
    reports with nothing else between them."""

    @property
    def work_gap_s(self) -> float | None:
        """|time held without restarts - logged time|, of a job that ran as it was logged to its end."""
        if self.logged_s is None or not self.as_logged or self.finish_s is None or not self.starts:
            return None
        return abs(self.held_s - self.restarting_s - self.logged_s)


@dataclass(slots=True)
class Audit:
    """What a log adds up to."""

    jobs: dict[str, JobBooks] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    """Laws that do not hold, in words; empty: all do."""
    in_use_gpu_s: float = 0.0
    """GPU-seconds, added up GPU by GPU."""
    most_in_use: float = 0.0
    """GPUs held at a time, at most."""
    most_on_a_gpu: int = 0
    end_s: float = 0.0

    @property
    def gpu_s(self) -> float:
        """GPU-seconds, added up job by job."""
        return sum(job.gpu_s for job in self.jobs.values())


@dataclass(slots=True)
class _Attempt:
    """An attempt that holds GPUs."""

    number: int
    gpus: list[tuple[int, int]]
    shared: bool
    elastic: bool  # the job moves its batch, so that psi and throughput do not say how fast it counts
    since_s: float  # of the present weight
    up_s: float  # since when it holds
    rate: float | None = None  # effective samples a second as last reported; None: not known, or changed since
    told: tuple[float, float] = (0.0, 0.0)  # when, effective samples


def audit(lines: Iterable[Line], gpus_per_node: Sequence[int], restart_s: float = 0.0) -> Audit:
    """Add a log up.

    Checked on the way (``broken`` tells): time never goes back; a job is submitted once, ends once, and nothing is heard of
    it afterwards; an attempt starts on the GPUs of its own command, all different, all there, in the number granted, while
    the job holds no others, on as many nodes as its grant says; a GPU has one holder, or two that share it, for any length
    of time; only the attempt that holds GPUs reports, never less than before, and leaves them; no GPU of a node that is out
    of service is given away, or kept for any length of time.

    Args:
        lines: in order.
        gpus_per_node: the cluster.
        restart_s: what a start other than a job's first costs in a simulation, GPUs held.
    """
    return _Auditor(gpus_per_node, restart_s).run(lines)


class _Auditor:
    def __init__(self, gpus_per_node: Sequence[int], restart_s: float) -> None:
        self._sizes = gpus_per_node
        self._restart_s = restart_s
        self._audit = Audit()
        self._granted: dict[str, Line] = {}  # the last command that gave a job GPUs, until it has left them
        self._cancelled: set[str] = set()
        self._told_to_stop: set[str] = set()  # for good
        self._running: dict[str, _Attempt] = {}
        self._free_since: dict[str, float] = {}  # of waiting jobs
        self._holders: dict[tuple[int, int], dict[str, bool]] = {}  # by GPU: job -> whether it shares
        self._gpu_since: dict[tuple[int, int], float] = {}
        self._changed: set[tuple[int, int]] = set()  # GPUs, in this instant
        self._down: set[int] = set()
        self._lost: set[int] = set()  # of those, in this instant
        self._now_s = float("-inf")

    def run(self, lines: Iterable[Line]) -> Audit:
        for line in lines:
            if line["time_s"] < self._now_s - _TIME_EPS_S:
                self._broken(f"time goes back from {self._now_s} to {line['time_s']}: {line['kind']}")
            if line["time_s"] > self._now_s:
                self._look()
            self._now_s = max(self._now_s, line["time_s"])
            self._take(line, line["kind"])
        self._look()
        for job_id, job in self._audit.jobs.items():
            if job.finish_s is None:
                self._broken(f"{job_id} never ends")
        self._audit.end_s = self._now_s
        return self._audit

    def _broken(self, what: str) -> None:
        self._audit.broken.append(what)

    def _take(self, line: Line, kind: str) -> None:
        if kind in ("tick", "plan_decided"):
            return
        if kind == "node_down":
            self._down.add(line["node"])
            self._lost.add(line["node"])
            return
        if kind == "node_up":
            self._down.discard(line["node"])
            return
        if kind == "job_submitted":
            self._submitted(line["job"], line["time_s"])
            return
        job_id = line["job_id"]
        job = self._audit.jobs.get(job_id)
        if job is None or job.finish_s is not None:
            self._broken(f"{kind} of {job_id}, which " + ("is not known" if job is None else "has ended"))
            return
        if kind in _GRANTS:
            self._granted[job_id] = line
        elif kind == "job_started":
            self._started(job_id, job, line)
        elif kind == "regrant":
            self._regranted(job_id, job, line)
        elif kind == "progress_reported":
            self._reported(job_id, job, line)
        elif kind == "cancel_requested":
            self._cancelled.add(job_id)
        elif kind == "stop":
            self._told_to_stop.add(job_id)
        elif kind in _LEAVES:
            self._left(job_id, job, line)
        if kind in _ENDS or (job_id in self._cancelled and job_id not in self._granted):
            self._ended(job_id, job, line["time_s"])

    def _submitted(self, spec: Line, time_s: float) -> None:
        if spec["name"] in self._audit.jobs:
            self._broken(f"{spec['name']} is submitted twice")
        requested = spec.get("num_gpus") or max(spec["gpus"])
        self._audit.jobs[spec["name"]] = JobBooks(time_s, requested, spec.get("duration_s"))
        self._free_since[spec["name"]] = time_s

    def _started(self, job_id: str, job: JobBooks, line: Line) -> None:
        command = self._granted.get(job_id)
        if command is None or command["attempt"] != line["attempt"] or job_id in self._running:
            self._broken(f"{job_id} starts without a command, or while it runs")
            return
        gpus = [(int(node), int(device)) for node, device in command["gpus"]]
        shared, now_s = bool(command["grant"]["shared"]), line["time_s"]
        if len(set(gpus)) != len(gpus) or len(gpus) != command["grant"]["num_gpus"]:
            self._broken(f"{job_id} starts on {gpus}, granted {command['grant']['num_gpus']}")
        if len({node for node, _ in gpus}) != command["grant"]["num_nodes"]:
            self._broken(f"{job_id} starts on {gpus}, granted as {command['grant']['num_nodes']} nodes")
        for node, device in gpus:
            if not (0 <= node < len(self._sizes) and 0 <= device < self._sizes[node]) or node in self._down:
                self._broken(f"{job_id} starts on {(node, device)}, which is not there")
        job.waited_s += now_s - self._free_since.pop(job_id)
        job.starts += 1
        job.promised = line.get("total_samples", job.promised)
        job.as_logged &= self._is_as_logged(command["grant"], job.requested_gpus)
        elastic = bool(command["grant"].get("elastic_batch"))
        self._running[job_id] = _Attempt(line["attempt"], gpus, shared, elastic, now_s, now_s)
        self._hold(job_id, gpus, shared, now_s)

    def _is_as_logged(self, grant: Line, requested_gpus: int) -> bool:
        fewest = bisect_left(list(accumulate(sorted(self._sizes, reverse=True))), requested_gpus) + 1
        whole = grant.get("max_frozen_layers") == 0 and not grant["shared"] and not grant.get("elastic_batch")
        return whole and grant["num_gpus"] == requested_gpus and grant["num_nodes"] == fewest

    def _hold(self, job_id: str, gpus: Sequence[tuple[int, int]], shared: bool | None, now_s: float) -> None:
        """From now on the job is on these GPUs as a sharer or alone; None: not any more."""
        for gpu in gpus:
            holders = self._holders.setdefault(gpu, {})
            weight = sum(0.5 if shares else 1.0 for shares in holders.values())
            self._audit.in_use_gpu_s += weight * (now_s - self._gpu_since.get(gpu, now_s))
            self._gpu_since[gpu] = now_s
            for other in holders:
                if other in self._running:
                    self._running[other].rate = None  # its speed may have changed
            holders.pop(job_id, None)
            if shared is not None:
                holders[job_id] = shared
            self._changed.add(gpu)

    def _look(self) -> None:
        """An instant is over: who holds what? Within it a job may be told that it is alone before its partner leaves, and a
        node goes before those on it."""
        for node in sorted(self._lost):
            kept = [gpu for gpu, holders in self._holders.items() if gpu[0] == node and holders]
            if kept and node in self._down:
                self._broken(f"{kept[0]} is held by {', '.join(self._holders[kept[0]])}, and out of service")
        self._lost.clear()
        for gpu in sorted(self._changed):
            holders = self._holders[gpu]
            if len(holders) > 2 or (len(holders) == 2 and not all(holders.values())):
                self._broken(f"{gpu} is held by {', '.join(holders)}")
            self._audit.most_on_a_gpu = max(self._audit.most_on_a_gpu, len(holders))
        if self._changed:
            in_use = sum(1.0 for holders in self._holders.values() if holders)
            self._audit.most_in_use = max(self._audit.most_in_use, in_use)
        self._changed.clear()

    def _regranted(self, job_id: str, job: JobBooks, line: Line) -> None:
        attempt = self._running.get(job_id)
        if (granted := self._granted.get(job_id)) is not None:
            self._granted[job_id] = {**granted, "grant": line["grant"]}
        if attempt is None or attempt.number != line["attempt"]:
            return  # it is not up yet
        self._count(job, attempt, line["time_s"])
        job.as_logged &= self._is_as_logged(line["grant"], job.requested_gpus)
        attempt.shared, attempt.rate = bool(line["grant"]["shared"]), None
        self._hold(job_id, attempt.gpus, attempt.shared, line["time_s"])

    def _reported(self, job_id: str, job: JobBooks, line: Line) -> None:
        attempt = self._running.get(job_id)
        if attempt is None:
            self._broken(f"{job_id} reports, and holds no GPU")
            return
        if attempt.number != line["attempt"]:
            self._broken(f"{job_id} reports for attempt {line['attempt']}, and attempt {attempt.number} holds its GPUs")
            return
        if line["effective_samples"] < attempt.told[1]:
            self._broken(f"{job_id} reports {line['effective_samples']} effective samples after {attempt.told[1]}")
        if attempt.rate is not None and job.promised:
            told_s, told = attempt.told
            promised = min(told + attempt.rate * (line["time_s"] - told_s), job.promised)  # no job counts more than P0
            job.gap = max(job.gap or 0.0, abs(line["effective_samples"] - promised) / job.promised)
        attempt.rate = None if attempt.elastic else line.get("psi", 1.0) * line.get("throughput", 0.0)
        attempt.told = line["time_s"], line["effective_samples"]
        for other in self._holders[attempt.gpus[0]]:
            if other != job_id and other in self._running:
                self._running[other].rate = None  # a partner that froze layers leaves it more of the GPU

    def _count(self, job: JobBooks, attempt: _Attempt, now_s: float) -> None:
        passed_s = now_s - attempt.since_s
        job.held_s += passed_s
        job.gpu_s += passed_s * len(attempt.gpus) * (0.5 if attempt.shared else 1.0)
        attempt.since_s = now_s

    def _left(self, job_id: str, job: JobBooks, line: Line) -> None:
        attempt = self._running.pop(job_id, None)
        now_s = line["time_s"]
        if (granted := self._granted.get(job_id)) is not None and (
            granted["attempt"] == line["attempt"] or job_id in self._told_to_stop
        ):
            del self._granted[job_id]
        if attempt is None:
            if line["kind"] == "job_finished":
                self._broken(f"{job_id} finishes, and holds no GPU")
            return
        if attempt.number != line["attempt"]:
            self._broken(f"{job_id} leaves as attempt {line['attempt']}, and attempt {attempt.number} holds its GPUs")
        self._count(job, attempt, now_s)
        if job.starts > 1:
            job.restarting_s += min(now_s - attempt.up_s, self._restart_s)
        if line["kind"] == "job_finished" and attempt.rate is not None:
            counted = attempt.told[1] + attempt.rate * (now_s - attempt.told[0])
            job.counted = counted if job.promised is None else min(counted, job.promised)
        self._hold(job_id, attempt.gpus, None, now_s)
        self._free_since[job_id] = now_s

    def _ended(self, job_id: str, job: JobBooks, now_s: float) -> None:
        job.finish_s = now_s
        job.waited_s += now_s - self._free_since.pop(job_id, now_s)
        if job_id in self._running:
            self._broken(f"{job_id} ends and keeps its GPUs")
