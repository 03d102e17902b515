"""When two jobs may share one GPU (Eq. 8, section 6), and when a pair is split again. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHARE_SLOWDOWN = 0.9
"""lambda of a job that shares: a conservative signal, not a prediction for every pair."""
MEM_SAFETY = 1.1
MAX_UTIL_PCT = 100.0
UNSTABLE_FRACTION = 0.25
MIN_SHARED_SPEED = 0.75
WATCH_WINDOW_S = 60.0


def may_share(
    mem_bytes_1: float, util_pct_1: float, mem_bytes_2: float, util_pct_2: float, gpu_mem_bytes: float
) -> bool:
    """Whether two configurations fit one GPU: 1.1 (mem_1 + mem_2) <= capacity and util_1 + util_2 <= 100."""
    fits = MEM_SAFETY * (mem_bytes_1 + mem_bytes_2) <= gpu_mem_bytes
    return fits and util_pct_1 + util_pct_2 <= MAX_UTIL_PCT


@dataclass(frozen=True, slots=True)
class SplitVerdict:
    """Whether a sharing pair must be split, whom to evict, and why."""

    split: bool
    evict: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Sharer:
    """One job of a sharing pair, as measured in the last minute."""

    job_id: str
    submit_s: float
    speed: float | None = None  # measured throughput over the same configuration's alone; None: not known


def split_verdict(first: Sharer, second: Sharer, sum_util_pct: Sequence[float]) -> SplitVerdict:
    """The run-time guard: split a pair that turned out unstable; the later-submitted job goes.

    Unstable: the summed utilisation is above 100 % in more than a quarter of the last minute's samples, or
    one of the two runs below 0.75 of its speed alone. Equal submission times: the larger job id goes.

    Args:
        first: one of the pair.
        second: the other.
        sum_util_pct: samples of the summed utilisation in the last ``WATCH_WINDOW_S`` seconds; empty: not
            measured.
    """
    later = max((first, second), key=lambda job: (job.submit_s, job.job_id)).job_id
    above = sum(1 for value in sum_util_pct if value > MAX_UTIL_PCT)
    if sum_util_pct and above > UNSTABLE_FRACTION * len(sum_util_pct):
        return SplitVerdict(True, later, f"utilisation above 100 % in {above} of {len(sum_util_pct)} samples")
    for job in (first, second):
        if job.speed is not None and job.speed < MIN_SHARED_SPEED:
            return SplitVerdict(True, later, f"{job.job_id} at {job.speed:.2f} of its speed alone")
    return SplitVerdict(False, None, "stable")
