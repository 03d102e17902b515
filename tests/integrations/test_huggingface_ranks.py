"""The Hugging Face adapter in two processes (gloo), beside the Trainer's own data parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapter_ranks import two_ranks

pytest.importorskip("transformers", reason="pip install 'icefrog[huggingface]', or make test-adapters")
pytest.importorskip("accelerate", reason="pip install 'icefrog[huggingface]', or make test-adapters")

pytestmark = pytest.mark.adapters


def test_two_ranks_are_the_trainers_own_data_parallelism_and_freezing_saves_bytes(tmp_path: Path) -> None:
    first, second = two_ranks("hf_two_ranks.py", tmp_path)
    for name in ("plain", "unfrozen", "frozen", "resumed", "tuned"):
        assert first[name]["model"] == second[name]["model"], name
    assert first["unfrozen"]["losses"] == first["plain"]["losses"]
    assert first["unfrozen"]["model"] == first["plain"]["model"]
    assert first["unfrozen"]["samples"] == 3 * 128

    (before, sent_before), (after, sent_after) = first["kept"]
    assert before == after
    assert (
        sent_after - sent_before == 2 * first["live_bytes"]
    )  # two steps, one all-reduce each: frozen layers send nothing
    assert first["frozen"]["model"] != first["unfrozen"]["model"]

    assert first["resumed"]["losses"][4:] == first["frozen"]["losses"][4:]
    assert first["resumed"]["model"] == first["frozen"]["model"]
    assert first["resumed"]["depth"] == 3
    assert len(first["tuned"]["decisions"]) == 6
    assert first["tuned"]["decisions"] == second["tuned"]["decisions"]
    assert "attach" in first["refused"]
