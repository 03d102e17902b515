"""Job logs: one reader per format, windows and samples of them, and seeded generators."""

from icefrog.traces.own_csv import write_text
from icefrog.traces.reading import TraceFormat, read_trace, trace_formats
from icefrog.traces.trace import ReadReport, Trace, TraceJob
from icefrog.traces.window import limit_gpus, pool_days, sample, scale_load, window

__all__ = [
    "ReadReport",
    "Trace",
    "TraceFormat",
    "TraceJob",
    "limit_gpus",
    "pool_days",
    "read_trace",
    "sample",
    "scale_load",
    "trace_formats",
    "window",
    "write_text",
]
