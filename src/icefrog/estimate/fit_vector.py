"""The vector in which step times are fitted: its entries, their start, which of them the points can tell, the descent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from icefrog.profile import ComputeCurve, FloatArray, SyncCurve, ThroughputParams

BoolArray = npt.NDArray[np.bool_]

FWD_SHARE = 1.0 / 3.0
"""Forward part of compute where it was not measured: backward does twice the FLOPs ('modelled')."""
UNSEEN_INTER_OVER_INTRA = 1.1
LOSS_SCALE = 0.05
PRIOR_WEIGHT = 0.02
TINY_S = 1e-7
ABSENT = -50.0  # log of a term that is left out


@dataclass(frozen=True, slots=True)
class ThroughputPoint:
    """One measured configuration."""

    num_gpus: int
    num_nodes: int
    batch_per_gpu: float
    step_s: float
    sync_s: float | None = None  # exposed synchronisation; sets the start of the fit
    fwd_s: float | None = None  # forward of one micro-step, if it was timed
    theta: float = 1.0  # FLOPs and parameter bytes that were not frozen, as shares
    omega: float = 1.0
    accum_steps: int = 1


@dataclass(frozen=True, slots=True)
class Columns:
    """Points of replicated jobs, by column."""

    gpus: FloatArray
    nodes: FloatArray
    batch: FloatArray
    accum: FloatArray
    theta: FloatArray
    omega: FloatArray
    step_s: FloatArray
    sync_s: FloatArray  # NaN: not measured
    fwd_s: FloatArray
    log_step: FloatArray = field(repr=False)

    @classmethod
    def of(cls, points: Sequence[ThroughputPoint]) -> Columns:
        """Of at least one point."""
        table = np.array([_row(point) for point in points], dtype=np.float64).T
        gpus, nodes, batch, accum, theta, omega, step, sync, fwd = table
        return cls(gpus, nodes, batch, accum, theta, omega, step, sync, fwd, np.log(step))


def _row(p: ThroughputPoint) -> tuple[float, ...]:
    run = (p.num_gpus, p.num_nodes, p.batch_per_gpu, p.accum_steps, p.theta, p.omega)
    return (*run, p.step_s, _nan(p.sync_s), _nan(p.fwd_s))


def _nan(value: float | None) -> float:
    return float("nan") if value is None else value


# The vector that is optimised: logarithms of positive numbers, of (value - 1) for the two exponents >= 1, logits of shares.
NAMES = (
    "alpha_s", "beta_s", "smooth", "gamma", "intra_alpha_s", "intra_beta_s", "inter_alpha_s", "inter_beta_s",
    "pair_beta_s", "straggler", "fwd_share", "flop_fixed", "flop_gamma", "sync_fixed",
)  # fmt: skip
INDEX = {name: index for index, name in enumerate(NAMES)}
PULL = np.array([0.1, 0.1, 1.0, 0.3, 0.1, 0.1, 0.1, 0.1, 0.1, 0.3, 1.0, 0.3, 1.0, 0.3])
"""How strongly each entry is held to its start, relative to PRIOR_WEIGHT."""


def decode(vector: FloatArray) -> ThroughputParams:
    """Vector -> parameters."""
    value = dict(zip(NAMES, np.exp(vector).tolist(), strict=True))
    share = {name: value[name] / (1.0 + value[name]) for name in ("fwd_share", "flop_fixed", "sync_fixed")}
    smooth = 1.0 + value["smooth"]
    forward, backward = share["fwd_share"], 1.0 - share["fwd_share"]
    bwd = ComputeCurve(alpha_s=value["alpha_s"] * backward, beta_s=value["beta_s"] * backward, smooth=smooth)
    return ThroughputParams(
        fwd=ComputeCurve(alpha_s=value["alpha_s"] * forward, beta_s=value["beta_s"] * forward, smooth=smooth),
        bwd=bwd,
        sync=SyncCurve(**{name: value[name] for name in SyncCurve.model_fields}),
        overlap_gamma=1.0 + value["gamma"],
        straggler=value["straggler"],
        flop_alpha_s=share["flop_fixed"] * bwd.alpha_s,
        flop_gamma=value["flop_gamma"],
        sync_alpha_s=share["sync_fixed"] * max(value["intra_alpha_s"], value["inter_alpha_s"]),
    )


def encode(params: ThroughputParams) -> FloatArray:
    """Parameters -> vector; a zero becomes a negligible number."""
    compute = params.fwd.alpha_s + params.bwd.alpha_s
    slope = params.fwd.beta_s + params.bwd.beta_s
    largest_sync = max(params.sync.intra_alpha_s, params.sync.inter_alpha_s)
    shares = (
        params.fwd.beta_s / slope if slope > 0 else FWD_SHARE,
        params.flop_alpha_s / params.bwd.alpha_s if params.bwd.alpha_s > 0 else 0.0,
        params.sync_alpha_s / largest_sync if largest_sync > 0 else 0.0,
    )
    odds = [min(max(share, 0.01), 0.99) / (1.0 - min(max(share, 0.01), 0.99)) for share in shares]
    positive = [compute, slope, params.bwd.smooth - 1.0, params.overlap_gamma - 1.0]
    positive += [getattr(params.sync, name) for name in SyncCurve.model_fields]
    values = [*positive, params.straggler, odds[0], odds[1], params.flop_gamma, odds[2]]
    floors = np.full(len(NAMES), 0.02)
    floors[[INDEX[name] for name in NAMES if name.endswith("_s")]] = TINY_S
    floors[INDEX["smooth"]] = np.exp(ABSENT)
    return np.asarray(np.log(np.maximum(values, floors)))


def rough_start(at: Columns) -> FloatArray:
    """Rough figures read off the points."""
    alone = np.where(np.isnan(at.sync_s), at.step_s, np.maximum(at.step_s - at.sync_s, 0.1 * at.step_s)) / at.accum
    low, high = float(at.batch.min()), float(at.batch.max())
    at_low = float(np.median(alone[at.batch == low]))
    at_high = float(np.median(alone[at.batch == high]))
    slope = max((at_high - at_low) / (high - low), 0.0) if high > low else 0.0
    slope = slope if slope > 0 else 0.5 * at_low / low  # a single batch: half of it is fixed cost, as in Pollux
    exposed = at.sync_s[(at.gpus > 1) & np.isfinite(at.sync_s)]
    guess = float(np.median(exposed)) if exposed.size else 0.1 * float(np.median(at.step_s))
    sync = max(guess, 1e-6)
    intra = sync if np.any(_intra(at)) else 0.0
    inter = sync if np.any(at.nodes > 1) else 0.0
    return encode(
        ThroughputParams(
            fwd=ComputeCurve(alpha_s=0.5 * at_low * FWD_SHARE, beta_s=slope * FWD_SHARE, smooth=1.3),
            bwd=ComputeCurve(alpha_s=0.5 * at_low * (1 - FWD_SHARE), beta_s=slope * (1 - FWD_SHARE), smooth=1.3),
            sync=SyncCurve(
                intra_alpha_s=intra,
                intra_beta_s=0.02 * intra,
                inter_alpha_s=inter,
                inter_beta_s=0.02 * inter,
                pair_beta_s=0.1 * inter,
            ),
            overlap_gamma=1.3,
            straggler=0.05,
        )
    )


def restarts(rough: FloatArray) -> tuple[FloatArray, ...]:
    """The overlap exponent decides which of two valleys is found."""
    strong = rough.copy()
    strong[INDEX["gamma"]] += 2.0
    return rough, strong


def _intra(at: Columns) -> BoolArray:
    return np.asarray((at.gpus > 1) & (at.nodes == 1))


def free_entries(at: Columns) -> BoolArray:
    """Which entries the points can tell anything of."""
    frozen, several = at.theta < 1.0, at.gpus > 1
    inter, intra = at.nodes > 1, _intra(at)
    pair = inter & (at.nodes == 2)
    batches = len(np.unique(at.batch))
    return np.array(
        [
            True,
            batches > 1,
            batches > 2,
            bool(several.any()),
            bool(intra.any()),
            len(np.unique(at.gpus[intra])) > 1,
            bool(inter.any()),
            len(np.unique(at.gpus[inter])) > 1,
            len(np.unique(at.gpus[pair])) > 1,
            len(np.unique(at.gpus)) > 2,
            bool(frozen.any() or np.isfinite(at.fwd_s).any()),
            bool(frozen.any()),
            len(np.unique(at.theta)) > 2,
            bool((frozen & several).any()),
        ]
    )


def descend(
    errors: Callable[[FloatArray], FloatArray],
    first: FloatArray,
    anchor: FloatArray,
    free: BoolArray,
    pull: FloatArray,
    num_points: int,
    tolerance: float = 1e-8,
) -> tuple[FloatArray, float]:
    """One local minimum of the relative errors and the pull to the anchor: (vector, cost). ``tolerance``: relative change
    of the cost at which it is good enough."""
    weight = PRIOR_WEIGHT * LOSS_SCALE * np.sqrt(num_points) * pull[free]

    def residuals(part: FloatArray) -> FloatArray:
        vector = first.copy()
        vector[free] = part
        error = errors(vector)
        return np.concatenate([LOSS_SCALE * robust(error / LOSS_SCALE), weight * robust(part - anchor[free])])

    bounds = (first[free] - 15.0, first[free] + 15.0)
    found = least_squares(residuals, first[free], bounds=bounds, max_nfev=200, ftol=tolerance)
    vector = first.copy()
    vector[free] = found.x
    return vector, float(found.cost)


def robust(z: FloatArray) -> FloatArray:
    """Residual whose square is twice the soft-L1 loss: quadratic near 0, linear far from it."""
    return np.asarray(np.sign(z) * np.sqrt(2.0 * (np.sqrt(1.0 + z**2) - 1.0)))


def with_unseen(params: ThroughputParams, at: Columns, prior: ThroughputParams | None) -> ThroughputParams:
    """What no point tells is the prior's to the bit; without a prior, see :func:`fit_throughput`."""
    known = prior if prior is not None else ThroughputParams(fwd=params.fwd, bwd=params.bwd)
    frozen = at.theta < 1.0
    update: dict[str, float | SyncCurve] = {"sync": _known_sync(params.sync, known.sync, at, prior is None)}
    if not np.any(at.gpus > 1):
        update["overlap_gamma"] = known.overlap_gamma
        update["straggler"] = known.straggler
    if not np.any(frozen):
        update["flop_alpha_s"] = known.flop_alpha_s
        update["flop_gamma"] = known.flop_gamma
    if not np.any(frozen & (at.gpus > 1)):
        update["sync_alpha_s"] = known.sync_alpha_s
    return params.model_copy(update=update)


def _known_sync(fitted: SyncCurve, known: SyncCurve, at: Columns, guess: bool) -> SyncCurve:
    intra, inter = np.any(_intra(at)), np.any(at.nodes > 1)
    update: dict[str, float] = {}
    if not intra:
        update |= {"intra_alpha_s": known.intra_alpha_s, "intra_beta_s": known.intra_beta_s}
    if not inter:
        factor = UNSEEN_INTER_OVER_INTRA
        same = guess and intra  # growing over nodes is neither free nor forbidden
        update |= {
            "inter_alpha_s": factor * fitted.intra_alpha_s if same else known.inter_alpha_s,
            "inter_beta_s": factor * fitted.intra_beta_s if same else known.inter_beta_s,
            "pair_beta_s": known.pair_beta_s,
        }
    return fitted.model_copy(update=update)
