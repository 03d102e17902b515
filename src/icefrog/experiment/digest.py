"""What a result depends on besides its settings: the program and the trace's content, as digests."""

from __future__ import annotations

import functools
import hashlib
import sys
from importlib import metadata
from pathlib import Path

import icefrog
from icefrog.errors import UserError

LIBRARIES = ("numpy", "polars", "pydantic", "rustworkx", "scipy")
"""Whose versions may change a result's last digits."""

PRESENTATION = (
    *("cli", "runtime", "server", "testing", "experiment", "executors/local", "executors/ray", "executors/slurm"),
    *("executors/kubernetes", "report/html.py", "report/plots.py", "report/gantt.py", "report/jobtable.py"),
    *("report/comparison.py", "report/terminal.py", "report/text.py", "report/tables.py", "report/load.py"),
    *("live.py", "livequery.py", "liveview.py", "home.py", "demo.py"),
)
"""Parts of the package that no simulation's numbers depend on: a change there repeats no cell."""
RESULT = ("experiment/cell_run.py", "experiment/cells.py", "experiment/spec.py")
"""Exceptions from that: what runs a cell, and what it reads the cell's settings with."""


@functools.cache
def program_digest() -> str:
    """Digest of the code that decides results, its data files, and the versions of the libraries below it."""
    root = Path(icefrog.__file__).parent
    total = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.suffix in (".py", ".json", ".yaml") and _decides(name):
            total.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    versions = {library: metadata.version(library) for library in LIBRARIES}
    total.update(f"{icefrog.__version__} {sys.version_info[:2]} {versions}".encode())
    return total.hexdigest()


def _decides(name: str) -> bool:
    return name in RESULT or not any(name == part or name.startswith(f"{part}/") for part in PRESENTATION)


def trace_digest(path: str) -> str:
    """Digest of a trace file's bytes (of a folder's: all files in it); empty for a generator, which is program.

    Raises:
        UserError: the file cannot be read.
    """
    if path.startswith("synth:"):
        return ""
    where = Path(path)
    try:
        files = sorted(p for p in where.rglob("*") if p.is_file()) if where.is_dir() else [where]
        return hashlib.sha256("".join(_file_digest(file) for file in files).encode()).hexdigest()
    except OSError as error:
        raise UserError(
            f"cannot read the trace {path}: {error.strerror}", "check the path; is $ICEFROG_DATA set, if it is used?"
        ) from error


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
