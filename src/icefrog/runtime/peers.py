"""What a rank says when another one is gone: backends name a socket, and the user must know where to look."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


class PeerLostError(RuntimeError):
    """Another rank of the job has ended, or did not answer for as long as a collective may take."""


@contextmanager
def peers_needed() -> Iterator[None]:
    """Around collective calls.

    Raises:
        PeerLostError: in place of the backend's error.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if isinstance(error, PeerLostError) or not (_of_torch(error) or "gloo/" in text):
            raise
        raise PeerLostError(
            "another rank of this job has ended or does not answer; what it wrote last says why. "
            f"Start all ranks again: they resume from the last checkpoint. ({text.splitlines()[0]})"
        ) from error


def _of_torch(error: RuntimeError) -> bool:
    return dist.is_available() and isinstance(error, dist.DistError)  # gloo raises plain RuntimeErrors
