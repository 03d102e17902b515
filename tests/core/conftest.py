from __future__ import annotations

from collections.abc import Iterator

import pytest

from icefrog.events import AnyRecord, decode, encode
from icefrog.state import ClusterState
from icefrog.testing import builders as b
from icefrog.types import JobViews


class CheckedState(ClusterState):
    """A state that checks its invariants after every record, that every record survives the codec, and that what is kept
    of the views from one snapshot to the next is what somebody who looks through them would find."""

    def apply(self, record: AnyRecord) -> None:
        super().apply(record)
        assert decode(encode(record)) == record
        self.check()
        kept = self.snapshot().views
        found = JobViews(kept)
        assert (kept.by_id, kept.waiting) == (found.by_id, found.waiting)
        assert kept.unlike_requested == found.unlike_requested


@pytest.fixture
def state() -> Iterator[CheckedState]:
    """A checked state of two nodes with four GPUs; checked once more when the test is over."""
    state = CheckedState(b.cluster(2, 4))
    yield state
    state.check()
