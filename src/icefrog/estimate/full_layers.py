"""T_iter with nothing frozen (Eq. 5 at l = 0), in plain arithmetic: as ``estimate.throughput``, one number at a time.

Arrays of one element cost fifty times as much as the number in them; a simulator of rigid jobs needs one number a job.
"""

from __future__ import annotations

from collections.abc import Iterable

from icefrog.estimate.throughput import step_s
from icefrog.profile import Profile, Replicated, SyncCurve


def full_step_s(profile: Profile, num_gpus: int, num_nodes: int, batch_per_gpu: float, accum_steps: int = 1) -> float:
    """Seconds of one optimiser step of k micro-steps, all layers trained; see :func:`icefrog.estimate.throughput.step_s`."""
    return full_steps_s(profile, num_gpus, num_nodes, ((batch_per_gpu, accum_steps),))[0]


def full_steps_s(profile: Profile, num_gpus: int, num_nodes: int, splits: Iterable[tuple[float, int]]) -> list[float]:
    """The same for several (batch a GPU, micro-steps).

    Sharded and pipelined jobs are few: they are left to ``step_s``.
    """
    if not isinstance(profile.parallel, Replicated):
        return [float(step_s(profile, num_gpus, num_nodes, m, 0, k)) for m, k in splits]
    params = profile.throughput
    fwd, bwd, gamma = params.fwd, params.bwd, params.overlap_gamma
    wait = 1.0 + params.straggler * (num_gpus - 1.0) / (num_gpus + 1.0)
    sync = _sync_s(params.sync, num_gpus, num_nodes)
    seconds = []
    for m, k in splits:
        forward = _power_sum(fwd.alpha_s, fwd.beta_s * m, fwd.smooth) * wait
        backward = _power_sum(bwd.alpha_s, bwd.beta_s * m, bwd.smooth) * wait
        seconds.append(k * forward + (k - 1.0) * backward + _power_sum(backward, sync, gamma))
    return seconds


def _power_sum(x: float, y: float, exponent: float) -> float:
    if exponent == 1.0:
        return x + y
    high, low = (x, y) if x >= y else (y, x)
    ratio = low / high if high > 0 else 0.0
    return float(high * (1.0 + ratio**exponent) ** (1.0 / exponent))


def _sync_s(curve: SyncCurve, num_gpus: int, num_nodes: int) -> float:
    if num_gpus <= 1:
        return 0.0
    extra = max(num_gpus - 2.0, 0.0)
    if num_nodes <= 1:
        return curve.intra_alpha_s + curve.intra_beta_s * extra
    crowded = max(num_gpus / 2.0 - 1.0, 0.0) if num_nodes == 2 else 0.0
    return curve.inter_alpha_s + curve.inter_beta_s * extra + curve.pair_beta_s * crowded
