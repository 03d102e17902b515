"""The catalogue of models that simulated jobs train: costs, gradient statistics, and the provenance of both."""

from icefrog.workloads.catalogue import Catalogue, Provenance, Task, Workload, load_catalogue, workload_rows
from icefrog.workloads.classes import CLASSES, GpuTimeClass, gpu_time_class
from icefrog.workloads.gradients import GradientCurves, LayerCurves
from icefrog.workloads.jobs import job_curves, job_profile

__all__ = [
    "CLASSES",
    "Catalogue",
    "GpuTimeClass",
    "GradientCurves",
    "LayerCurves",
    "Provenance",
    "Task",
    "Workload",
    "gpu_time_class",
    "job_curves",
    "job_profile",
    "load_catalogue",
    "workload_rows",
]
