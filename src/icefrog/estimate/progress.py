"""Which depth makes the most progress a second, by the share of the *signal* instead of the variance. Pure.

A step of size eta along P g, with P the optimizer's preconditioner and G the mean gradient, lowers the loss by
eta G . P G to first order. Layers add up, so with the first l layers frozen a step keeps the share

    sigma(l) = sum_(i > l) G_i . P G_i / sum_i G_i . P G_i

of that progress: Eq. 3 with the signal in the place of the noise. Layers can do each other's work, so less than 1 - sigma
is lost: psi(l) = sigma(l)^MADE_UP. The exponent is between 1 (nothing is made up for) and 0 (all is);
``docs/evidence/layer-elasticity.md`` says why one half. Like Eq. 3 it cannot see that a target is out of reach; the rule
around it must.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from icefrog.estimate.penalty import frozen_penalty
from icefrog.estimate.throughput import step_s
from icefrog.profile import FloatArray, Profile
from icefrog.types import Config

MADE_UP = 0.5
"""Exponent of the share."""
MAX_SHARE = 0.5
"""Most layers frozen, share of all: the default of the rule."""
LEAST_SIGNAL = 0.6
"""Share of the signal that must be left: the default of the rule where layers are not known to have learnt."""


def signal_worth(signal: npt.ArrayLike, kept: Sequence[float] = ()) -> FloatArray:
    """psi(l) for every depth, shape (L + 1,); NaN where nothing is known.

    Args:
        signal: G . P G by layer, shape (L,), >= 0, any common unit.
        kept: of the layers that are frozen now, their shares of the whole when they froze. A frozen layer has no gradient,
            and the others' shrinks while they learn, so a share is remembered and not a norm.
    """
    return np.asarray(signal_share(signal, kept) ** MADE_UP)


def offered_worth(signal: npt.ArrayLike, frozen_layers: int = 0) -> FloatArray:
    """psi(l) of the depths that the rule ``progress`` would look at, shape (L + 1,); NaN for the others.

    Args:
        signal: shares of G . P G by layer, shape (L,); of frozen layers as they froze.
        frozen_layers: in force: that depth is looked at, too, deep as it may be (the rule knew more, or a grant asked).
    """
    share = signal_share(signal)
    depths = np.arange(len(share))
    looked_at = (depths <= int(MAX_SHARE * (len(share) - 1))) & (share >= LEAST_SIGNAL)
    return np.where(looked_at | (depths == frozen_layers), share**MADE_UP, np.nan)


def signal_share(signal: npt.ArrayLike, kept: Sequence[float] = ()) -> FloatArray:
    """sigma(l) for every depth; see :func:`signal_worth`."""
    values = np.asarray(signal, dtype=np.float64)
    share = frozen_penalty(values[len(kept) :])
    if not kept:
        return share
    prefix = 1.0 - np.concatenate(([0.0], np.cumsum(np.asarray(kept, dtype=np.float64))))
    return np.concatenate((prefix[:-1], np.maximum(prefix[-1], 0.0) * share))


def seconds_by_depth(
    profile: Profile, now: Config, num_nodes: int, *, forward_share: float = 0.0, cached: bool = False
) -> FloatArray:
    """Seconds of a step at every depth 0..L - 1, all else as now.

    Args:
        profile: of the job.
        now: the configuration in force.
        num_nodes: nodes that it spans.
        forward_share: of a full step's time, the forward pass.
        cached: the prefix's outputs are read back, so that its share (by FLOPs) of the forward pass falls away.
    """
    depths = np.arange(profile.num_layers)
    seconds = step_s(profile, now.num_gpus, num_nodes, now.batch_per_gpu, depths, now.accum_steps)
    if not cached:
        return np.asarray(seconds)
    spared = forward_share * seconds[0] * (1.0 - profile.theta[:-1])
    return np.asarray(np.maximum(seconds - spared, 1e-3 * seconds[0]))
