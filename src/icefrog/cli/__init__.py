"""The command line: thin commands over library functions, errors with hints."""

from icefrog.cli.main import main

__all__ = ["main"]
