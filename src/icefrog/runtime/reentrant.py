"""Activation checkpointing of the reentrant kind, which cannot train behind a frozen prefix.

``checkpoint(block, x, use_reentrant=True)`` runs the block without recording and gives its output a gradient only if ``x``
wants one. Behind a frozen prefix ``x`` wants none: the gradients of the block vanish, with at best a warning. Nothing can be
hooked between two such blocks, so freezing is refused while they are in use; ``use_reentrant=False`` has no such limit.
"""

from __future__ import annotations

from torch.utils.checkpoint import CheckpointFunction

from icefrog.runtime.callers import callers

PROBLEM = "activation checkpointing with use_reentrant=True loses the gradients of what trains behind a frozen prefix"
FIX = "use_reentrant=False (in Transformers: gradient_checkpointing_kwargs={'use_reentrant': False})"


def in_reentrant_checkpoint() -> bool:
    """Whether a caller of this function is the forward pass of a reentrant checkpoint."""
    return any(frame.f_code is CheckpointFunction.forward.__code__ for frame in callers())
