"""An invented application, written as the artifact writes its measurements."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from icefrog.executors.sim.pollux.application import Application
from icefrog.executors.sim.pollux.world import read_applications
from icefrog.testing.builders import cluster
from icefrog.traces.trace import ReadReport, Trace, TraceJob

FOUR_NODES = cluster(4, 4)


def step_s(nodes: int, gpus: int, local: int) -> tuple[float, float]:
    """(step, sync): 10 ms a sample; 0.1 s for each GPU beyond the first, 0.3 s more for each further node."""
    sync = 0.1 * (gpus - 1) + 0.3 * (nodes - 1)
    return 0.01 * local + sync, sync


def write(folder: Path, name: str = "bert") -> Path:
    """Files of an application: 2 epochs, batches 8, 16, 32, local batches 4, 8, 16. Returns the data folder."""
    app = folder / "pollux" / name
    app.mkdir(parents=True)
    placements = [(a,) for a in (1, 2, 3, 4)]
    placements += [(a, b) for a, b in product((1, 2, 3, 4), repeat=2) if a <= b]
    lines = ["placement,local_bsz,step_time,sync_time"]
    for placement, local in product(placements, (4, 8, 16)):
        step, sync = step_s(len(placement), sum(placement), local)
        lines.append(f"{''.join(map(str, placement))},{local},{step},{sync}")
    (app / "placements.csv").write_text("\n".join(lines) + "\n")
    lines = ["num_nodes,num_replicas,local_bsz,step_time,sync_time"]
    for nodes, per_node, local in product((4, 16), (1, 2, 3, 4), (4, 8, 16)):
        step, sync = step_s(nodes, nodes * per_node, local)
        lines.append(f"{nodes},{nodes * per_node},{local},{step},{sync}")
    (app / "scalability.csv").write_text("\n".join(lines) + "\n")
    for batch, iterations in ((8, 100), (16, 60), (32, 40)):
        lines = ["progress,iteration,metric,grad_sqr,grad_var"]
        for epoch in (1, 2):
            progress = 100.0 * epoch + (5.0 if batch == 32 else 0.0)
            lines.append(f"{progress},{iterations * epoch},0.5,1.0,{float(epoch)}")
        (app / f"validation-{batch}.csv").write_text("\n".join(lines) + "\n")
    return folder


def application(folder: Path) -> Application:
    return read_applications(write(folder), ["bert"])["bert"]


def trace(*jobs: tuple[float, int, int]) -> Trace:
    """(submission in s, GPUs, batch) of each job."""
    rows = tuple(
        TraceJob(f"bert-{i}", submit_s, gpus, 1.0, application="bert", batch_size=batch)
        for i, (submit_s, gpus, batch) in enumerate(jobs)
    )
    return Trace(rows, ReadReport(len(rows), len(rows)), "invented")
