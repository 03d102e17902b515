from __future__ import annotations

from collections.abc import Iterator

import pytest

from icefrog.events import AnyRecord, decode, encode
from icefrog.state import ClusterState
from icefrog.testing import builders as b


class CheckedState(ClusterState):
    """A state that checks its invariants after every record, and that every record survives the codec."""

    def apply(self, record: AnyRecord) -> None:
        super().apply(record)
        assert decode(encode(record)) == record
        self.check()


@pytest.fixture
def state() -> Iterator[CheckedState]:
    """A checked state of two nodes with four GPUs; checked once more when the test is over."""
    state = CheckedState(b.cluster(2, 4))
    yield state
    state.check()
