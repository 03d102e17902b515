"""Acme ``trace_seren.csv`` and ``trace_kalos.csv`` (Shanghai AI Laboratory, NSDI'24): LLM development clusters.

Times carry an offset (+08:00 for Seren, +00:00 for Kalos) and are compared as instants; the trace's local time is that
of the first row's offset. The duration is end - start: the derived columns can contradict the times. Every GPU of both
clusters is an A100 with 80 GB.
"""

from __future__ import annotations

import re

import polars as pl

from icefrog.traces.rows import Part, Rows, assemble, gpu_jobs, parts_of
from icefrog.traces.source import Source
from icefrog.traces.table import Table
from icefrog.traces.trace import Trace

NAME = "acme"
COLUMNS = ("job_id", "user", "gpu_num", "type", "state", "submit_time", "start_time", "end_time")
DESCRIPTION = "Acme trace_seren.csv, trace_kalos.csv (" + ",".join(COLUMNS) + ",...)"
FORMATS = ("%Y-%m-%d %H:%M:%S%z", "%Y-%m-%d %H:%M:%S%.f%z", "%Y-%m-%dT%H:%M:%S%z")
GPU_TYPE = "a100-80gb"
_OFFSET = re.compile(r"[+-](\d\d):?(\d\d)$")


def matches(source: Source) -> bool:
    """Whether the header belongs to this format."""
    return set(COLUMNS) <= set(source.header) and "vc" not in source.header


def read(source: Source) -> Trace:
    """GPU jobs that ran to an end, in order of submission; the others are dropped and counted."""
    zone = ""

    def part(table: Table, first_row: int) -> Part:
        nonlocal zone
        zone = zone or _offset(table.frame["submit_time"])
        return _part(table, first_row)

    parts = parts_of(source, part)
    cluster = "kalos" if "mem_per_pod_GB" in source.header else "seren"
    label = f"{source.path.name} ({NAME} {cluster})"
    return assemble(parts, label, offset_s=offset_s(zone), zone=zone)


def offset_s(zone: str) -> float:
    """Seconds of an offset like ``+08:00``; 0 of anything else."""
    found = _OFFSET.fullmatch(zone)
    if found is None:
        return 0.0
    seconds = int(found[1]) * 3600.0 + int(found[2]) * 60.0
    return -seconds if zone.startswith("-") else seconds


def _offset(times: pl.Series) -> str:
    first = times.str.extract(r"([+-]\d\d:\d\d)$", 1).drop_nulls()
    return str(first[0]) if len(first) else ""


def _part(table: Table, first_row: int) -> Part:
    rows = Rows(table, first_row)
    return rows.part(
        **gpu_jobs(rows, FORMATS),
        gpu_type=pl.repeat(GPU_TYPE, rows.height, eager=True),
        kind=rows.text("type"),
    )
