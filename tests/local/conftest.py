"""Fixtures for tests with real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from local_rig import Rig

from icefrog.executors.local import files


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "home")
    try:
        yield made
        made.state.check()
        assert made.violations() == ""
    finally:
        files.kill(made.processes())
