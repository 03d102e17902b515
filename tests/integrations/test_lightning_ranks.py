"""The Lightning adapter in two processes (gloo), beside Lightning's own DDP strategy."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapter_ranks import two_ranks

pytest.importorskip("lightning.pytorch", reason="pip install 'icefrog[lightning]', or make test-adapters")

pytestmark = pytest.mark.adapters


def test_two_ranks_are_lightnings_own_ddp_and_freezing_saves_bytes(tmp_path: Path) -> None:
    first, second = two_ranks("pl_two_ranks.py", tmp_path)
    for name in ("plain", "unfrozen", "frozen", "resumed", "tuned"):
        assert first[name]["model"] == second[name]["model"], name
    for rank in (first, second):
        assert rank["unfrozen"]["losses"] == rank["plain"]["losses"]
    assert first["unfrozen"]["model"] == first["plain"]["model"]
    assert first["unfrozen"]["samples"] == 3 * 128

    (before, sent_before), (after, sent_after) = first["kept"]
    assert before == after
    assert sent_after - sent_before == 4 * first["live_bytes"]  # four steps: frozen layers send nothing
    assert first["frozen"]["model"] != first["unfrozen"]["model"]
    assert first["resumed"]["steps"] == first["frozen"]["steps"] == 12
    assert first["resumed"]["depth"] == 2
    assert len(first["tuned"]["decisions"]) == 8
    assert first["tuned"]["decisions"] == second["tuned"]["decisions"]
