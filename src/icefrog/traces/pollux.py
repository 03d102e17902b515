"""Workloads of Pollux (OSDI'21) and Sia (SOSP'23): ``name,time,application,num_replicas,batch_size``, time in s.

The file says what a job trains, not how long that takes. ``duration_s`` is our estimate for the requested replicas and
batch on the artifact's own GPU (T4), nodes of 4: iterations that the measured training runs took at that batch (straight in
logarithms between the measured batches) times the fitted step time (``workloads/fitted_pollux.json``). The Pollux world
does not use it: there every job advances by the measurements themselves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import polars as pl

from icefrog.estimate.throughput import params_step_s
from icefrog.profile import FloatArray, ThroughputParams
from icefrog.traces.rows import Part, Rows, assemble, parts_of
from icefrog.traces.source import Source
from icefrog.traces.table import Table
from icefrog.traces.trace import Trace

NAME = "pollux"
COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")
DESCRIPTION = "Pollux and Sia workloads (" + ",".join(COLUMNS) + ")"
GPU_TYPE = "t4"
_GPUS_PER_NODE = 4


@dataclass(frozen=True)
class Application:
    """One of the measured applications."""

    batches: FloatArray  # (n,), ascending, samples
    iterations: FloatArray  # (n,), of a whole training run at each batch
    throughput: ThroughputParams
    max_local_batch: int

    def duration_s(self, num_replicas: int, batch_size: int) -> float:
        """Seconds of the whole training with a fixed batch on ``num_replicas`` GPUs, packed 4 to a node."""
        log_steps = np.interp(math.log(batch_size), np.log(self.batches), np.log(self.iterations))
        local = batch_size / num_replicas
        micro = max(1, math.ceil(local / self.max_local_batch))
        nodes = -(-num_replicas // _GPUS_PER_NODE)
        step_s = params_step_s(self.throughput, 1.0, 1.0, num_replicas, nodes, local / micro, micro)
        return math.exp(float(log_steps)) * float(step_s)


def applications() -> Mapping[str, Application]:
    """The measured applications by name."""
    steps = _load("icefrog.traces", "fitted/pollux_iterations.json")["applications"]
    fitted = _load("icefrog.workloads", "fitted_pollux.json")["applications"]
    return {
        name: Application(
            np.array([float(batch) for batch in table]),
            np.array([float(table[batch]) for batch in table]),
            ThroughputParams.model_validate(fitted[name][GPU_TYPE]["throughput"]),
            int(max(fitted[name][GPU_TYPE]["measured_local_batch"])),
        )
        for name, table in steps.items()
    }


def matches(source: Source) -> bool:
    """Whether the header belongs to this format."""
    return set(COLUMNS) <= set(source.header)


def read(source: Source) -> Trace:
    """Jobs in order of submission; ``submit_s``, replicas and batch as in the file."""
    known = applications()
    return assemble(parts_of(source, lambda table, row: _part(table, row, known)), f"{source.path.name} ({NAME})")


def _part(table: Table, first_row: int, known: Mapping[str, Application]) -> Part:
    rows = Rows(table, first_row)
    submit_s, replicas, batch = rows.number("time"), rows.count("num_replicas"), rows.number("batch_size")
    name = rows.text("application")
    rows.drop("submitted before the start", submit_s < 0)
    rows.drop("no batch size", batch.is_null())
    rows.drop("batch not a whole number >= the replicas", (batch < replicas) | (batch != batch.floor()) | (batch > 1e9))
    rows.drop("no application", name.is_null())
    rows.drop("application that was not measured", ~name.is_in(list(known)))
    duration_s = _durations(name, replicas, batch, known)
    rows.drop_impossible(submit_s, replicas, duration_s)
    return rows.part(
        job_id=rows.text("name"),
        submit_s=submit_s,
        num_gpus=replicas,
        duration_s=duration_s,
        gpu_type=pl.repeat(GPU_TYPE, rows.height, eager=True),
        application=name,
        num_replicas=replicas,
        batch_size=batch,
    )


def _durations(name: pl.Series, replicas: pl.Series, batch: pl.Series, known: Mapping[str, Application]) -> pl.Series:
    keys = list(zip(name.to_list(), replicas.to_list(), batch.to_list(), strict=True))
    found = {key: _duration(*key, known) for key in set(keys)}
    return pl.Series([found[key] for key in keys], dtype=pl.Float64)


def _duration(
    name: str | None, replicas: float | None, batch: float | None, known: Mapping[str, Application]
) -> float | None:
    if name is None or name not in known or not replicas or not batch or not 1 <= batch <= 1e9 or batch < replicas:
        return None
    return known[name].duration_s(int(replicas), int(batch))


def _load(package: str, name: str) -> Any:
    return json.loads((resources.files(package) / name).read_text(encoding="utf-8"))
