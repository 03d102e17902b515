"""``icefrog simulate | solve | report``."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Console

from icefrog.cli.numbers import HOURS, LOAD, NOISE, RESTART_S, ROUND_S
from icefrog.cli.outages import outage_options, parse_outages
from icefrog.cli.threads import one_blas_thread
from icefrog.errors import UserError


@click.command()
@click.option("--trace", "source", required=True, metavar="FILE|synth:NAME", help="A job log, or a generator.")
@click.option(
    "--cluster", metavar="NxG[:TYPE][+...]|FILE", help="12x4: 12 nodes of 4 GPUs; or YAML. Pollux world: 16x4."
)
@click.option("--policy", "policy_list", required=True, metavar="NAME[,NAME...]", help="See `icefrog policies`.")
@click.option("--load", type=LOAD, default=1.0, show_default=True, help="Times the jobs in the same time.")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of sampling, matching and noise."
)
@click.option("--start", metavar="ISO", help="Only jobs submitted from this local time on, e.g. 2017-10-03T03:00.")
@click.option("--hours", type=HOURS, help="Only jobs submitted within so many hours.")
@click.option("--jobs", "num_jobs", type=int, help="Sample so many jobs (times the load).")
@click.option(
    "--world",
    type=click.Choice(["icefrog", "pollux"]),
    default="icefrog",
    show_default=True,
    help="Where the truth comes from.",
)
@click.option("--format", "trace_format", metavar="F", help="Trace format; default: recognised from the header.")
@click.option("--data", type=click.Path(path_type=Path), envvar="ICEFROG_DATA", help="Measured profiles a world needs.")
@click.option("--profile", "measured", multiple=True, metavar="WORKLOAD=FILE", help="Of `icefrog profile`; repeatable.")
@click.option("--set", "settings", multiple=True, metavar="POLICY.KEY=VALUE", help="An option of a policy; repeatable.")
@click.option("--round", "round_s", type=ROUND_S, help="Round, s.  [default: 300; Pollux world: 60]")
@click.option("--restart", "restart_s", type=RESTART_S, help="Cost, s.  [default: 60; Pollux world: 30]")
@click.option("--noise", type=NOISE, default=0.05, show_default=True, help="Error of the estimates.")
@click.option(
    "--convergence",
    type=click.Choice(["eq3", "measured"]),
    default="eq3",
    show_default=True,
    help="What frozen steps are worth in truth.",
)
@outage_options
@click.option("--out", type=click.Path(path_type=Path), help="Folder for summary, report, job tables and event logs.")
@click.option("--json", "as_json", is_flag=True, help="Print summary.json.")
def simulate(
    source: str,
    cluster: str | None,
    policy_list: str,
    load: float,
    seed: int,
    start: str | None,
    hours: float | None,
    num_jobs: int | None,
    world: str,
    trace_format: str | None,
    data: Path | None,
    measured: tuple[str, ...],
    settings: tuple[str, ...],
    round_s: float | None,
    restart_s: float | None,
    noise: float,
    convergence: str,
    node_mtbf_h: float | None,
    node_repair_h: float | None,
    capacity: str | None,
    out: Path | None,
    as_json: bool,
) -> int:
    """Replay a trace under one or more policies and compare them."""
    one_blas_thread()
    from icefrog.executors.sim.truth import WorldConfig
    from icefrog.replay import TraceChoice, prepare, replay_scenario
    from icefrog.report import render_comparison
    from icefrog.simulate import Scenario, SimSettings, icefrog_scenario
    from icefrog.specfile import parse_cluster

    policies = parse_policies(policy_list)
    options = parse_settings(settings, policies)
    choice = TraceChoice(source, trace_format, load, parse_time(start), hours, num_jobs, seed)
    scenario: Scenario
    if world == "pollux":
        if measured:
            raise UserError("--profile: the Pollux world has its own measurements", "leave out --world pollux")
        if convergence != "eq3":
            raise UserError("--convergence: nothing freezes in the Pollux world", "leave out --world pollux")
        from icefrog.executors.sim.pollux import scenario as pollux

        nodes = parse_cluster(cluster or pollux.CLUSTER)
        trace = choice.read()
        began = None if trace.start is None else trace.start.isoformat(sep=" ")
        outages = parse_outages(node_mtbf_h, node_repair_h, capacity, nodes, began)
        config = pollux.pollux_settings(seed, round_s, restart_s, outages=outages)
        scenario, facts = pollux.pollux_scenario(trace, nodes, data or pollux.default_data_dir(), config)
        facts["load"] = load
    else:
        if cluster is None:
            raise UserError("--cluster is missing", "for example --cluster 12x4: 12 nodes of 4 GPUs")
        nodes = parse_cluster(cluster)
        workload = prepare(choice, nodes, profiles=parse_profiles(measured))
        facts = dict(workload.trace)
        outages = parse_outages(node_mtbf_h, node_repair_h, capacity, nodes, facts["start"])
        config = SimSettings(
            seed=seed,
            round_s=300.0 if round_s is None else round_s,
            restart_s=60.0 if restart_s is None else restart_s,
            world=WorldConfig(noise=noise, measured_convergence=float(convergence == "measured")),
            outages=outages,
        )
        scenario = icefrog_scenario(workload.specs, workload.profiles, workload.curves, nodes, config)
    out_dir = writable_folder(out)
    with _progress(len(policies)) as progress:
        document = replay_scenario(
            scenario, facts, policies, options=options, settings=config, out_dir=out_dir, progress=progress
        )
    stalled = [f"{row['policy']}: {row['stalled']}" for row in document["runs"] if row.get("stalled")]
    if as_json:
        click.echo(json.dumps(document, indent=2, allow_nan=False))
    else:
        _print_comparison(document, out_dir, render_comparison(document))
    for line in stalled:
        click.echo(f"stalled: {line}", err=True)
    return 1 if stalled else 0


def _print_comparison(document: dict[str, Any], out_dir: Path | None, table: Any) -> None:
    facts = document["trace"]
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in facts["dropped"].items())
    click.echo(f"{facts['source']}: {facts['jobs']} jobs on {document['cluster']['label']}")
    if dropped:
        click.echo(f"left out: {dropped}")
    _console().print(table)
    if out_dir is not None:
        click.echo(f"report: {out_dir / 'report.html'}")


def _console() -> Console:
    """As wide as the terminal; wide enough for any table in a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


@contextmanager
def _progress(total_policies: int) -> Iterator[Any]:
    """A progress bar a policy on a terminal (stderr); nothing in a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("jobs, day {task.fields[day]:.1f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def update(state: Any) -> None:
            if state.policy not in tasks:
                tasks[state.policy] = bars.add_task(state.policy, total=state.total, day=0.0)
            bars.update(tasks[state.policy], completed=state.finished, day=state.now_s / 86400)

        yield update


@click.command()
@click.argument("problem", type=click.Path(path_type=Path))
@click.option("--rho", type=float, default=1.0, show_default=True, help="Fairness: 1 max-min first, 0 the sum alone.")
@click.option("--method", type=click.Choice(["exact", "milp"]), default="exact", show_default=True)
def solve(problem: Path, rho: float, method: Literal["exact", "milp"]) -> None:
    """Solve one IceShare decision; PROBLEM is a JSON file, or - for standard input."""
    from icefrog.policies.iceshare import parse_problem
    from icefrog.policies.iceshare import solve as solve_problem

    if not 0.0 <= rho <= 1.0:
        raise UserError(f"--rho: {rho} is not allowed", "a number from 0 (efficiency) to 1 (max-min fairness)")
    parsed = parse_problem(read_json(problem))
    started_s = time.perf_counter()
    solution = solve_problem(parsed, rho=rho, method=method)
    solution = dataclasses.replace(solution, solve_s=time.perf_counter() - started_s)
    click.echo(json.dumps(solution.to_json(), indent=2, allow_nan=False))


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
def report(directory: Path) -> None:
    """Write report.html, summary.json and job tables from the event log(s) in DIRECTORY."""
    from icefrog.report import report_dir

    click.echo(f"report: {report_dir(directory)}")


# -- parsing of what users type -------------------------------------------------------------------------------------------


def parse_policies(text: str) -> list[str]:
    """``a,b`` -> the names, checked, each once."""
    from icefrog.policies import policy_class

    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UserError("--policy: no policy given", "for example fifo,srtf,icefrog; `icefrog policies` lists them")
    for name in names:
        policy_class(name)
    if len(set(names)) != len(names):
        raise UserError(f"--policy: a name is given twice: {text!r}", "give each policy once")
    return names


def parse_settings(settings: tuple[str, ...], policies: list[str]) -> dict[str, dict[str, str]]:
    """``icefrog.rho=0.5`` -> {"icefrog": {"rho": "0.5"}}."""
    options: dict[str, dict[str, str]] = {}
    for text in settings:
        key, equals, value = text.partition("=")
        policy, dot, name = key.partition(".")
        if not equals or not dot or not name:
            raise UserError(f"--set: {text!r} is not POLICY.KEY=VALUE", "for example --set icefrog.rho=0.5")
        if policy not in policies:
            raise UserError(
                f"--set: {policy!r} is not among the policies to run", f"--policy names {', '.join(policies)}"
            )
        options.setdefault(policy, {})[name] = value
    return options


def parse_time(text: str | None) -> datetime | None:
    """An ISO local time."""
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise UserError(f"--start: {text!r} is not an ISO time", "for example 2017-10-03T03:00") from error


def parse_profiles(texts: tuple[str, ...]) -> dict[str, Any]:
    """Profiles by workload, of ``WORKLOAD=FILE`` each."""
    from icefrog.specfile import load_profile

    found = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise UserError(f"--profile: {text!r} is not WORKLOAD=FILE", "for example resnet18-cifar10=measured.json")
        found[name] = load_profile(Path(path))
    return found


def writable_folder(path: Path | None) -> Path | None:
    """The folder, made if need be."""
    if path is None:
        return None
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise UserError(f"--out: {path} cannot be a folder: {error}", "give a path that can be written") from error
    return path


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON lets a key stand twice and takes the last; for a decision on GPUs that is a mistake, not a feature."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is given twice in one object")
    return found


def read_json(path: Path) -> Any:
    """JSON from a file or, for ``-``, from standard input. Raises :class:`UserError` with line and column."""
    name = "standard input" if str(path) == "-" else str(path)
    try:
        raw = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{name}:{error.lineno}:{error.colno}: not JSON: {error.msg}", "give one JSON object"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: is not UTF-8 text", "give a JSON file") from error
    except (RecursionError, ValueError) as error:
        raise UserError(f"{name}: cannot be read: {error}", "give one JSON object of sensible size") from error
    except OSError as error:
        raise UserError(f"{name}: {error.strerror}", "give the path of a JSON file, or - for standard input") from error
