"""One IceShare decision as data: jobs with their options, and the shares that follow (Eq. 17).

Options live in flat arrays (``ptr[k]:ptr[k+1]`` are job k's), so that fifty thousand jobs cost a few array operations.
``Problem.from_jobs`` builds one from small objects, ``Problem.from_arrays`` from arrays, ``parse.parse_problem`` from JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from icefrog.estimate.sharing import MAX_UTIL_PCT, MEM_SAFETY

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

SHARED_GPUS = 0.5
"""What a sharer holds, and the value of ``current`` that says so."""


@dataclass(frozen=True, slots=True)
class ExclusiveOption:
    """``gpus`` >= 1 whole GPUs; ``tta_s`` > 0: estimated time to accuracy with them."""

    gpus: int
    tta_s: float


@dataclass(frozen=True, slots=True)
class SharedOption:
    """One way to run on half of a GPU, next to exactly one other job."""

    tta_s: float
    mem_bytes: float
    util_pct: float


@dataclass(frozen=True, slots=True)
class Job:
    """One job of a decision. ``current``: GPUs held now (0.5: shares one); ``restart_s``: what any other option adds."""

    id: str
    options: tuple[ExclusiveOption, ...]
    shared: tuple[SharedOption, ...] = ()
    weight: float = 1.0
    current: float | None = None
    partner: str | None = None  # whom it shares with now; only a preference among equal optima
    restart_s: float = 0.0
    must_run: bool = False
    age_s: float = 0.0  # part of every time that is over already
    urgency: float = 1.0  # factor on what its shares are worth in the sum


@dataclass(frozen=True, eq=False)
class Problem:
    """All that one decision depends on; N jobs in order of submission, M exclusive and S shared options.

    Times already contain the restart of every option that differs from ``current``. An option above ``num_gpus`` counts
    towards a job's best time but cannot be chosen. A shared option without a fitting partner cannot be chosen either
    (sharing needs exactly one partner), and counts towards the best time all the same.

    The floor is over shares as Eq. 17 has them, with the age in both times. In the sum an option is worth
    weight * urgency * (best time - age) / (time - age): what is over cannot be decided any more, and with it in both times
    the shares of old jobs all come to 1. With ``age_s`` 0 and ``urgency`` 1 (the defaults) both are the same.
    """

    num_gpus: int
    gpu_mem_bytes: float
    job_ids: tuple[str, ...]
    weight: Floats  # (N,)
    opt_ptr: Ints  # (N+1,)
    opt_gpus: Ints  # (M,)
    opt_tta_s: Floats  # (M,)
    shr_ptr: Ints  # (N+1,)
    shr_tta_s: Floats  # (S,)
    shr_mem_bytes: Floats  # (S,)
    shr_util_pct: Floats  # (S,)
    current: Floats  # (N,) NaN: waits, or unknown
    partner: Ints  # (N,) index of the job it shares with now, or -1
    must_run: Bools  # (N,)
    age_s: Floats  # (N,)
    urgency: Floats  # (N,)
    rho: float = 1.0
    literal_weights: bool = False
    index: dict[str, int] = field(default_factory=dict, repr=False)

    @classmethod
    def from_arrays(
        cls,
        num_gpus: int,
        *,
        opt_ptr: ArrayLike,
        opt_gpus: ArrayLike,
        opt_tta_s: ArrayLike,
        gpu_mem_bytes: float = float("inf"),
        job_ids: Sequence[str] | None = None,
        weight: ArrayLike | None = None,
        shr_ptr: ArrayLike | None = None,
        shr_tta_s: ArrayLike = (),
        shr_mem_bytes: ArrayLike = (),
        shr_util_pct: ArrayLike = (),
        current: ArrayLike | None = None,
        partner: ArrayLike | None = None,
        restart_s: ArrayLike = 0.0,
        must_run: ArrayLike | None = None,
        age_s: ArrayLike | None = None,
        urgency: ArrayLike | None = None,
        rho: float = 1.0,
        literal_weights: bool = False,
    ) -> Problem:
        """A problem from flat arrays (units as in the class). ``opt_tta_s`` are times *without* restarts.

        Raises:
            ValueError: shapes disagree, or a number is not finite and positive where it must be.
        """
        ptr = np.asarray(opt_ptr, np.int64)
        n = len(ptr) - 1
        sptr = np.zeros(n + 1, np.int64) if shr_ptr is None else np.asarray(shr_ptr, np.int64)
        held = np.full(n, np.nan) if current is None else np.asarray(current, np.float64)
        restart = np.broadcast_to(np.asarray(restart_s, np.float64), (n,))
        gpus = np.asarray(opt_gpus, np.int64)
        times, shared_times = np.asarray(opt_tta_s, np.float64), np.asarray(shr_tta_s, np.float64)
        if np.any(restart != 0.0) and not np.all(np.isnan(held)):
            moved = np.where(np.isnan(held), 0.0, restart)
            own, shared_own = np.repeat(held, np.diff(ptr)), np.repeat(held, np.diff(sptr))
            times = times + np.where(gpus == own, 0.0, np.repeat(moved, np.diff(ptr)))
            shared_times = shared_times + np.where(shared_own == SHARED_GPUS, 0.0, np.repeat(moved, np.diff(sptr)))
        ids = tuple(str(k) for k in range(n)) if job_ids is None else tuple(job_ids)
        problem = cls(
            num_gpus=int(num_gpus),
            gpu_mem_bytes=float(gpu_mem_bytes),
            job_ids=ids,
            weight=np.ones(n) if weight is None else np.asarray(weight, np.float64),
            opt_ptr=ptr,
            opt_gpus=gpus,
            opt_tta_s=times,
            shr_ptr=sptr,
            shr_tta_s=shared_times,
            shr_mem_bytes=np.asarray(shr_mem_bytes, np.float64),
            shr_util_pct=np.asarray(shr_util_pct, np.float64),
            current=held,
            partner=np.full(n, -1, np.int64) if partner is None else np.asarray(partner, np.int64),
            must_run=np.zeros(n, np.bool_) if must_run is None else np.asarray(must_run, np.bool_),
            age_s=np.zeros(n) if age_s is None else np.asarray(age_s, np.float64),
            urgency=np.ones(n) if urgency is None else np.asarray(urgency, np.float64),
            rho=float(rho),
            literal_weights=literal_weights,
            index={name: k for k, name in enumerate(ids)},
        )
        problem._check()
        return problem

    @classmethod
    def from_jobs(
        cls,
        num_gpus: int,
        jobs: Sequence[Job],
        gpu_mem_bytes: float = float("inf"),
        rho: float = 1.0,
        literal_weights: bool = False,
    ) -> Problem:
        """A problem from job objects, in order of submission.

        Raises:
            ValueError: duplicate ids, a job without options, or a number out of range.
        """
        index = {job.id: k for k, job in enumerate(jobs)}
        options = [o for job in jobs for o in job.options]
        shared = [o for job in jobs for o in job.shared]
        return cls.from_arrays(
            num_gpus,
            opt_ptr=np.cumsum([0, *(len(job.options) for job in jobs)]),
            opt_gpus=np.array([o.gpus for o in options], np.int64),
            opt_tta_s=np.array([o.tta_s for o in options], np.float64),
            gpu_mem_bytes=gpu_mem_bytes,
            job_ids=[job.id for job in jobs],
            weight=np.array([job.weight for job in jobs], np.float64),
            shr_ptr=np.cumsum([0, *(len(job.shared) for job in jobs)]),
            shr_tta_s=np.array([o.tta_s for o in shared], np.float64),
            shr_mem_bytes=np.array([o.mem_bytes for o in shared], np.float64),
            shr_util_pct=np.array([o.util_pct for o in shared], np.float64),
            current=np.array([np.nan if job.current is None else job.current for job in jobs], np.float64),
            partner=np.array([index.get(job.partner or "", -1) for job in jobs], np.int64),
            restart_s=np.array([job.restart_s for job in jobs], np.float64),
            must_run=np.array([job.must_run for job in jobs], np.bool_),
            age_s=np.array([job.age_s for job in jobs], np.float64),
            urgency=np.array([job.urgency for job in jobs], np.float64),
            rho=rho,
            literal_weights=literal_weights,
        )

    def _check(self) -> None:
        n = self.num_jobs
        if len(self.index) != n or len(self.job_ids) != n:
            raise ValueError("job ids must be unique, one a job")
        if self.num_gpus < 0 or not 0.0 <= self.rho <= 1.0 or not self.gpu_mem_bytes > 0:
            raise ValueError("num_gpus >= 0, 0 <= rho <= 1 and gpu_mem_bytes > 0 are required")
        for name, per_job in (
            ("weight", self.weight),
            ("current", self.current),
            ("must_run", self.must_run),
            ("age_s", self.age_s),
            ("urgency", self.urgency),
        ):
            if len(per_job) != n:
                raise ValueError(f"{name} needs one entry a job ({n}), got {len(per_job)}")
        if self.opt_ptr[-1] != len(self.opt_gpus) or len(self.opt_gpus) != len(self.opt_tta_s):
            raise ValueError("opt_ptr, opt_gpus and opt_tta_s disagree in length")
        if not self.shr_ptr[-1] == len(self.shr_tta_s) == len(self.shr_mem_bytes) == len(self.shr_util_pct):
            raise ValueError("shr_ptr and the shared options disagree in length")
        if n and np.min(np.diff(self.opt_ptr)) < 1:
            raise ValueError("every job needs at least one exclusive option")
        if np.any(self.opt_gpus < 1):
            raise ValueError("options need at least one GPU")
        for name, positive in (
            ("weight", self.weight),
            ("urgency", self.urgency),
            ("tta_s", self.opt_tta_s),
            ("tta_s", self.shr_tta_s),
        ):
            if not np.all(np.isfinite(positive) & (positive > 0)):
                raise ValueError(f"{name} must be finite and > 0")
        if n and not np.all((self.age_s >= 0) & (self.age_s < self.best_tta_s)):
            raise ValueError("age_s must be >= 0 and below every time of its job")
        for name, amount in (("mem_bytes", self.shr_mem_bytes), ("util_pct", self.shr_util_pct)):
            if not np.all(np.isfinite(amount) & (amount >= 0)):
                raise ValueError(f"{name} must be finite and >= 0")

    @property
    def num_jobs(self) -> int:
        """N."""
        return len(self.weight)

    @cached_property
    def opt_job(self) -> Ints:
        """(M,) the job of each exclusive option."""
        return np.repeat(np.arange(self.num_jobs), np.diff(self.opt_ptr))

    @cached_property
    def shr_job(self) -> Ints:
        """(S,) the job of each shared option."""
        return np.repeat(np.arange(self.num_jobs), np.diff(self.shr_ptr))

    @cached_property
    def best_tta_s(self) -> Floats:
        """(N,) each job's best time over all its options, shared ones and those above ``num_gpus`` included."""
        if self.num_jobs == 0:
            return np.empty(0)
        best = np.minimum.reduceat(self.opt_tta_s, self.opt_ptr[:-1])
        if len(self.shr_tta_s):
            sharers = np.flatnonzero(np.diff(self.shr_ptr))
            best[sharers] = np.minimum(best[sharers], np.minimum.reduceat(self.shr_tta_s, self.shr_ptr[:-1][sharers]))
        return best

    @cached_property
    def opt_share(self) -> Floats:
        """(M,) share_k(a) of every exclusive option, in (0, 1] (Eq. 17)."""
        return self.best_tta_s[self.opt_job] / self.opt_tta_s

    @cached_property
    def shr_share(self) -> Floats:
        """(S,) the share of every shared option."""
        return self.best_tta_s[self.shr_job] / self.shr_tta_s

    @cached_property
    def opt_worth(self) -> Floats:
        """(M,) what every exclusive option adds to the sum."""
        return self._worth(self.opt_tta_s, self.opt_job)

    @cached_property
    def shr_worth(self) -> Floats:
        """(S,) the same of the shared options."""
        return self._worth(self.shr_tta_s, self.shr_job)

    def _worth(self, tta_s: Floats, job: Ints) -> Floats:
        age_s = self.age_s[job]
        share = (self.best_tta_s[job] - age_s) / (tta_s - age_s)
        return np.asarray((self.weight * self.urgency)[job] * share)

    def fits_together(self, first: Ints, second: Ints) -> Bools:
        """Whether two shared options (flat indices, broadcast) fit on one GPU: memory with its margin, utilisation."""
        mem_bytes = MEM_SAFETY * (self.shr_mem_bytes[first] + self.shr_mem_bytes[second])
        util_pct = self.shr_util_pct[first] + self.shr_util_pct[second]
        return (mem_bytes <= self.gpu_mem_bytes) & (util_pct <= MAX_UTIL_PCT)

    def fairness(self, share: Floats, job: Ints) -> Floats:
        """What the max-min compares: share / weight, or weight * share under ``literal_weights`` (Eq. 18)."""
        weight = self.weight[job]
        return share * weight if self.literal_weights else share / weight

    @cached_property
    def opt_fairness(self) -> Floats:
        """(M,) the fairness measure of every exclusive option."""
        return self.fairness(self.opt_share, self.opt_job)

    @cached_property
    def shr_fairness(self) -> Floats:
        """(S,) the fairness measure of every shared option."""
        return self.fairness(self.shr_share, self.shr_job)
