"""The binary programs, solved by HiGHS: the reference for the whole problem (Eq. 18), and the closer of small cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from icefrog.policies.iceshare.matching import SharingGraph
from icefrog.policies.iceshare.menu import FLOOR_SLACK
from icefrog.policies.iceshare.problem import Problem

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Core:
    """Choices left open by a bound ``top``: total value = top - (losses chosen) - price * (GPUs left over)."""

    num_jobs: int
    num_gpus: int
    price: float
    top: float
    allowed: float  # losses at or above this are of no interest
    item: Ints  # menu items
    item_job: Ints
    item_cost: Ints
    item_loss: Floats
    pair: Ints  # (2, P) vertices
    pair_job: Ints  # (2, P)
    pair_loss: Floats


@dataclass(frozen=True, slots=True)
class CoreAnswer:
    """``chosen``: (items + pairs,) or None. ``loss`` of it, and ``least_loss``: no choice loses less than this."""

    chosen: Bools | None
    loss: float
    least_loss: float


def solve_core(core: Core, node_limit: int) -> CoreAnswer:
    """The choice of the least loss below ``core.allowed``; every job has exactly one item or pair."""
    num_items, num_pairs = len(core.item), core.pair.shape[1]
    columns = np.arange(num_items + num_pairs)
    rows = np.concatenate([core.item_job, core.pair_job[0], core.pair_job[1]])
    cols = np.concatenate([columns, columns[num_items:]])
    one = _sparse(np.ones(len(rows)), rows, cols, (core.num_jobs, len(columns) + 1))
    gpus = np.concatenate([core.item_cost, np.ones(num_pairs), [1.0]])  # the last column: GPUs left over
    unit = core.allowed
    cost = np.concatenate([core.item_loss, core.pair_loss, [core.price]]) / unit
    result = _milp(
        cost,
        [(one, np.ones(core.num_jobs), np.ones(core.num_jobs)), (gpus[None, :], core.num_gpus, core.num_gpus)],
        continuous=1,
        upper=np.append(np.ones(len(columns)), np.inf),
        options={"node_limit": node_limit, "mip_rel_gap": 0.0},
    )
    if result.status == 2:  # nothing is below the limit
        return CoreAnswer(None, core.allowed, core.allowed)
    least = 0.0 if result.mip_dual_bound is None else max(0.0, float(result.mip_dual_bound) * unit)
    if result.x is None:
        return CoreAnswer(None, np.inf, min(least, core.allowed))
    chosen = np.asarray(result.x[:-1] > 0.5)
    used = float(gpus[:-1][chosen].sum())
    per_job = np.bincount(rows[chosen[cols]], minlength=core.num_jobs)
    if used > core.num_gpus or np.any(per_job != 1):  # never trust a solver's tolerance
        return CoreAnswer(None, np.inf, min(least, core.allowed))
    loss = float(np.sum(np.concatenate([core.item_loss, core.pair_loss])[chosen]))
    loss += core.price * (core.num_gpus - used)
    # What HiGHS leaves out beyond the limit of interest is bounded by that limit.
    return CoreAnswer(chosen, loss, min(least, loss, core.allowed))


class Reference:
    """The two-stage binary program with a variable for every option and for every fitting pair of shared options."""

    def __init__(self, problem: Problem, graph: SharingGraph) -> None:
        self.problem = problem
        self.options = np.flatnonzero(problem.opt_gpus <= problem.num_gpus)
        self.pairs = _fitting_combinations(problem, graph)
        o, (r, s) = self.options, self.pairs
        self.jobs = np.concatenate([problem.opt_job[o], problem.shr_job[r], problem.shr_job[s]])
        count = len(o) + len(r)
        self.columns = np.concatenate([np.arange(count), np.arange(len(o), count)])
        self.fairness = np.concatenate([problem.opt_fairness[o], problem.shr_fairness[r], problem.shr_fairness[s]])
        self.gpus = np.concatenate([problem.opt_gpus[o], np.ones(len(r))])
        own = problem.opt_worth
        half = problem.shr_worth
        self.value = np.concatenate([own[o], half[r] + half[s]])

    def _matrix(self, entries: Floats, columns: int) -> csr_array[Any]:
        return _sparse(entries, self.jobs, self.columns, (self.problem.num_jobs, columns))

    def max_min(self, time_limit_s: float) -> tuple[float, Bools, bool] | None:
        """(value, chosen, proved) of max min_k fairness; None when HiGHS gave nothing."""
        n, count = self.problem.num_jobs, len(self.value)
        one = self._matrix(np.ones(len(self.jobs)), count + 1)
        reach = self._matrix(self.fairness, count + 1) - _sparse(
            np.ones(n), np.arange(n), np.full(n, count), (n, count + 1)
        )
        result = _milp(
            np.append(np.zeros(count), -1.0),
            [(one, -np.inf, 1.0), (reach, 0.0, np.inf), (np.append(self.gpus, 0.0)[None, :], 0, self.problem.num_gpus)],
            continuous=1,
            upper=np.append(np.ones(count), np.inf),
            options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
        )
        if result.x is None:
            return None
        chosen = np.asarray(result.x[:-1] > 0.5)
        reached = np.zeros(n)
        picked = chosen[self.columns]
        reached[self.jobs[picked]] = self.fairness[picked]
        return float(reached.min(initial=np.inf)), chosen, result.status == 0

    def best_sum(self, floor: float, forced: Bools, time_limit_s: float) -> tuple[Bools, float, bool] | None:
        """(chosen, bound, proved) of the largest sum under the floor; None when HiGHS gave nothing."""
        n, count = self.problem.num_jobs, len(self.value)
        low = self.fairness < floor * (1.0 - FLOOR_SLACK)
        upper = np.ones(count)
        upper[self.columns[low]] = 0.0
        must = np.ones(n) if floor > 0 else forced.astype(np.float64)
        result = _milp(
            -self.value,
            [(self._matrix(np.ones(len(self.jobs)), count), must, 1.0), (self.gpus[None, :], 0, self.problem.num_gpus)],
            continuous=0,
            upper=upper,
            options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
        )
        if result.x is None:
            return None
        chosen = np.asarray(result.x > 0.5)
        value = float(self.value[chosen].sum())
        bound = value if result.mip_dual_bound is None else -float(result.mip_dual_bound)
        return chosen, max(value, bound), result.status == 0

    def decode(self, chosen: Bools) -> tuple[Ints, Ints, Ints]:
        """(option, shared_option, mate) per job."""
        n, cut = self.problem.num_jobs, len(self.options)
        option, shared, mate = (np.full(n, -1, np.int64) for _ in range(3))
        own = self.options[chosen[:cut]]
        option[self.problem.opt_job[own]] = own
        r, s = self.pairs[:, chosen[cut:]]
        a, b = self.problem.shr_job[r], self.problem.shr_job[s]
        shared[a], shared[b], mate[a], mate[b] = r, s, b, a
        return option, shared, mate


def _fitting_combinations(problem: Problem, graph: SharingGraph) -> Ints:
    """(2, C) flat shared options of two different jobs that fit on one GPU."""
    flat = graph.option[graph.option >= 0]
    fits = problem.fits_together(flat[:, None], flat)
    fits &= problem.shr_job[flat][:, None] < problem.shr_job[flat]
    r, s = np.nonzero(fits)
    return np.stack([flat[r], flat[s]])


def _sparse(entries: Floats, rows: Ints, cols: Ints, shape: tuple[int, int]) -> csr_array[Any]:
    from scipy.sparse import coo_array

    return coo_array((entries, (rows, cols)), shape=shape).tocsr()


def _milp(cost: Floats, constraints: list[tuple[Any, Any, Any]], continuous: int, upper: Floats, options: Any) -> Any:
    """Minimise over binaries, the last ``continuous`` columns being continuous."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    return milp(
        cost,
        constraints=[LinearConstraint(matrix, low, high) for matrix, low, high in constraints],
        integrality=np.append(np.ones(len(cost) - continuous, np.int64), np.zeros(continuous, np.int64)),
        bounds=Bounds(0, upper),
        options=options,
    )
