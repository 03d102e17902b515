"""The root command, and the one place where errors become exit codes.

0 done; 2 the user's input is wrong (one ``error:`` and one ``hint:`` line, never a traceback); 130 interrupted; 1 else.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence

import click

from icefrog import __version__
from icefrog.errors import UserError

_COMMANDS: Mapping[str, str] = {
    "simulate": "icefrog.cli.simulation:simulate",
    "experiment": "icefrog.cli.experiment:experiment",
    "whatif": "icefrog.cli.experiment:whatif",
    "solve": "icefrog.cli.simulation:solve",
    "report": "icefrog.cli.simulation:report",
    "trace": "icefrog.cli.trace:trace",
    "profile": "icefrog.cli.profile:profile",
    "policies": "icefrog.cli.listing:policies",
    "workloads": "icefrog.cli.listing:workloads",
    "schema": "icefrog.cli.listing:schema",
    "demo": "icefrog.cli.live:demo",
    "up": "icefrog.cli.live:up",
    "down": "icefrog.cli.live:down",
    "submit": "icefrog.cli.live:submit",
    "jobs": "icefrog.cli.live:jobs",
    "logs": "icefrog.cli.live:logs",
    "explain": "icefrog.cli.live:explain",
    "cancel": "icefrog.cli.live:cancel",
}


class LazyGroup(click.Group):
    """Imports a command's module only when it is needed: ``icefrog --help`` stays quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order a newcomer meets them."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, or None (click then complains)."""
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="icefrog")
def root() -> None:
    """Schedule deep-learning training on shared GPUs, with the number of frozen layers as a variable."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run and exit the process."""
    sys.exit(run(argv))


def run(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    try:
        result = root.main(args=None if argv is None else list(argv), prog_name="icefrog", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except UserError as error:
        return _complain(error.message, error.hint)
    except click.exceptions.NoArgsIsHelpError as error:  # a command of commands, called by itself: show what there is
        click.echo(error.format_message())
        return 0
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "icefrog"
        return _complain(error.format_message(), f"`{command} --help` shows what is allowed")
    except click.ClickException as error:
        return _complain(error.format_message(), "`icefrog --help` shows what is allowed")
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130


def _complain(message: str, hint: str) -> int:
    click.echo(f"error: {_one_line(message)}", err=True)
    click.echo(f"hint: {_one_line(hint)}", err=True)
    return 2


def _one_line(text: str) -> str:
    return " ".join(text.split())
