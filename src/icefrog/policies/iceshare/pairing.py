"""Who shares with whom once it is known *who* shares: running pairs stay, the rest is matched in one fixed way."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from icefrog.policies.iceshare.matching import (
    SharingGraph,
    assignment_matching,
    exact_matching,
    matching_weight,
    perfect_matching,
)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_EXACT_UP_TO = 200
_WEIGHTED_UP_TO = 1200


def settle_pairs(
    graph: SharingGraph, value: Floats, mate: Ints | None, vertices: Ints | None = None
) -> tuple[Ints, Ints]:
    """(N,) shared option and (N,) partner of every job, -1 for those who do not share.

    The result depends on the set of sharers and on the running pairs, not on how the set was found, so that deciding
    twice does not shuffle partners.

    Args:
        graph: the may-share graph.
        value: (S,) worth of the shared options, -inf: forbidden.
        mate: (V,) a pairing of the sharers, used if no better one is found.
        vertices: the sharers, where no pairing is known; if they cannot be paired all, some stay without a partner.
    """
    n = graph.problem.num_jobs
    option, partner = np.full(n, -1, np.int64), np.full(n, -1, np.int64)
    who = np.flatnonzero(mate >= 0) if mate is not None else vertices
    if who is None or len(who) == 0:
        return option, partner
    plain = np.where(value > -np.inf, graph.problem.shr_worth, -np.inf)
    pair = _subgraph(graph, who).pair_values(plain)
    least = -np.inf
    known: Ints | None = None
    if mate is not None:
        known = np.searchsorted(who, mate[who])
        least = matching_weight(pair, known)
    # (W,) the best a sharer can have from any partner: a pair at both its partners' best is beyond improvement.
    own = np.max(np.where(graph.option[who] >= 0, plain[graph.option[who]], -np.inf), axis=1)
    best = _canonical(pair, own, _running(graph, who), least)
    final = best if best is not None else known
    if final is None:
        return option, partner
    for i in np.flatnonzero(final > np.arange(len(who))).tolist():
        a, b = int(who[i]), int(who[final[i]])
        first, second = int(graph.jobs[a]), int(graph.jobs[b])
        option[first], option[second] = graph.combination(a, b, plain)
        partner[first], partner[second] = second, first
    return option, partner


def _subgraph(graph: SharingGraph, who: Ints) -> SharingGraph:
    return SharingGraph(graph.problem, graph.jobs[who], graph.option[who], graph.bottleneck[np.ix_(who, who)], 0)


def _running(graph: SharingGraph, who: Ints) -> Ints:
    """(W,) position in ``who`` of the present partner, -1: none of them."""
    place = {int(job): i for i, job in enumerate(graph.jobs[who].tolist())}
    partner = graph.problem.partner[graph.jobs[who]].tolist()
    out = np.array([place.get(j, -1) for j in partner], np.int64)
    for i, j in enumerate(out.tolist()):
        if j >= 0 and out[j] < 0:
            out[j] = i  # named by one side only
    return np.where((out >= 0) & (out[out] == np.arange(len(out))), out, -1)


def _canonical(pair: Floats, own: Floats, running: Ints, least: float) -> Ints | None:
    """A perfect matching of weight >= ``least``: with the running pairs kept if that loses nothing, else a heaviest one."""
    kept = running.copy()
    apart = np.flatnonzero(kept >= 0)
    kept[apart[pair[apart, kept[apart]] == -np.inf]] = -1
    free = np.flatnonzero(kept < 0)
    attempts = [(kept, free)] if len(free) < len(pair) else []
    attempts.append((np.full(len(pair), -1, np.int64), np.arange(len(pair))))
    for start, rest in attempts:
        found = _perfect(pair[np.ix_(rest, rest)], own[rest])
        if found is None:
            continue
        mate = start.copy()
        mate[rest] = rest[found]
        if matching_weight(pair, mate) >= least - 1e-12 * max(1.0, abs(least)):
            return mate
    return None


def _perfect(pair: Floats, own: Floats) -> Ints | None:
    """A perfect matching, as heavy as could be found: ideal pairs only, else by the assignment's cycles; None: no luck."""
    if len(pair) == 0:
        return np.empty(0, np.int64)
    edges = pair > -np.inf
    if not np.all(np.any(edges, axis=1)):
        return None
    top = own[:, None] + own
    ideal = edges & (pair >= top - 1e-14 * float(np.max(np.abs(own))))
    mate = perfect_matching(ideal)
    if mate is not None or len(pair) > _WEIGHTED_UP_TO or np.array_equal(ideal, edges):
        return mate
    heavy = 1.0 + 4.0 * float(np.max(np.abs(pair[edges])))
    weight = np.where(edges, pair + heavy, 0.0)
    mate = assignment_matching(weight).mate
    if np.any(mate < 0) and len(pair) <= _EXACT_UP_TO:
        mate = exact_matching(weight, resolution=1e-12 * heavy * len(pair))
    return None if np.any(mate < 0) else mate
