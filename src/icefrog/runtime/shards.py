"""Parameters that are split over ranks, seen from one of them."""

from __future__ import annotations

import torch


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's slice of a DTensor; any other tensor itself. No copy, no communication."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def as_slice(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Inverse: a tensor whose slice on this rank is ``part``, split as ``like`` is; ``part`` itself where that is whole."""
    if not hasattr(like, "device_mesh"):
        return part
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    mesh, shape, stride = like.device_mesh, like.shape, like.stride()
    return DTensor.from_local(part, mesh, like.placements, run_check=False, shape=shape, stride=stride)
