from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from two_ranks import Ranks  # noqa: E402 - torch comes first


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()
