"""The values that flow through a decision: Config + Estimate = Candidate; Snapshot -> Plan -> Allocation. All frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from icefrog.gpu_types import ANY_GPU
from icefrog.profile import Profile
from icefrog.spec import ClusterSpec, JobSpec
from icefrog.values import value

if TYPE_CHECKING:
    from icefrog.placement import FreeGpus

Json: TypeAlias = Any
"""A JSON value: what a policy may remember between rounds."""


class GpuId(NamedTuple):
    """One GPU: node index in the cluster, device index in the node."""

    node: int
    device: int


FreezingRule: TypeAlias = Literal["none", "tuner", "freezeout", "signal"]


@value
class Pricing:
    """How a policy wants its jobs' options priced. The candidate source obeys it, and grants allow no more."""

    freezing: FreezingRule = "none"
    """How jobs freeze whose files leave it open. ``tuner``: the Layer Tuner (Eq. 15); ``signal``: by the share of the signal
    in the place of Eq. 3 (:mod:`icefrog.estimate.progress`), live the rule ``progress``; ``freezeout``: all follow the tuned
    FreezeOut schedule of the paper's baselines. Who reports its signal goes by it and is priced by it, others by Eq. 3."""
    batch: Literal["fixed", "elastic"] = "fixed"
    """``elastic``: the global batch may move within the job's range, at Pollux's statistical efficiency."""
    sharing_speed: float = 0.9
    """lambda: the speed of a sharer that the estimates assume, 1.0 = alone (Eq. 8)."""
    by_gpu_type: bool = False
    """Whether options name a GPU type, each with its own speed; otherwise they run on any."""
    counts: Literal["all", "requested"] = "all"
    """``requested``: a rigid policy, which looks at no other GPU count than the one that was asked for."""
    shares: bool = True
    """Whether the policy lets jobs share a GPU; with ``requested``, options for that are left out otherwise."""
    throughput: Literal["layer-aware", "ddp-only"] = "layer-aware"
    """``ddp-only``: sharded jobs are priced as if they were data parallel (:mod:`icefrog.estimate.ddp_only`)."""
    reads_progress: bool = True
    """Whether the policy looks at how far a running job is (samples done and left). Where it does not, simulated jobs that
    have nothing to tune are not interrupted to report, and ``effective_samples`` is that of the last stop."""


@value
class Config:
    """(a, s, m, l): what a job runs with."""

    num_gpus: int
    batch_per_gpu: int
    accum_steps: int = 1
    frozen_layers: int = 0
    shared: bool = False
    gpu_type: str = ANY_GPU

    @property
    def global_batch(self) -> int:
        """M = a * m * k, samples."""
        return self.num_gpus * self.batch_per_gpu * self.accum_steps


@value
class Estimate:
    """What a configuration is predicted to do."""

    step_s: float
    throughput: float  # T, samples/s
    psi: float  # frozen penalty, (0, 1]
    effective_progress: float  # E, full-layer samples/s
    mem_bytes: float  # peak, per GPU
    util_pct: float
    tta_s: float  # T_acc: age + remaining / E
    remaining_s: float | None = None
    """T_acc without the age, where the source says it: the difference of the two would differ by a rounding error between
    jobs that are alike. ``policies.base.remaining_s`` gives the one or the other."""


@value
class Candidate:
    """One option of one job."""

    config: Config
    estimate: Estimate


@value
class GradientStats:
    """Per-layer statistics as last reported by the job, of length L, per-sample units (S and |G|^2); empty: not reported.

    For a frozen layer ``variance`` is the value last observed before it froze, so that one vector prices every depth.
    """

    variance: tuple[float, ...]
    sqr_norm: tuple[float, ...]
    signal: tuple[float, ...] = ()
    """Shares of G . P G (:mod:`icefrog.estimate.progress`), of frozen layers as they froze. Who reports it goes by it."""


@value
class JobView:
    """What a policy may know of one unfinished job."""

    spec: JobSpec
    profile: Profile | None
    submit_s: float
    gpus: tuple[GpuId, ...]  # held now; empty while waiting
    shared: bool
    running: bool
    config: Config | None  # as last granted
    effective_samples: float
    remaining_samples: float | None  # P; None while the job has not said how large an epoch is
    frozen_layers: int
    stats: GradientStats | None
    attained_gpu_s: float  # GPU-seconds of attempts that are over; a sharer counts half
    holding_since_s: float | None  # since when the present attempt holds its GPUs; None: it holds none
    waiting_since_s: float | None  # since when it holds no GPU
    restart_s: float  # what changing its allocation costs
    num_restarts: int

    @property
    def job_id(self) -> str:
        """The job's id."""
        return self.spec.name

    @property
    def num_gpus(self) -> int:
        """GPUs held now."""
        return len(self.gpus)

    @property
    def as_requested(self) -> bool:
        """Whether it holds as many GPUs as it asked for, alone."""
        return len(self.gpus) == self.spec.requested_gpus and not self.shared

    def attained_service_s(self, now_s: float) -> float:
        """GPU-seconds held until ``now_s``; a sharer counts half. (A view holds no clock: it stays true while nothing
        happens to the job.)"""
        if self.holding_since_s is None:
            return self.attained_gpu_s
        return self.attained_gpu_s + (now_s - self.holding_since_s) * len(self.gpus) * (0.5 if self.shared else 1.0)


class JobViews(tuple[JobView, ...]):
    """The unfinished jobs in order of submission, and the parts of them that policies ask for, each made once."""

    free: tuple[frozenset[int], FreeGpus] | None = None
    """(nodes out of service, what these jobs leave free then), where somebody has kept account of it; never changed. Ask
    ``changes.free_gpus``."""

    @classmethod
    def of(
        cls, by_id: Mapping[str, JobView], waiting: tuple[JobView, ...], unlike_requested: frozenset[str]
    ) -> JobViews:
        """From a mapping, which is copied, and what is known of its jobs (as below); all in order of submission."""
        views = cls(by_id.values())
        views.__dict__.update(by_id=dict(by_id), waiting=waiting, unlike_requested=unlike_requested)
        return views

    @cached_property
    def by_id(self) -> Mapping[str, JobView]:
        """Every job by its id, in order of submission."""
        return {view.job_id: view for view in self}

    @cached_property
    def running(self) -> tuple[JobView, ...]:
        """Those that have GPUs, in order of submission."""
        return tuple([view for view in self if view.running])

    @cached_property
    def waiting(self) -> tuple[JobView, ...]:
        """Those that have none, in order of submission."""
        return tuple([view for view in self if not view.running])

    @cached_property
    def unlike_requested(self) -> frozenset[str]:
        """Those that run, but share a GPU or have another count than they asked for. None, as a rule, where the policy is
        rigid."""
        return frozenset(view.job_id for view in self if view.running and not view.as_requested)


@value
class Snapshot:
    """All that one decision may depend on. ``jobs`` are the unfinished ones in order of submission."""

    now_s: float
    cluster: ClusterSpec
    jobs: tuple[JobView, ...]
    seed: int = 0
    memory: Json = None
    oracle_remaining_s: Mapping[str, float] | None = (
        None  # true service time left; only policies that say 'oracle' get it
    )
    down: frozenset[int] = frozenset()  # nodes that are out of service

    def __post_init__(self) -> None:
        if not isinstance(self.jobs, JobViews):
            object.__setattr__(self, "jobs", JobViews(self.jobs))

    @property
    def views(self) -> JobViews:
        """``jobs``, with ``running``, ``waiting`` and ``by_id``."""
        assert isinstance(self.jobs, JobViews)
        return self.jobs

    @property
    def node_gpus(self) -> tuple[int, ...]:
        """GPUs of every node that are in service; 0 for a node that is down."""
        sizes = self.cluster.gpus_per_node
        return tuple(0 if node in self.down else size for node, size in enumerate(sizes)) if self.down else sizes

    @property
    def num_gpus(self) -> int:
        """All GPUs in service."""
        return sum(self.node_gpus) if self.down else self.cluster.num_gpus

    @property
    def gpus_by_type(self) -> Mapping[str, int]:
        """GPUs in service of every type of the cluster; the type with the most GPUs (in service or not) first."""
        counts = {gpu_type: part.num_gpus for gpu_type, part in self.cluster.parts.items()}
        for node in self.down:
            counts[self.cluster.node_types[node]] -= self.cluster.gpus_per_node[node]
        return counts


Candidates: TypeAlias = Mapping[str, Sequence[Candidate]]
"""job id -> its options: one exclusive candidate a GPU count, and a Pareto set of shared ones."""


@value
class Plan:
    """A policy's decision. A job that is in no entry of ``choices`` waits (but see ``keeps``)."""

    choices: Mapping[str, Candidate]
    pairs: tuple[tuple[str, str], ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    """In words, one for every unfinished job; ``waiting_reason`` and ``keeps`` spare most of them."""
    migrate: bool = True  # whether running jobs may be moved (restarted elsewhere) so that others find a place
    memory: Json = None
    gpus: Mapping[str, tuple[GpuId, ...]] | None = None
    """Where the policy wants its jobs, GPU by GPU, in the order of ranks; None: ``placement.place`` decides for all, as it
    does where the policy gave a job GPUs of several types, or of another than chosen (with ``keeps``: an error)."""
    stands_until_s: float = 0.0
    """Until then the policy would decide the same again, unless a job arrives or leaves its GPUs, a node changes, or a job
    reports a new profile (progress alone does not count). The driver spares rounds in which nothing of that happened.
    ``inf``: for good."""
    until_report: bool = False
    """Progress alone does count: the plan stands no longer than until a job reports. For policies that look at nothing else
    that time changes."""
    keeps: bool = False
    """The plan names changes only: a running job that is neither in ``choices`` nor in ``preempted`` keeps what it has (and
    its reason). Spares all concerned the work where thousands run; ``choices`` then names those that start or change, pairs
    those of them that share."""
    preempted: frozenset[str] = frozenset()
    """With ``keeps``: running jobs that must leave their GPUs."""
    content: bool = False
    """Everybody runs, and nothing would change if one of them ended: the plan stands then, too. Only policies whose jobs
    never share may say so (``Pricing.shares``)."""
    waiting_reason: str = ""
    """The reason of every job that waits and has none of its own. Best a constant: each change of it is told to each job."""


Allocation: TypeAlias = Mapping[str, tuple[GpuId, ...]]
"""job id -> the GPUs it gets, sorted."""
