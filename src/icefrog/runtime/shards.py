"""Parameters that are split over ranks, seen from one of them."""

from __future__ import annotations

import torch


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's slice of a DTensor; any other tensor itself. No copy, no communication."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part
