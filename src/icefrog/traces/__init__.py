"""Job logs: one reader per format, windows and samples of them, seeded generators, and what jobs they become."""

from icefrog.traces.describe import describe
from icefrog.traces.drawing import describe_text, draw
from icefrog.traces.jobs import TraceJobs, task_mix, to_specs
from icefrog.traces.own_csv import write_text
from icefrog.traces.reading import TraceFormat, read_trace, trace_formats
from icefrog.traces.synth import synth_listing, synth_names, synth_trace
from icefrog.traces.trace import ReadReport, Trace, TraceJob
from icefrog.traces.window import limit_gpus, pool_days, sample, scale_load, window

__all__ = [
    "ReadReport",
    "Trace",
    "TraceFormat",
    "TraceJob",
    "TraceJobs",
    "describe",
    "describe_text",
    "draw",
    "limit_gpus",
    "pool_days",
    "read_trace",
    "sample",
    "scale_load",
    "synth_listing",
    "synth_names",
    "synth_trace",
    "task_mix",
    "to_specs",
    "trace_formats",
    "window",
    "write_text",
]
