"""Runs a job's ``entry``: ``python -m icefrog.executors.local.entry package.module:function``."""

from __future__ import annotations

import importlib
import os
import sys


def main(entry: str) -> None:
    """Import the module, with the folder the job was submitted from on the path, and call the function."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module, _, function = entry.partition(":")
    getattr(importlib.import_module(module), function)()


if __name__ == "__main__":
    main(sys.argv[1])
