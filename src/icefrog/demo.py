"""``icefrog demo``: the main job of the system on one machine, with real training jobs, from an empty folder to a report."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click
from rich.console import Console

from icefrog.errors import UserError
from icefrog.home import Home
from icefrog.live import job_rows, submit_all, up
from icefrog.liveview import live_view
from icefrog.report import load_dir, render_table, report_dir
from icefrog.specfile import load_job


def run_demo(home: Home, folder: Path, *, slots: int | None = None, me: str = "icefrog {}") -> int:
    """Submit the job files of ``folder``, run them to the end under IceShare, print the table and write the report.

    An interrupted demo is gone on with; a finished one is moved aside first.

    Args:
        home: the state folder.
        folder: job files.
        slots: CPU slots to use as GPUs; default: this machine's GPUs, else a slot a core.
        me: the user's command, for hints; ``{}`` is the subcommand.

    Returns:
        0: every job reached its target; 1: one did not; 130: interrupted.

    Raises:
        UserError: no job files, PyTorch is missing, or a controller runs in ``home``.
    """
    _require(folder)
    _require_no_controller(home)
    specs = [load_job(path) for path in sorted(folder.glob("*.yaml"))]
    if unfinished := [row.job_id for row in job_rows(home) if not row.finished]:
        click.echo(f"going on with {', '.join(unfinished)}, which an earlier run left unfinished")
    else:
        if (old := _set_aside(home)) is not None:
            click.echo(f"the last run was moved to {_shown(old)}")
        submit_all(home, specs)
    result = up(home, policy="icefrog", slots=slots, until_idle=True, view=live_view())
    if result.why == "signal":
        click.echo(f"stopped; no process is left. Go on with: {me.format('up')}")
        return 130
    ((_, run),) = load_dir(home.path).runs.items()
    console = Console()
    (console if console.is_terminal else Console(width=140)).print(render_table(run))
    click.echo(f"report: {_shown(report_dir(home.path))}")
    return 0 if all(job.status == "completed" for job in run.jobs) else 1


def _require(folder: Path) -> None:
    if not list(folder.glob("*.yaml")):
        raise UserError(
            f"no job files (*.yaml) in {folder}", "run the demo in a clone of the repository, or give --jobs FOLDER"
        )
    missing = [name for name in ("torch", "sklearn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"the demo's jobs need {' and '.join(missing)}", "pip install 'icefrog[examples]'")


def _require_no_controller(home: Home) -> None:
    """Checked before anything is moved or submitted: the folder may belong to a controller that is idle just now."""
    if (pid := home.controller_pid()) is not None:
        raise UserError(
            f"a controller runs in {_shown(home.path)} (process {pid})",
            "stop it with `icefrog down`, or give the demo another --home",
        )


def _set_aside(home: Home) -> Path | None:
    """Move a finished home to ``<home>-<n>``, the first free n."""
    if not home.db.exists():
        return None
    number = 1
    while (target := home.path.with_name(f"{home.path.name}-{number}")).exists():
        number += 1
    home.path.rename(target)
    return target


def _shown(path: Path) -> str:
    """The path as short as it can be told."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
