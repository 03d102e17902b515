"""PipeTransformer's freezing rule (He, Li, Soltanolkotabi and Avestimehr, ICML 2021, arXiv:2102.03161)."""

from __future__ import annotations

import math

import numpy as np

from icefrog.errors import UserError
from icefrog.runtime.rules.base import FreezingRule, Proposal, Situation


class PipeTransformer(FreezingRule):
    """At each decision T, freezes up to the open layer of smallest gradient, but at most a share of what is open:

        l_T = min( l_T-1 + alpha (L - l_T-1),  argmin over the open layers of |g_l| )

    Only the rule, for every kind of parallelism; that freed GPUs become further replicas is not built. Deviations: |g_l| is
    the norm of the mean gradient by our statistics (preconditioned under Adam-like optimizers), not that of one batch; the
    default of alpha is ours.

    Args:
        alpha: in (0, 1).

    Raises:
        UserError: alpha outside (0, 1).
    """

    name = "pipetransformer"

    def __init__(self, alpha: float = 1 / 3) -> None:
        if not 0.0 < alpha < 1.0:
            raise UserError(
                f"PipeTransformer's alpha must be between 0 and 1, got {alpha}",
                "it is the largest share of the open layers that freezes at once",
            )
        self.alpha = alpha

    def propose(self, now: Situation) -> Proposal:
        """No layer is opened again."""
        if now.gradients is None:
            return now.stay("not ready: too few steps measured")
        first = now.frozen_layers
        smallest = first + int(np.argmin(now.gradients.sqr_norm[first:]))
        most = first + math.floor(self.alpha * (now.num_layers - first))
        depth = min(most, smallest, now.num_layers - 1)
        return now.at(depth, f"layer {smallest} has the smallest gradient; {most} layers at most this time")
