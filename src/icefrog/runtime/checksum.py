"""Equal bits, equal sums: how ranks and restarts tell whether they hold the same values."""

from __future__ import annotations

import torch

_CHUNK_WORDS = 1 << 22


def checksum(param: torch.Tensor) -> torch.Tensor:
    """Sum of (position x 32-bit word), in chunks so that the 64-bit copies stay small; a CPU scalar."""
    raw = param.detach().contiguous().reshape(-1).view(torch.uint8)
    words = torch.nn.functional.pad(raw, (0, -raw.numel() % 4)).view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _CHUNK_WORDS):
        chunk = words[start : start + _CHUNK_WORDS].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + chunk.numel(), device=words.device)
        total += (chunk * place).sum()
    return total.cpu()
