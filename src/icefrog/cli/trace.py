"""``icefrog trace convert | describe | synth``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from icefrog.cli.numbers import HOURS, LOAD
from icefrog.cli.simulation import parse_time


@click.group()
def trace() -> None:
    """Read, describe, convert and generate job logs."""


@trace.command()
@click.argument("source", metavar="FILE|synth:NAME")
@click.option("--format", "trace_format", metavar="F", help="Trace format; default: recognised from the header.")
@click.option("--start", metavar="ISO", help="Only jobs submitted from this local time on.")
@click.option("--hours", type=HOURS, help="Only jobs submitted within so many hours.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def describe(source: str, trace_format: str | None, start: str | None, hours: float | None, as_json: bool) -> None:
    """What is in a trace: rows kept and dropped by reason, quantiles, a histogram of durations."""
    from icefrog.replay import TraceChoice
    from icefrog.traces import describe as facts
    from icefrog.traces import describe_text

    read = TraceChoice(source, trace_format, start=parse_time(start), hours=hours).read()
    click.echo(json.dumps(facts(read), indent=2) if as_json else describe_text(read))


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

    read = TraceChoice(source, trace_format, 1.0, parse_time(start), hours, num_jobs, seed).read()
    _write(read, target)


@trace.command()
@click.argument("name", metavar="NAME")
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--load", type=LOAD, default=1.0, show_default=True, help="Times the generator's number of jobs.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
def synth(name: str, target: Path, load: float, seed: int) -> None:
    """Generate a trace (synth:philly-120) as our own CSV."""
    from icefrog.traces.synth import synth_trace

    _write(synth_trace(name, load, seed), target)


def _write(read: object, target: Path) -> None:
    from icefrog.errors import UserError
    from icefrog.traces import Trace, write_text

    assert isinstance(read, Trace)
    text = write_text(read)
    if str(target) == "-":
        click.echo(text, nl=False)
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror}", "give a path that can be written") from error
    click.echo(f"{read.report.text()}; written to {target}")
