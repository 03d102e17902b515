"""From a catalogue task and a logged duration to a job: how many samples it has to process."""

from __future__ import annotations

from collections.abc import Collection

from icefrog.errors import UserError
from icefrog.estimate.full_layers import full_step_s
from icefrog.gpu_types import GPU_TYPES
from icefrog.profile import Profile, altered
from icefrog.spec import JobSpec
from icefrog.workloads.catalogue import Catalogue, Workload
from icefrog.workloads.gradients import LayerCurves

MIN_EPOCHS, MAX_EPOCHS = 5, 200
"""Enough epochs that the Layer Tuner has points to act on, and not so many that it does nothing else."""


def full_speed(profile: Profile, num_gpus: int, global_batch: int, gpus_per_node: int) -> float:
    """Samples/s with nothing frozen, alone, on as few nodes as hold the GPUs; kept with the profile."""
    key = ("full speed", num_gpus, global_batch, gpus_per_node)
    known = profile.memo.get(key)
    if not isinstance(known, float):
        known = profile.memo[key] = _full_speed(profile, num_gpus, global_batch, gpus_per_node)
    return known


def _full_speed(profile: Profile, num_gpus: int, global_batch: int, gpus_per_node: int) -> float:
    nodes = -(-num_gpus // gpus_per_node)
    micro = 1
    while global_batch > num_gpus * micro * profile.max_local_batch:
        micro += 1
    per_gpu = global_batch / (num_gpus * micro)
    return num_gpus * per_gpu * micro / full_step_s(profile, num_gpus, nodes, per_gpu, micro)


def epochs_for(workload: Workload, duration_s: float, num_gpus: int, global_batch: int, gpus_per_node: int) -> int:
    """Epochs of the real data set that fit into the logged time, within 5..200."""
    samples = duration_s * full_speed(workload.profile, num_gpus, global_batch, gpus_per_node)
    return min(max(round(samples / workload.task.dataset_samples), MIN_EPOCHS), MAX_EPOCHS)


def job_profile(
    spec: JobSpec, catalogue: Catalogue, gpus_per_node: int = 4, gpu_types: Collection[str] = ()
) -> Profile:
    """The workload's profile with ``samples_per_epoch`` such that the job, run as logged, takes the logged time.

    P0 = max_epochs x samples_per_epoch = duration x T(requested GPUs, initial batch, nothing frozen), to the rounding of an
    epoch to whole samples. Without a logged duration an epoch is the data set. ``gpu_types``: those of the cluster; where
    one differs from the catalogue's, the profile holds what the job costs on every measured type.

    Raises:
        UserError: the job names no workload, or one that is not in the catalogue.
    """
    workload = _workload(spec, catalogue)
    own = all(workload.profile.knows(gpu_type) for gpu_type in gpu_types)
    profile = workload.profile if own else catalogue.typed_profile(workload.name)
    if spec.duration_s is None:
        return profile
    speed = full_speed(workload.profile, spec.requested_gpus, spec.batch.initial, gpus_per_node)
    per_epoch = max(1, round(spec.duration_s * speed / spec.max_epochs))
    _ = profile.theta, profile.omega  # made once for all jobs of the workload
    return altered(profile, samples_per_epoch=per_epoch)


def check_gpu_types(gpu_types: Collection[str], catalogue: Catalogue) -> None:
    """On a cluster of one type the log says how fast jobs are; where types differ, something must be known of each.

    Raises:
        UserError: a type of several of which there are no measurements.
    """
    profile = catalogue.typed_profile(next(iter(catalogue)))
    unknown = [gpu_type for gpu_type in gpu_types if not profile.knows(gpu_type)] if len(gpu_types) > 1 else []
    if unknown:
        known = [name for name in GPU_TYPES if profile.knows(name)]
        raise UserError(
            f"nothing is known of the speed of {unknown[0]!r} against other GPU types",
            f"mix {', '.join(known)}; or give a cluster of one type",
        )


def job_curves(spec: JobSpec, catalogue: Catalogue) -> LayerCurves:
    """The gradient statistics of a job, by layer and progress.

    Raises:
        UserError: the job names no workload, or one that is not in the catalogue.
    """
    workload = _workload(spec, catalogue)
    return workload.curves.bind(workload.profile.num_layers, spec.batch.initial)


def _workload(spec: JobSpec, catalogue: Catalogue) -> Workload:
    if spec.workload is None:
        raise UserError(f"job {spec.job_id}: no workload", f"a simulated job names one of {', '.join(catalogue)}")
    return catalogue.require(spec.workload)
