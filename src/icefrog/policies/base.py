"""What a scheduling policy is: a pure function from a snapshot and the jobs' candidates to a plan.

A new policy is one file with one class and one line in :mod:`icefrog.policies`; ``docs/add-a-policy.md`` walks through it.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from pydantic import BaseModel, ConfigDict

from icefrog.types import Candidate, Candidates, JobView, Plan, Pricing, Snapshot


class Options(BaseModel):
    """A policy's knobs: a frozen model, so that ``--set policy.key=value`` is parsed and checked by its types."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Policy(Protocol):
    """The interface. An instance holds its options and nothing else: a fresh one decides the same."""

    name: ClassVar[str]
    source: ClassVar[str]
    """The paper (or textbook) it follows, one line."""
    oracle: ClassVar[bool]
    """Whether it reads true remaining times (``Snapshot.oracle_remaining_s``)."""
    Options: ClassVar[type[Options]]

    @property
    def pricing(self) -> Pricing:
        """How its jobs' options are priced, and what its grants allow them (freezing, moving the batch); may depend on its
        options."""
        ...

    def decide(self, snapshot: Snapshot, candidates: Candidates) -> Plan:
        """Choose at most one candidate a job. Pure: same arguments, same plan."""
        ...


def exclusive(candidates: Candidates, job_id: str, num_gpus: int) -> Candidate | None:
    """The job's unshared candidate for a GPU count, or None."""
    for candidate in candidates.get(job_id, ()):
        if not candidate.config.shared and candidate.config.num_gpus == num_gpus:
            return candidate
    return None


def remaining_s(candidate: Candidate, job: JobView, now_s: float) -> float:
    """Estimated time that the job still needs in that configuration, s: T_acc without the job's age."""
    estimate = candidate.estimate
    if estimate.remaining_s is not None:
        return estimate.remaining_s
    return max(estimate.tta_s - max(now_s - job.submit_s, 0.0), 0.0)
