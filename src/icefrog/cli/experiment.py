"""``icefrog experiment | whatif``: many simulations, compared in pairs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from icefrog.cli.numbers import HOURS, LOAD
from icefrog.cli.threads import one_blas_thread

if TYPE_CHECKING:
    from icefrog.experiment.aggregate import Document
    from icefrog.experiment.backends import Backend
    from icefrog.experiment.store import CellStore
    from icefrog.experiment.sweep import Planned, Sweep

WORKERS = click.option("--workers", type=click.IntRange(1, 1024), help="Processes. Default: one a core.")
OUT = click.option("--out", type=click.Path(path_type=Path), help="Folder of results. Default: runs/NAME.")
RAY = click.option("--ray", metavar="ADDRESS", help="Compute on a Ray cluster: auto, HOST:PORT or ray://HOST:PORT.")
DATA = click.option("--data", type=click.Path(path_type=Path), help="Replaces $ICEFROG_DATA in paths of traces.")
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print experiment.json.")


@click.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE.yaml")
@OUT
@WORKERS
@RAY
@DATA
@click.option("--only", multiple=True, metavar="KEY=VALUE", help="Only cells with this variant, trace, seed, ...")
@click.option("--dry-run", is_flag=True, help="List the cells, and which are finished; compute nothing.")
@AS_JSON
def experiment(
    file: Path,
    out: Path | None,
    workers: int | None,
    ray: str | None,
    data: Path | None,
    only: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> int:
    """Run an experiment file: policies x traces x loads x seeds -> one table and one report.

    Finished cells are kept in OUT/cells and never repeated; an interrupted experiment goes on where it stopped.
    """
    one_blas_thread()
    from icefrog.experiment.aggregate import aggregate
    from icefrog.experiment.cells import expand
    from icefrog.experiment.select import select
    from icefrog.experiment.spec import read_experiment
    from icefrog.experiment.store import CellStore
    from icefrog.experiment.sweep import default_out, plan

    if data is not None:
        os.environ["ICEFROG_DATA"] = str(data)  # workers inherit it
    what = expand(read_experiment(file))
    planned = plan(select(list(what.cells()), only))
    out_dir = out or default_out(what.name)
    if dry_run:
        return _list_cells(planned, out_dir)
    store = CellStore(out_dir)
    sweep = _compute(planned, store, backend(workers, ray))
    return _show(aggregate(what, planned, sweep), planned, sweep, out_dir, as_json=as_json)


@click.command()
@click.option("--trace", "source", required=True, metavar="FILE|synth:NAME", help="A job log, or a generator.")
@click.option("--cluster", required=True, metavar="NxG[:TYPE]|FILE", help="The cluster as it is.")
@click.option("--policy", default="icefrog", show_default=True, metavar="NAME", help="The policy as it is.")
@click.option(
    "--change", "changes", multiple=True, required=True, metavar="WHAT", help="gpus+8, policy=srtf, ...; repeatable."
)
@click.option(
    "--set", "settings", multiple=True, metavar="POLICY.KEY=VALUE", help="An option of the policy; repeatable."
)
@click.option("--load", type=LOAD, default=1.0, show_default=True, help="Times the jobs in the same time.")
@click.option("--seeds", type=click.IntRange(1, 1000), default=5, show_default=True, help="Replicates.")
@click.option("--start", metavar="ISO", help="Only jobs submitted from this local time on.")
@click.option("--hours", type=HOURS, help="Only jobs submitted within so many hours.")
@click.option("--jobs", "num_jobs", type=click.IntRange(min=1), help="Sample so many jobs (times the load) a seed.")
@click.option("--format", "trace_format", metavar="F", help="Trace format; default: recognised from the header.")
@OUT
@WORKERS
@RAY
@AS_JSON
def whatif(
    source: str,
    cluster: str,
    policy: str,
    changes: tuple[str, ...],
    settings: tuple[str, ...],
    load: float,
    seeds: int,
    start: str | None,
    hours: float | None,
    num_jobs: int | None,
    trace_format: str | None,
    out: Path | None,
    workers: int | None,
    ray: str | None,
    as_json: bool,
) -> int:
    """Compare a set-up with a changed one, on the same jobs.

    \b
    --change gpus+8            8 more GPUs (also gpus-8, gpus*2, gpus=64, nodes+2, cluster=16x4)
    --change policy=srtf       another policy; icefrog.rho=0.3: another option of it
    --change load=1.5          the same jobs, submitted 1.5 times as fast
    --change freeze=half       only half the jobs allow freezing (all, half, none, or a share)
    --change noise=0.3         a setting of the world, or round_s, restart_s
    --change gpus+8,load=1.5   both together; give --change again for another scenario
    """
    one_blas_thread()
    from icefrog.cli.simulation import parse_settings, parse_time
    from icefrog.experiment.cells import Condition, Variant
    from icefrog.experiment.changes import Setup, changed
    from icefrog.experiment.spec import TraceEntry
    from icefrog.experiment.store import CellStore
    from icefrog.experiment.sweep import default_out, plan
    from icefrog.experiment.whatif import BASE, scenarios, whatif_findings
    from icefrog.policies import make_policy
    from icefrog.specfile import parse_cluster

    make_policy(policy)
    options = parse_settings(settings, [policy]).get(policy, {})
    make_policy(policy, options)
    base = Setup(Variant(BASE, policy, options, BASE), Condition(parse_cluster(cluster), load))
    trace = TraceEntry(source=source, format=trace_format, start=parse_time(start), hours=hours, jobs=num_jobs)
    setups = scenarios(base, [changed(base, text) for text in changes])
    planned = plan([cell for setup in setups for cell in setup.cells(trace, range(seeds))])
    out_dir = out or default_out("whatif")
    sweep = _compute(planned, CellStore(out_dir), backend(workers, ray))
    document = whatif_findings(f"{source} on {cluster} under {policy}", setups, planned, sweep)
    return _show(document, planned, sweep, out_dir, as_json=as_json)


def backend(workers: int | None, ray: str | None) -> Backend:
    """Where cells are computed."""
    from icefrog.experiment.backends import Inline, Processes

    if ray is not None:
        from icefrog.experiment.ray_backend import RayCluster

        return RayCluster(ray, workers)
    number = workers or _cores()
    os.environ.setdefault(
        "POLARS_MAX_THREADS", "1"
    )  # workers inherit it: one process a core, not one thread a core in each
    return Inline() if number == 1 else Processes(number)


def _cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _compute(planned: Sequence[Planned], store: CellStore, where: Backend) -> Sweep:
    """Run what is missing, with progress on a terminal."""
    from icefrog.experiment.sweep import run_sweep

    try:
        with _progress() as progress:
            return run_sweep(planned, store, where, progress)
    except KeyboardInterrupt:
        click.echo(f"finished cells are kept in {store.folder}; the same command goes on from there", err=True)
        raise


def _show(document: Document, planned: Sequence[Planned], sweep: Sweep, out_dir: Path, *, as_json: bool) -> int:
    """Write the files, print the table. 1 if a cell failed."""
    from icefrog.experiment.files import document_json, write_files
    from icefrog.experiment.table import render

    page = write_files(out_dir, document, planned, sweep)
    if as_json:
        click.echo(document_json(document), nl=False)
    else:
        _print(document, sweep, render(document), page)
    _complain(document["failed"])
    return 1 if document["failed"] else 0


def _complain(failed: Mapping[str, str]) -> None:
    """One line a reason."""
    for why in dict.fromkeys(failed.values()):
        labels = [label for label, reason in failed.items() if reason == why]
        more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        click.echo(f"failed: {labels[0]}{more}: {why}", err=True)


def _print(document: dict[str, Any], sweep: Sweep, table: Any, page: Path) -> None:
    cells = document["cells"]
    reused = f", {sweep.reused} of them finished before" if sweep.reused else ""
    click.echo(f"{document['name']}: {cells['done']} of {cells['all']} cells{reused}")
    if document["conditions"]:
        console = Console()
        (console if console.is_terminal else Console(width=190)).print(table)
    click.echo(f"report: {page}")


def _list_cells(planned: Sequence[Planned], out_dir: Path) -> int:
    """The cells, one a line; nothing is written."""
    from icefrog.experiment.store import finished

    seen: dict[str, bool] = {}
    for one in planned:
        if one.key not in seen:
            seen[one.key] = finished(out_dir, one.key) is not None
        click.echo(f"{'done' if seen[one.key] else 'todo'}  {one.key}  {one.cell.label()}")
    done = sum(seen.values())
    click.echo(f"{len(seen)} cells, {done} finished, {len(seen) - done} to do; results in {out_dir}")
    return 0


@contextmanager
def _progress() -> Iterator[Any]:
    """A bar on a terminal (stderr); nothing in a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("cells"),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=None)

        def update(done: int, total: int, last: str) -> None:
            bars.update(task, completed=done, total=total, description=last)

        yield update
