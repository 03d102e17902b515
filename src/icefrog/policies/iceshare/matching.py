"""Who may share a GPU with whom, and matchings in that graph.

The graph is dense (two sums, memory and utilisation, below two limits), so it is kept as matrices over the V jobs that
have a possible partner. scipy's assignment solver, run on the symmetric weight matrix, gives the *fractional* matching
bound in a fraction of the time of a blossom algorithm; its cycles give a matching, optimal unless an odd cycle is left.
Only then Edmonds' algorithm (rustworkx) decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from icefrog.policies.iceshare.problem import Problem

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MAX_SHARERS = 4000
"""Beyond this many jobs with shared options the matrices would not fit; see ``SharingGraph.left_out``."""
_EDMONDS_UP_TO = 200


@dataclass(frozen=True, eq=False)
class SharingGraph:
    """The jobs that have at least one partner, and the best joint fairness of every pair.

    ``jobs``: (V,) indices of jobs, ascending. ``option``: (V, Q) flat index of the job's shared options, -1 where it has
    fewer than Q. ``bottleneck``: (V, V) largest min(fairness_i, fairness_j) over the combinations that fit; -inf: no edge.
    """

    problem: Problem
    jobs: Ints
    option: Ints
    bottleneck: Floats
    left_out: int  # sharers that were not considered because there are more than MAX_SHARERS

    @property
    def size(self) -> int:
        """V."""
        return len(self.jobs)

    def pair_values(self, value: Floats) -> Floats:
        """(V, V) the largest value_i + value_j over the combinations that fit; -inf: none.

        Args:
            value: (S,) worth of every shared option; -inf forbids it.
        """
        return _combine(self.problem, self.option, value, np.add)

    def combination(self, i: int, j: int, value: Floats) -> tuple[int, int]:
        """The flat indices of the best fitting shared options of vertices i and j (the first of several equals)."""
        mine, theirs = self.option[i][self.option[i] >= 0], self.option[j][self.option[j] >= 0]
        ok = self.problem.fits_together(mine[:, None], theirs)
        total = np.where(ok, value[mine][:, None] + value[theirs], -np.inf)
        r, s = np.unravel_index(int(np.argmax(total)), total.shape)
        return int(mine[r]), int(theirs[s])


def sharing_graph(problem: Problem) -> SharingGraph:
    """The may-share graph of a problem (section 6)."""
    sharers = np.flatnonzero(np.diff(problem.shr_ptr))
    left_out = max(0, len(sharers) - MAX_SHARERS)
    sharers = sharers[:MAX_SHARERS]
    if len(sharers) < 2 or problem.num_gpus < 1:
        return SharingGraph(problem, np.empty(0, np.int64), np.empty((0, 0), np.int64), np.empty((0, 0)), left_out)
    option = _padded_options(problem, sharers)
    bottleneck = _combine(problem, option, problem.shr_fairness, np.minimum)
    linked = np.flatnonzero(np.any(bottleneck > -np.inf, axis=1))
    return SharingGraph(problem, sharers[linked], option[linked], bottleneck[np.ix_(linked, linked)], left_out)


def _padded_options(problem: Problem, sharers: Ints) -> Ints:
    first, sizes = problem.shr_ptr[sharers], np.diff(problem.shr_ptr)[sharers]
    column = np.arange(int(sizes.max()))
    return np.where(column < sizes[:, None], first[:, None] + column, -1)


def _combine(problem: Problem, option: Ints, value: Floats, join: Callable[[Floats, Floats], Floats]) -> Floats:
    """(V, V) max over fitting combinations of ``join(value_i, value_j)``; the diagonal and misfits are -inf."""
    v, q = option.shape
    best = np.full((v, v), -np.inf)
    absent = option < 0
    worth = np.where(absent, -np.inf, value[option])
    used = [r for r in range(q) if np.any(worth[:, r] > -np.inf)]
    for r in used:
        for s in (s for s in used if s >= r):
            fits = problem.fits_together(option[:, r, None], option[:, s])
            joint = np.where(fits, join(worth[:, r, None], worth[:, s]), -np.inf)
            np.maximum(best, joint, out=best)
            if s > r:
                np.maximum(best, joint.T, out=best)
    np.fill_diagonal(best, -np.inf)
    return best


@dataclass(frozen=True, slots=True)
class Matching:
    """``mate``: (V,) partner or -1. ``weight`` of it, and ``bound``: no matching weighs more."""

    mate: Ints
    weight: float
    bound: float


def matching_weight(weight: Floats, mate: Ints) -> float:
    """The weight of a matching."""
    i = np.flatnonzero(mate > np.arange(len(mate)))
    return float(np.sum(weight[i, mate[i]]))


def greedy_matching(weight: Floats, order: Ints) -> Ints:
    """Vertices in ``order`` take their heaviest free neighbour, of equals the one with the fewest neighbours.

    Weights <= 0 are no edges. Returns (V,) mate.
    """
    v = len(weight)
    mate = np.full(v, -1, np.int64)
    degree = np.count_nonzero(weight > 0, axis=1)
    by_degree = np.argsort(degree, kind="stable")
    free = np.ones(v, dtype=bool)
    sorted_weight = weight[:, by_degree]
    for i in order:
        if not free[i]:
            continue
        row = np.where(free[by_degree], sorted_weight[i], 0.0)
        at = int(np.argmax(row))
        if row[at] > 0:
            j = int(by_degree[at])
            mate[i], mate[j] = j, i
            free[i] = free[j] = False
    return mate


def assignment_matching(weight: Floats) -> Matching:
    """A heavy matching and the fractional bound. ``weight``: (V, V) symmetric, <= 0 where there is no edge."""
    from scipy.optimize import linear_sum_assignment

    gain = np.maximum(weight, 0.0)
    np.fill_diagonal(gain, 0.0)
    _, perm = linear_sum_assignment(gain, maximize=True)
    bound = float(np.sum(gain[np.arange(len(perm)), perm])) / 2
    mate = _from_cycles(gain, perm)
    _fill(gain, mate)
    return Matching(mate, matching_weight(gain, mate), bound)


def _from_cycles(gain: Floats, perm: Ints) -> Ints:
    """Split the permutation's cycles into matched edges: the better half of an even cycle, the best path of an odd one."""
    here = np.arange(len(perm))
    swapped = perm[perm] == here  # cycles of one or two, by far the most
    mate = np.where(swapped & (perm != here) & (gain[here, perm] > 0), perm, -1).astype(np.int64)
    step = perm.tolist()
    seen = swapped.tolist()
    for start in range(len(step)):
        cycle = []
        at = start
        while not seen[at]:
            seen[at] = True
            cycle.append(at)
            at = step[at]
        if len(cycle) < 2:
            continue
        c = np.array(cycle)
        edge = gain[c, np.roll(c, -1)]
        if len(c) % 2 == 0:
            c = c if edge[::2].sum() >= edge[1::2].sum() else np.roll(c, -1)
        else:
            c = np.roll(c, -_best_gap(edge))[1:]
        for a, b in zip(c[::2].tolist(), c[1::2].tolist(), strict=True):
            if gain[a, b] > 0:
                mate[a], mate[b] = b, a
    return mate


def _best_gap(edge: Floats) -> int:
    """Which vertex of an odd cycle to leave single; ``edge[p]`` joins vertices p and p + 1."""
    length = len(edge)
    twice = np.concatenate([edge, edge])
    return int(np.argmax([twice[p + 1 : p + length - 1 : 2].sum() for p in range(length)]))


def _fill(gain: Floats, mate: Ints) -> None:
    """Match what is still free, heaviest edges first."""
    free = np.flatnonzero(mate < 0)
    if len(free) < 2:
        return
    rest = greedy_matching(gain[np.ix_(free, free)], np.arange(len(free)))
    got = np.flatnonzero(rest >= 0)
    mate[free[got]] = free[rest[got]]


def perfect_matching(edges: Bools) -> Ints | None:
    """(V,) mate, everybody matched along ``edges`` (symmetric); None where there is none or none was found.

    Scarce vertices first; then the assignment's cycles; then, on small graphs, Edmonds' algorithm settles it.
    """
    degree = np.count_nonzero(edges, axis=1)
    if len(edges) % 2 or np.any(degree == 0):
        return None
    weight = edges.astype(np.float64)
    mate = greedy_matching(weight, np.argsort(degree, kind="stable"))
    if np.any(mate < 0):
        found = assignment_matching(weight)
        if found.bound < len(edges) / 2 - 0.25:
            return None
        mate = found.mate
    if np.any(mate < 0) and len(edges) <= _EDMONDS_UP_TO:
        mate = exact_matching(weight)
    return None if np.any(mate < 0) else mate


def exact_matching(weight: Floats, resolution: float = 1.0) -> Ints:
    """A maximum-weight matching by Edmonds' algorithm; weights are rounded to multiples of ``resolution``."""
    import rustworkx

    graph: rustworkx.PyGraph[int, int] = rustworkx.PyGraph(multigraph=False)
    graph.add_nodes_from(range(len(weight)))
    i, j = np.nonzero(np.triu(weight > 0, 1))
    whole = np.rint(weight[i, j] / resolution).astype(np.int64)
    graph.add_edges_from(list(zip(i.tolist(), j.tolist(), whole.tolist(), strict=True)))
    mate = np.full(len(weight), -1, np.int64)
    for a, b in sorted(tuple(sorted(edge)) for edge in rustworkx.max_weight_matching(graph, weight_fn=int)):
        mate[a], mate[b] = b, a
    return mate


def reaches(weight: Floats, required: int) -> bool:
    """Whether some matching of the integer ``weight`` (symmetric, <= 0: no edge) weighs at least ``required``."""
    if required <= 0:
        return True
    strongest = np.max(weight, axis=1, initial=0.0)
    if float(np.sum(strongest)) / 2 < required:
        return False
    degree = np.count_nonzero(weight > 0, axis=1)
    quick = greedy_matching(weight, np.lexsort((degree, -strongest)))
    if matching_weight(weight, quick) >= required:
        return True
    found = assignment_matching(weight)
    if found.bound < required - 1e-6 * max(1.0, abs(required)):
        return False
    if found.weight >= required:
        return True
    return matching_weight(weight, exact_matching(weight)) >= required


def dual_prices(weight: Floats) -> Floats:
    """(V,) y >= 0 with y_i + y_j >= weight_ij for every pair, whose sum is the fractional matching bound.

    The assignment's potentials, found by relaxing its residual graph until nothing changes, averaged over rows and
    columns (the matrix is symmetric).
    """
    from scipy.optimize import linear_sum_assignment

    gain = np.maximum(weight, 0.0)
    np.fill_diagonal(gain, 0.0)
    v = len(gain)
    _, perm = linear_sum_assignment(gain, maximize=True)
    own = gain[np.arange(v), perm]
    slack = own[:, None] - gain  # cost of giving row i another column
    column = np.zeros(v)
    for _ in range(v + 1):
        lower = np.min(column[perm][:, None] + slack, axis=0)
        if np.all(lower >= column - 1e-15):
            break
        column = np.minimum(column, lower)
    y = (own + column[perm] - column) / 2
    # Rounding may leave a constraint short by an ulp or two: lift, so that the prices are feasible beyond doubt.
    return np.maximum(y + max(0.0, float(np.max(gain - y[:, None] - y, initial=0.0))), 0.0)
