"""Fixtures for every test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Deterministic runs: the same examples every time, no deadline on a busy machine.
settings.register_profile(
    "icefrog",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors],
)
settings.load_profile("icefrog")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of public measurements; the test is skipped where it is absent."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    path = Path(os.environ.get("ICEFROG_DATA", default))
    if not path.is_dir():
        pytest.skip(f"public measurements not found at {path}; set ICEFROG_DATA to their folder")
    return path
