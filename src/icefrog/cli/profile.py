"""``icefrog profile``: measure what a training script costs, and write the profile that the scheduler reads."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from icefrog.errors import UserError

if TYPE_CHECKING:
    from icefrog.estimate.fit_profile import PointError, ProfileFit
    from icefrog.runtime.protocol import Probed
    from icefrog.spec import JobSpec

_KINDS = ("ddp", "fsdp", "pipeline", "hybrid")


class Numbers(click.ParamType[tuple[int, ...]]):
    """Whole numbers with commas between them, each once."""

    name = "N[,N...]"

    def __init__(self, least: int) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Ascending."""
        try:
            numbers = tuple(sorted({int(part) for part in str(value).split(",")}))
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers, for example 1,2,4", param, ctx)
        if numbers[0] < self.least or numbers[-1] > 1_000_000:
            self.fail(f"{value!r}: numbers from {self.least} to 1000000", param, ctx)
        return numbers


@click.command()
@click.argument("script", metavar="SCRIPT.py|package.module:function")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--gpus", type=Numbers(1), default="1,2", show_default=True, help="GPU counts (processes on CPU).")
@click.option("--batch", type=Numbers(1), default="16,32", show_default=True, help="Batches per GPU, samples.")
@click.option("--depths", type=Numbers(0), help="Frozen layers.  [default: 0, 1/4, 1/2 and 3/4 of all]")
@click.option("--steps", type=click.IntRange(3, 64), default=20, show_default=True, help="Steps a configuration.")
@click.option("--parallel", type=click.Choice(_KINDS), default="ddp", show_default=True, help="How it is spread.")
@click.option("--samples-per-epoch", type=click.IntRange(1), help="Where the script does not say it.")
@click.option("--timeout", "timeout_s", type=click.IntRange(1), default=900, show_default=True, help="Of one run, s.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Default: SCRIPT.profile.json.")
@click.option("--json", "as_json", is_flag=True, help="Print profile and errors as JSON.")
def profile(
    script: str,
    arguments: tuple[str, ...],
    gpus: tuple[int, ...],
    batch: tuple[int, ...],
    depths: tuple[int, ...] | None,
    steps: int,
    parallel: str,
    samples_per_epoch: int | None,
    timeout_s: int,
    out: Path | None,
    as_json: bool,
) -> int:
    """Run a training script at several GPU counts, batches and frozen depths, and fit its throughput model.

    SCRIPT uses LayerElastic and takes its batch from it (elastic.sampler). ARGUMENTS are the script's own (its
    options behind --). Runs that were measured stay in FILE.runs.json; the same command goes on where it stopped.
    """
    from icefrog.executors.local.probe import ProbeFailedError, run_probe, usable_gpus
    from icefrog.measured import Sidecar, digest, fit_runs, require_epoch
    from icefrog.runtime.protocol import ProbeRequest

    name, path, spec = _job(script, arguments, gpus)
    target = out or Path(f"{name}.profile.json")
    gpu_type = usable_gpus(max(gpus))
    facts = {"script": script, "arguments": arguments, "depths": depths, "steps": steps, "parallel": parallel}
    store = target.with_name(f"{target.name}.runs.json")
    known = Sidecar.read(store, digest(path, {**facts, "gpu_type": gpu_type}))
    request = ProbeRequest(steps=steps, depths=depths)
    failures: list[str] = []
    wanted = [(count, local) for count in gpus for local in batch]
    with _progress(len(wanted)) as tell, tempfile.TemporaryDirectory(prefix="icefrog-profile-") as folder:
        for count, local in wanted:
            key = f"{count}x{local}"
            tell(f"{count} GPUs, batch {local}", key in known.runs)
            if key not in known.runs:
                grant = _grant(count, local)
                try:
                    run = run_probe(Path(folder) / key, spec, grant, request, parallel, float(timeout_s))
                except ProbeFailedError as error:
                    failures.append(f"{count} GPUs, batch {local}: {error}")
                    continue
                require_epoch(run, samples_per_epoch)
                known = known.with_run(key, run)
                known.write(store)
    for failure in failures:
        click.echo(f"not measured: {failure}", err=True)
    runs = [known.runs[key] for count, local in wanted if (key := f"{count}x{local}") in known.runs]
    if not runs:
        click.echo(f"nothing was measured; does {script} train with LayerElastic when it is run alone?", err=True)
        return 1
    fit = fit_runs(name, runs, gpu_type, samples_per_epoch)
    target.write_text(fit.profile.model_dump_json(by_alias=True, indent=1) + "\n")
    _show(fit, runs, target, as_json, set(batch))
    return 1 if failures else 0


def _job(script: str, arguments: Sequence[str], gpus: Sequence[int]) -> tuple[str, Path | None, JobSpec]:
    """(name, the script's file, a job that runs it)."""
    from pydantic import ValidationError

    from icefrog.spec import JobSpec

    path = Path(script) if script.endswith(".py") else None
    if path is not None and not path.is_file():
        raise UserError(f"{script}: no such file", "give the path of a training script, or package.module:function")
    name = path.stem if path is not None else script.partition(":")[0].rpartition(".")[2]
    fields: dict[str, Any] = {"entry": script} if path is None else {"command": ["python", script, *arguments]}
    if path is None and arguments:
        raise UserError(f"{script} is a function: it takes no arguments", "give a script to pass arguments")
    fields |= {"name": name, "gpus": sorted(gpus), "batch": {"global": max(gpus)}, "max_epochs": 1_000_000}
    try:
        return name, path, JobSpec.model_validate({**fields, "cwd": str(Path.cwd())})
    except ValidationError as error:
        raise UserError(
            f"{script!r} is neither a Python file nor package.module:function",
            "for example train.py, or mine.train:main",
        ) from error


def _grant(num_gpus: int, batch_per_gpu: int) -> Any:
    from icefrog.events import Grant

    return Grant(num_gpus=num_gpus, batch_per_gpu=batch_per_gpu)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str, bool], None]]:
    """A bar on a terminal (stderr); nothing in a pipe."""
    if not sys.stderr.isatty():
        yield lambda _text, _known: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        begun = 0

        def tell(text: str, known: bool) -> None:
            nonlocal begun
            bar.update(task, description=text + (" (kept)" if known else ""), completed=begun)
            begun += 1

        yield tell


def _show(fit: ProfileFit, runs: Sequence[Probed], target: Path, as_json: bool, batches: set[int]) -> None:
    from icefrog.measured import cells_of, summary

    cells = cells_of(runs)
    errors = summary(fit.errors)
    if as_json:
        document = {
            "schema": 1,
            "profile": fit.profile.model_dump(mode="json", by_alias=True),
            "errors": errors,
            "cells": [
                {**cell.model_dump(mode="json"), "fitted_s": error.fitted_s, "held_out_s": error.unseen_s}
                for cell, error in zip(cells, fit.errors, strict=True)
            ],
            "file": str(target),
        }
        click.echo(json.dumps(document, indent=2, allow_nan=False))
        return
    console = Console()
    console = console if console.is_terminal else Console(width=120)
    console.print(_layer_table(fit))
    console.print(_error_table(fit.errors))
    for kind, text in (("fitted", "configurations fitted"), ("held_out", "configurations left out")):
        if kind in errors:
            e = errors[kind]
            click.echo(
                f"error of the step time, {text}: median {_pct(e['median'])}, p90 {_pct(e['p90'])}, max {_pct(e['max'])}"
            )
    if odd := sorted({cell.batch_per_gpu for cell in cells} - batches):
        click.echo(f"the script made batches of {odd} per GPU: take them from elastic.sampler(...) to set them")
    click.echo(f"profile: {target}")


def _layer_table(fit: ProfileFit) -> Table:
    table = Table(pad_edge=False)
    table.add_column("layer")
    for title in ("fwd us/sample", "bwd us/sample", "MFLOPs/sample", "parameters KB", "output B/sample"):
        table.add_column(title, justify="right")
    for layer in fit.profile.layers:
        times = (f"{1e6 * layer.fwd_s:.1f}", f"{1e6 * layer.bwd_s:.1f}")
        sizes = (f"{layer.flops / 1e6:.2f}", f"{layer.param_bytes / 1e3:.1f}", f"{layer.activation_bytes:.0f}")
        table.add_row(layer.name, *times, *sizes)
    return table


def _error_table(errors: Sequence[PointError]) -> Table:
    table = Table(pad_edge=False)
    for title in ("GPUs", "batch/GPU", "frozen", "step ms", "sync ms", "fitted ms", "error", "left out ms", "error"):
        table.add_column(title, justify="right")
    for error in errors:
        at = error.point
        sync = "-" if at.sync_s is None else f"{1e3 * at.sync_s:.2f}"
        left = (
            ("-", "-") if error.unseen_s is None else (f"{1e3 * error.unseen_s:.2f}", _pct(error.unseen_error or 0.0))
        )
        where = (str(at.num_gpus), str(at.batch_per_gpu), str(at.frozen_layers))
        table.add_row(
            *where, f"{1e3 * at.step_s:.2f}", sync, f"{1e3 * error.fitted_s:.2f}", _pct(error.fitted_error), *left
        )
    return table


def _pct(share: float) -> str:
    return f"{100 * share:.1f} %"
