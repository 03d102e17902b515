"""From logged jobs to jobs of the catalogue. Decisions: ``docs/notes/trace-to-jobs.md``.

A logged job keeps its submission, its GPU request and its length. What it trains is what the log says, where that is a
task of the catalogue, else drawn from the tasks of its GPU-time class; the same trace and seed always give the same jobs,
and one job's draw does not depend on the others.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from icefrog.copying import copied
from icefrog.errors import UserError
from icefrog.rng import Streams, pick
from icefrog.spec import JOB_ID_PATTERN, BatchRule, FreezeRule, JobSpec
from icefrog.traces.rows import rewards_text
from icefrog.traces.trace import ReadReport, Trace, TraceJob
from icefrog.workloads.catalogue import Catalogue, Workload
from icefrog.workloads.classes import gpu_time_class
from icefrog.workloads.jobs import epochs_for

MAX_FRACTION = 0.9
MAX_ACCUM_STEPS = 4
"""A count below the request may need this many micro-steps to keep the batch."""

APPLICATIONS = {
    "bert": "bert-squad",
    "cifar10": "resnet18-cifar10",
    "imagenet": "resnet50-imagenet",
    "yolov3": "yolov3-voc",
}
"""Tasks that the applications of Pollux and Sia workloads are (their deepspeech2 and ncf are not in the catalogue)."""


@dataclass(frozen=True, slots=True)
class TraceJobs:
    """The jobs of a replay, and the account of what was left out."""

    specs: tuple[JobSpec, ...]
    report: ReadReport


def to_specs(
    trace: Trace,
    catalogue: Catalogue,
    *,
    seed: int = 0,
    max_gpus: int | None = None,
    gpus_per_node: int = 4,
    max_fraction: float = MAX_FRACTION,
) -> TraceJobs:
    """Match every job of the trace to a task.

    Args:
        trace: the jobs.
        catalogue: the tasks.
        seed: of task and batch.
        max_gpus: GPUs of the cluster: a job that asks for more is left out and counted, and no job's A_k goes beyond.
        gpus_per_node: over how many nodes the logged request spread; must be what :func:`job_profile` is given.
        max_fraction: largest share of layers that may be frozen.

    Raises:
        UserError: no job is left.
    """
    kept = [job for job in trace.jobs if max_gpus is None or job.num_gpus <= max_gpus]
    report = trace.report.drop(f"asks for more than {max_gpus} GPUs", len(trace.jobs) - len(kept))
    if not kept:
        raise UserError(
            f"every job of the trace asks for more than {max_gpus} GPUs", "give a larger cluster or another window"
        )
    matching = _Matching(catalogue, max_gpus, gpus_per_node, FreezeRule(max_fraction=max_fraction))
    draws = Streams(seed, [job.job_id for job in kept], 3)
    return TraceJobs(tuple(matching.spec(job, draws[job.job_id]) for job in kept), report)


def task_mix(specs: tuple[JobSpec, ...]) -> dict[str, int]:
    """Jobs by workload, most frequent first."""
    return dict(Counter(spec.workload or "" for spec in specs).most_common())


class _Matching:
    """From logged jobs to specs. What jobs of the same task, request and batch have in common is made, and checked, once."""

    def __init__(self, catalogue: Catalogue, max_gpus: int | None, gpus_per_node: int, freeze: FreezeRule) -> None:
        self._catalogue = catalogue
        self._max_gpus = max_gpus
        self._gpus_per_node = gpus_per_node
        self._freeze = freeze
        self._options: dict[tuple[str, int], tuple[list[str], list[float]]] = {}
        self._models: dict[tuple[str, int, int], JobSpec] = {}

    def spec(self, job: TraceJob, rng: np.random.Generator) -> JobSpec:
        """The job as one of the catalogue; ``rng`` is its own."""
        workload = self._pick(job, rng)
        batch = _batch(workload, job, rng)
        labels = {"class": gpu_time_class(job.gpu_s), **job_labels(job)}
        of_its_own = {
            "name": job.job_id,
            "max_epochs": epochs_for(workload, job.duration_s, job.num_gpus, batch, self._gpus_per_node),
            "submit_s": job.submit_s,
            "duration_s": job.duration_s,
            "deadline_s": job.deadline_s,
            "labels": labels,
        }
        key = (workload.name, job.num_gpus, batch)
        model = self._models.get(key)
        if model is None or not _evidently_valid(job, labels):
            model = self._models[key] = self._checked(workload, job.num_gpus, batch, of_its_own)
            return model
        return copied(model, model.__dict__ | of_its_own)

    def _checked(self, workload: Workload, request: int, batch: int, of_its_own: dict[str, Any]) -> JobSpec:
        rule = _batch_range(workload, batch)
        counts = gpu_counts(workload, request, rule.options(), self._max_gpus)
        return JobSpec(
            gpus=counts,
            batch=rule,
            freeze=self._freeze,
            target=workload.task.target,
            share=workload.task.share and 1 in counts,
            workload=workload.name,
            num_gpus=request,
            **of_its_own,
        )

    def _pick(self, job: TraceJob, rng: np.random.Generator) -> Workload:
        """The job's own task, or one of its class, whose allocation unit divides the request (each class has one of 1)."""
        catalogue = self._catalogue
        own = APPLICATIONS.get(job.application, job.application)
        if own in catalogue.tasks and job.num_gpus % catalogue.tasks[own].gpus.unit == 0:
            return catalogue[own]
        key = (gpu_time_class(job.gpu_s), job.num_gpus)
        if key not in self._options:
            fitting = [
                (name, weight)
                for name, weight in catalogue.of_class(key[0])
                if job.num_gpus % catalogue.tasks[name].gpus.unit == 0
            ]
            self._options[key] = [name for name, _ in fitting], [weight for _, weight in fitting]
        names, weights = self._options[key]
        return catalogue[names[pick(rng, weights)]]


def _evidently_valid(job: TraceJob, labels: dict[str, str]) -> bool:
    """Whether what differs from job to job needs no closer look; what does gets it from the checks of :class:`JobSpec`."""
    return (
        _ID.fullmatch(job.job_id) is not None
        and 0.0 <= job.submit_s < math.inf
        and 0.0 < job.duration_s < math.inf
        and (job.deadline_s is None or 0.0 < job.deadline_s < math.inf)
        and all(text.isascii() and "\0" not in text for text in labels.values())
    )


_ID = re.compile(JOB_ID_PATTERN)


def job_labels(job: TraceJob) -> dict[str, str]:
    """What a log tells of a job beside its size and length; only what it does tell. Seconds count from submission."""
    texts = {name: getattr(job, name) for name in ("user", "vc", "gpu_type", "state", "kind", "application")}
    numbers = {name: getattr(job, name) for name in ("gpu_demand", "time_limit_s", "deadline_s")}
    labels = {**texts, **{name: f"{value:.15g}" for name, value in numbers.items() if value is not None}}
    return {name: value for name, value in {**labels, "rewards": rewards_text(job.rewards)}.items() if value}


def _batch(workload: Workload, job: TraceJob, rng: np.random.Generator) -> int:
    """A global batch that the request divides into local batches that the task allows.

    The job's own where that fits, else the nearest of: odd part of the request times powers of two. A job without one
    draws among those within the task's range; where the request is too large (or too small) for the range, the nearest.
    """
    task, request, own = workload.task, job.num_gpus, job.batch_size
    if own and own % request == 0 and task.local_batch.min <= own // request <= task.local_batch.max:
        return own
    fitting = _fitting_batches(request, task.local_batch.min, task.local_batch.max)
    if own:
        return min(fitting, key=lambda batch: abs(math.log(batch / own)))
    inside = [batch for batch in fitting if task.batch.min <= batch <= task.batch.max]
    if inside:
        return inside[int(rng.integers(len(inside)))]
    return fitting[0] if fitting[0] > task.batch.max else fitting[-1]


@lru_cache(maxsize=4096)
def _fitting_batches(request: int, smallest_local: int, largest_local: int) -> list[int]:
    """Odd part of the request times powers of two, where the request divides it into local batches within the limits."""
    odd = request // (request & -request)
    first = math.ceil(math.log2(request * smallest_local / odd))
    last = math.floor(math.log2(request * largest_local / odd))
    return [odd << k for k in range(first, last + 1) if (odd << k) % request == 0]


def _batch_range(workload: Workload, first: int) -> BatchRule:
    """From the drawn batch, M0, to the task's largest: policies that keep the batch keep M0."""
    return _range(first, max(workload.task.batch.max, first))


@lru_cache(maxsize=1024)
def _range(first: int, largest: int) -> BatchRule:
    return BatchRule(min=first, max=largest) if largest >= 2 * first else BatchRule(**{"global": first})


def gpu_counts(workload: Workload, request: int, batches: tuple[int, ...], max_gpus: int | None) -> tuple[int, ...]:
    """A_k: the request's odd part times powers of two, in the task's range; the request is always among them.

    Each divides one of the batches into local batches of at least the task's smallest, in at most ``MAX_ACCUM_STEPS``
    micro-steps. Counts that need more than the first batch are there for policies that move it.
    """
    task = workload.task
    odd = request // (request & -request)
    limit = max(task.gpus.max if max_gpus is None else min(task.gpus.max, max_gpus), request)
    counts = [odd << k for k in range(int(math.log2(limit / odd)) + 1)]
    return tuple(
        count
        for count in counts
        if count == request
        or (
            count % task.gpus.unit == 0
            and any(
                batch % count == 0 and task.local_batch.min <= batch // count <= task.local_batch.max * MAX_ACCUM_STEPS
                for batch in batches
            )
        )
    )
