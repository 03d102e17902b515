"""``icefrog demo | up | down | submit | jobs | logs | explain | cancel``: a live cluster on this machine."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from icefrog.cli.numbers import ROUND_S
from icefrog.errors import UserError

_HOME = click.option(
    "--home", type=click.Path(path_type=Path), help="State folder. Default: $ICEFROG_HOME, else ./.icefrog."
)


def _home(path: Path | None) -> Any:
    from icefrog.home import Home

    return Home.find(path)


def _me(home: Path | None) -> str:
    """How the user calls us, for hints that can be pasted."""
    program = sys.argv[0] if Path(sys.argv[0]).name == "icefrog" else "icefrog"
    program = os.path.relpath(program) if os.sep in program else program
    where = "" if home is None else f" --home {shlex.quote(str(home))}"
    return "{} {{}}{}".format(*(part.replace("{", "{{").replace("}", "}}") for part in (shlex.quote(program), where)))


@click.command()
@_HOME
@click.option("--policy", metavar="NAME", help="See `icefrog policies`. Default: the last one used here, else icefrog.")
@click.option(
    "--set", "settings", multiple=True, metavar="POLICY.KEY=VALUE", help="An option of the policy; repeatable."
)
@click.option("--slots", type=click.IntRange(1, 1024), help="CPU slots to use as GPUs. Default: GPUs, else one a core.")
@click.option("--round", "round_s", type=ROUND_S, help="Seconds between rounds.")
@click.option(
    "--until-idle", is_flag=True, help="Return when every job is finished; 1 if one failed or missed its target."
)
@click.option("--detach", "-d", is_flag=True, help="Run in the background; `icefrog down` stops it.")
def up(
    home: Path | None,
    policy: str | None,
    settings: tuple[str, ...],
    slots: int | None,
    round_s: float | None,
    until_idle: bool,
    detach: bool,
) -> int:
    """Run the controller here; take up whatever an earlier one left.

    Ctrl-C (or `icefrog down`) asks every job to save a checkpoint and leave.
    """
    from icefrog.cli.simulation import parse_settings
    from icefrog.live import up as run_up
    from icefrog.liveview import live_view

    place = _home(home)
    names = {text.partition(".")[0] for text in settings}
    used = policy or (place.settings().policy if place.settings() is not None else "icefrog")
    options = parse_settings(settings, [used]).get(used) if names else None
    if detach:
        return _detach(home, place)
    result = run_up(
        place,
        policy=policy,
        options=options,
        slots=slots,
        round_s=round_s,
        until_idle=until_idle,
        view=live_view(),
    )
    if result.unfinished:
        click.echo(f"{len(result.unfinished)} jobs are not finished; go on with: {_me(home).format('up')}")
    if result.failed and until_idle:
        click.echo(
            f"failed or short of their target: {', '.join(result.failed)}; see: {_me(home).format('explain JOB')}"
        )
    if until_idle:
        return 130 if result.why == "signal" else int(bool(result.failed))
    return 0


def _detach(home: Path | None, place: Any) -> int:
    """Start the same command again in a session of its own, and wait until it holds the controller's lock."""
    if place.controller_pid() is not None:
        raise UserError(f"a controller runs here already (process {place.controller_pid()})", "`icefrog down` stops it")
    args = [argument for argument in sys.argv[1:] if argument not in ("-d", "--detach")]
    place.path.mkdir(parents=True, exist_ok=True)
    log = place.path / "controller.log"
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "icefrog", *args],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    for _ in range(100):
        if place.controller_pid() == process.pid:
            click.echo(f"controller {process.pid} runs; its log: {log}; stop it with: {_me(home).format('down')}")
            return 0
        if process.poll() is not None:
            break
        time.sleep(0.1)
    click.echo(f"the controller did not start; see {log}", err=True)
    return 1


@click.command()
@_HOME
def down(home: Path | None) -> None:
    """Stop the controller; its jobs save a checkpoint and leave."""
    from icefrog.live import down as run_down

    click.echo("stopped" if run_down(_home(home)) else "no controller was running")


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="JOB.yaml...")
@_HOME
@click.option("--name", help="Submit under another name (one file only).")
def submit(files: tuple[Path, ...], home: Path | None, name: str | None) -> None:
    """Hand in one or more jobs; all files are checked before any is submitted."""
    from icefrog.live import submit_all
    from icefrog.specfile import load_job

    specs = [load_job(path) for path in files]
    if name is not None:
        if len(specs) != 1:
            raise UserError("--name: more than one file is given", "submit the files one by one, or without --name")
        specs = [_renamed(specs[0], name)]
    place = _home(home)
    for spec in submit_all(place, specs):
        click.echo(f"submitted {spec.name}")
    if place.controller_pid() is None:
        click.echo(f"no controller runs here yet; start it with: {_me(home).format('up')}")


def _renamed(spec: Any, name: str) -> Any:
    from pydantic import ValidationError

    try:
        return type(spec).model_validate({**spec.model_dump(by_alias=True), "name": name})
    except ValidationError as error:
        raise UserError(f"--name: {name!r} is not allowed", "letters, digits, '.', '_' and '-', at most 120") from error


@click.command()
@_HOME
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def jobs(home: Path | None, as_json: bool) -> None:
    """List all jobs: phase, GPUs, progress, and why."""
    from rich.console import Console

    from icefrog.live import job_rows
    from icefrog.liveview import jobs_table

    rows = job_rows(_home(home))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(row) for row in rows], indent=2, default=str))
    elif rows:
        console = Console()
        (console if console.is_terminal else Console(width=160)).print(jobs_table(rows))
    else:
        click.echo("no jobs")


@click.command()
@click.argument("job")
@_HOME
@click.option("--follow", "-f", is_flag=True, help="Go on as the job writes.")
def logs(job: str, home: Path | None, follow: bool) -> None:
    """Print what a job wrote, all attempts."""
    from icefrog.live import follow_log, log_paths

    place = _home(home)
    if follow:
        for text in follow_log(place, job):
            click.echo(text, nl=False)
        return
    for path in log_paths(place, job):
        click.echo(path.read_text(encoding="utf-8", errors="replace"), nl=False)


@click.command()
@click.argument("job")
@_HOME
def explain(job: str, home: Path | None) -> None:
    """Say why a job is where it is: every decision on GPUs and frozen layers, with its reason."""
    from icefrog.live import explain as run_explain

    for line in run_explain(_home(home), job):
        click.echo(line)


@click.command()
@click.argument("job")
@_HOME
def cancel(job: str, home: Path | None) -> None:
    """End a job for good."""
    from icefrog.live import cancel as run_cancel

    run_cancel(_home(home), job)
    click.echo(f"asked for the end of {job}")


@click.command()
@_HOME
@click.option("--jobs", "folder", type=click.Path(path_type=Path), default=Path("examples/demo"), show_default=True)
@click.option("--slots", type=click.IntRange(1, 64), help="CPU slots to use as GPUs. Default: GPUs, else one a core.")
def demo(home: Path | None, folder: Path, slots: int | None) -> int:
    """Run three real training jobs on this machine and write a report."""
    from icefrog.demo import run_demo

    return run_demo(_home(home), folder, slots=slots, me=_me(home))


__all__: list[str] = ["cancel", "demo", "down", "explain", "jobs", "logs", "submit", "up"]
