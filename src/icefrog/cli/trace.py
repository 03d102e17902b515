"""``icefrog trace convert | describe | synth``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from icefrog.cli.numbers import HOURS, LOAD
from icefrog.cli.simulation import parse_time
from icefrog.errors import UserError

if TYPE_CHECKING:
    from icefrog.traces import Trace


@click.group()
def trace() -> None:
    """Read, describe, convert and generate job logs."""


@trace.command()
@click.argument("source", metavar="FILE|synth:NAME")
@click.option("--format", "trace_format", metavar="F", help="Trace format; default: recognised from the header.")
@click.option("--start", metavar="ISO", help="Only jobs submitted from this local time on.")
@click.option("--hours", type=HOURS, help="Only jobs submitted within so many hours.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE.html", help="Also write a page with plots.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def describe(
    source: str, trace_format: str | None, start: str | None, hours: float | None, out: Path | None, as_json: bool
) -> None:
    """What is in a trace: rows kept and dropped by reason, quantiles, distributions, by VC and state."""
    from rich.console import Console

    from icefrog.replay import TraceChoice
    from icefrog.traces import describe as facts
    from icefrog.traces import describe_text, draw
    from icefrog.traces.page import render

    read = TraceChoice(source, trace_format, start=parse_time(start), hours=hours).read()
    if out is not None:
        _write_text(out, render(read))
    console = Console()
    if as_json:
        click.echo(json.dumps(facts(read), indent=2))
    elif console.is_terminal:
        console.print(draw(facts(read)))
    else:
        click.echo(describe_text(read))
    if out is not None and not as_json:
        click.echo(f"page: {out}")


@trace.command()
@click.argument("source", metavar="FILE")
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--format", "trace_format", metavar="F", help="Trace format; default: recognised from the header.")
@click.option("--start", metavar="ISO", help="Only jobs submitted from this local time on.")
@click.option("--hours", type=HOURS, help="Only jobs submitted within so many hours.")
@click.option("--jobs", "num_jobs", type=int, help="Sample so many jobs.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the sample.")
def convert(
    source: str,
    target: Path,
    trace_format: str | None,
    start: str | None,
    hours: float | None,
    num_jobs: int | None,
    seed: int,
) -> None:
    """Turn a public log into our own CSV."""
    from icefrog.replay import TraceChoice

    if target.exists() and target.samefile(source):
        raise UserError(f"{target} is the log itself", "write to another file: a public log is never overwritten")
    read = TraceChoice(source, trace_format, 1.0, parse_time(start), hours, num_jobs, seed).read()
    _write(read, target)


@trace.command()
def formats() -> None:
    """The formats that can be read, and the generators there are."""
    from icefrog.traces import synth_listing, trace_formats

    for format in trace_formats():
        click.echo(f"{format.name:12} {format.description}")
    click.echo()
    for name, about in synth_listing():
        click.echo(f"synth:{name:18} {about}")


@trace.command()
@click.argument("name", metavar="NAME")
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--load", type=LOAD, default=1.0, show_default=True, help="Times the generator's number of jobs.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
def synth(name: str, target: Path, load: float, seed: int) -> None:
    """Generate a trace (as philly-120) as our own CSV; `icefrog trace formats` lists the generators."""
    from icefrog.traces.synth import synth_trace

    _write(synth_trace(name, load, seed), target)


def _write(read: Trace, target: Path) -> None:
    from icefrog.traces import write_text

    text = write_text(read)
    if str(target) == "-":
        click.echo(text, nl=False)
        return
    _write_text(target, text)
    click.echo(f"{read.report.text()}; written to {target}")


def _write_text(target: Path, text: str) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror}", "give a path that can be written") from error
