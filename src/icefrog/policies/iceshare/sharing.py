"""The largest sum under the floor when jobs may share: pair values split over the two partners, then a knapsack.

Give every job that may share a *half item*, half a GPU worth s_i, with s_i + s_j >= value of the pair (i, j) for every
pair. The knapsack over exclusive and half items (an even number of halves) then bounds the optimum from above, whatever
the split; and when the jobs that chose their half can be paired among themselves without loss, it *is* the optimum. With
one shared option a job, s_i is simply its own value and only the pairing can fail. When it does, the prices of a
fractional matching (``matching.dual_prices``) at the knapsack's GPU price give the split of the linear relaxation.

Answers come from the other side: fix a pairing of all sharers, good pairs first, and let the exact knapsack decide which
of those pairs share and what everybody else gets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from icefrog.policies.iceshare.knapsack import InfeasibleError, solve_knapsack
from icefrog.policies.iceshare.matching import (
    SharingGraph,
    assignment_matching,
    dual_prices,
    exact_matching,
    greedy_matching,
    perfect_matching,
)
from icefrog.policies.iceshare.menu import Menu
from icefrog.policies.iceshare.milp import Core, solve_core

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_PARTNER_BONUS = 1e-11
_ROUNDS = 8
_ROUNDS_LARGE = 6
_LARGE = 300
_HUGE = 1200  # sharers beyond which the fractional matching takes too long
_CORE_SIZE = 3000  # open choices up to which the ILP is asked
_CORE_PASSES = 3
_CLOSED = 1e-11  # relative distance to the bound that is not worth another pass
_CORE_NODES = 2000  # nodes it may use: a count, not a time, so that equal inputs give equal answers


@dataclass(frozen=True, slots=True)
class PairedSelection:
    """``item``: (N,) menu item of each job, -1 for those who share. ``mate``: (V,) vertex -> vertex, or -1."""

    item: Ints
    mate: Ints
    value: float
    bound: float


@dataclass(frozen=True, slots=True)
class _Relaxed:
    value: float  # an upper bound
    item: Ints  # (N,) menu item, -1: half
    half: Bools  # (V,) who chose its half
    price: float  # of a GPU
    split: Floats  # (V,)


class _Prices:
    """Searches the GPU price that the knapsack returns for its own split: there the relaxation is tightest."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []  # (price tried, answered minus tried)

    def saw(self, tried: float, answered: float) -> None:
        """Record what came back."""
        self.seen.append((tried, answered - tried))

    def next(self, answered: float) -> float | None:
        """The next price to try; None when the last one reproduced itself."""
        if not self.seen:
            return answered
        last, miss = self.seen[-1]
        if miss == 0.0:
            return None
        guess = answered
        if len(self.seen) > 1:
            before, miss_before = self.seen[-2]
            slope = (miss - miss_before) / (last - before) if last != before else 0.0
            if slope < 0.0:
                step = -miss / slope
                limit = 8.0 * max(abs(miss), abs(last - before))
                guess = last + min(max(step, -limit), limit)
        low = max((p for p, m in self.seen if m > 0), default=0.0)
        high = min((p for p, m in self.seen if m < 0), default=float("inf"))
        if low < high < float("inf") and not low < guess < high:
            guess = (low + high) / 2
        return max(guess, 0.0) if guess not in (p for p, _ in self.seen) else None


class PairedKnapsack:
    """One instance; build it, then ``solve``."""

    def __init__(self, menu: Menu, graph: SharingGraph, num_gpus: int, tolerance: float = 0.0) -> None:
        self.menu, self.graph, self.num_gpus, self.tolerance = menu, graph, num_gpus, tolerance
        self.pair = graph.pair_values(menu.shared_value)
        self._favour_running_pairs()
        self.scale = max(1e-300, float(np.max(np.abs(menu.value), initial=0.0)), self._largest_pair())
        self.linked = np.any(self.pair > -np.inf, axis=1)
        self.sizes = np.diff(menu.ptr)

    def _favour_running_pairs(self) -> None:
        vertex = {job: i for i, job in enumerate(self.graph.jobs.tolist())}
        for job, i in vertex.items():
            j = vertex.get(int(self.graph.problem.partner[job]), -1)
            if j >= 0 and self.pair[i, j] > -np.inf:
                self.pair[i, j] *= 1.0 + _PARTNER_BONUS
                self.pair[j, i] = self.pair[i, j]

    def _largest_pair(self) -> float:
        return float(np.max(self.pair, initial=0.0))

    # -- upper bounds ------------------------------------------------------------------------------------------------

    def first_split(self) -> Floats:
        """(V,) every vertex's best own value, lowered where no pair needs that much."""
        option = self.graph.option
        own = np.max(np.where(option >= 0, self.menu.shared_value[option], -np.inf), axis=1)
        return self._lowered(np.where(self.linked, own, 0.0))

    def _lowered(self, split: Floats) -> Floats:
        """Lower the split vertex by vertex as far as the pairs allow."""
        split = split.copy()
        for i in np.flatnonzero(self.linked):
            split[i] = min(split[i], float(np.max(self.pair[i] - split)))
        return split

    def relax(self, split: Floats) -> _Relaxed:
        """The knapsack with half items; see the module's docstring."""
        menu, jobs = self.menu, self.graph.jobs[self.linked]
        sizes = self.sizes.copy()
        sizes[jobs] += 1
        ptr = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        half = np.zeros(ptr[-1], dtype=bool)
        half[ptr[jobs + 1] - 1] = True
        cost, value = np.ones(ptr[-1], np.int64), np.empty(ptr[-1])
        item = np.full(ptr[-1], -1, np.int64)
        cost[~half], value[~half], item[~half] = 2 * menu.cost, menu.value, np.arange(len(menu.cost))
        value[half] = split[self.linked]
        best = solve_knapsack(ptr, cost, value, 2 * self.num_gpus, even_total=True)
        chosen = item[best.choice]
        total = float(np.sum(value[best.choice])) + best.excess
        return _Relaxed(total, chosen, chosen[self.graph.jobs] < 0, 2 * best.price, split)

    def outside(self, price: float) -> Floats:
        """(V,) what each vertex gains without sharing when a GPU costs ``price``."""
        menu = self.menu
        net = menu.value - price * menu.cost
        out = np.full(
            self.graph.size, -4.0 * self.scale
        )  # those who can only share: they must, if it is possible at all
        some = self.sizes[self.graph.jobs] > 0
        jobs = self.graph.jobs[some]
        owner = np.repeat(np.arange(len(self.sizes)), self.sizes)
        best = np.full(len(self.sizes), -np.inf)
        np.maximum.at(best, owner, net)
        out[some] = best[jobs]
        return out

    def fractional_split(self, price: float) -> Floats:
        """The split by the fractional matching's prices."""
        alone = self.outside(price)
        gain = self.pair - price - alone[:, None] - alone
        return self._lowered(dual_prices(gain) + alone + price / 2)

    # -- answers -----------------------------------------------------------------------------------------------------

    def perfect(self, relaxed: _Relaxed) -> Ints | None:
        """(V,) mate of those who chose their half, if they can be paired without loss against the split."""
        who = np.flatnonzero(relaxed.half)
        mate = perfect_matching(self._tight(relaxed.split, who))
        if mate is None:
            return None
        out = np.full(self.graph.size, -1, np.int64)
        out[who] = who[mate]
        return out

    def _tight(self, split: Floats, who: Ints) -> Bools:
        """Which pairs among ``who`` are worth all that the split promises."""
        return self.pair[np.ix_(who, who)] >= split[who][:, None] + split[who] - 1e-14 * self.scale

    def pairing(self, relaxed: _Relaxed) -> Ints:
        """(V,) a pairing of as many vertices as possible: first those that chose their half, then the rest."""
        loss = relaxed.split[:, None] + relaxed.split - self.pair
        who = np.flatnonzero(relaxed.half)
        mate = np.full(self.graph.size, -1, np.int64)
        found = assignment_matching(np.maximum(4 * self.scale - loss[np.ix_(who, who)], 0.0)).mate
        mate[who[found >= 0]] = who[found[found >= 0]]
        rest = np.flatnonzero((mate < 0) & self.linked)
        alone = self.outside(relaxed.price)
        gain = (self.pair - alone[:, None] - alone)[np.ix_(rest, rest)]
        gain = np.where(gain > -np.inf, gain + 16 * self.scale, 0.0)
        more = greedy_matching(gain, np.argsort(-(relaxed.split - alone)[rest], kind="stable"))
        mate[rest[more >= 0]] = rest[more[more >= 0]]
        return mate

    def decide(self, mate: Ints) -> tuple[Ints, Ints, float] | None:
        """The best selection in which only pairs of ``mate`` may share: (item, mate actually used, value)."""
        menu, jobs = self.menu, self.graph.jobs
        first = np.flatnonzero(mate > np.arange(len(mate))).tolist()
        single = np.ones(len(self.sizes), dtype=bool)
        single[jobs[mate >= 0]] = False
        if np.any(self.sizes[single] == 0):
            return None
        lone = np.flatnonzero(single[np.repeat(np.arange(len(self.sizes)), self.sizes)])
        fronts = {i: (self._front(jobs[i]), self._front(jobs[mate[i]])) for i in first}
        costs, values = [menu.cost[lone]], [menu.value[lone]]
        for i, (a, b) in fronts.items():  # a pair is one class: to share, or any two of their items
            costs.append(np.append((menu.cost[a][:, None] + menu.cost[b]).ravel(), 1))
            values.append(np.append((menu.value[a][:, None] + menu.value[b]).ravel(), self.pair[i, mate[i]]))
        sizes = np.concatenate([self.sizes[single], [len(c) for c in costs[1:]]])
        ptr = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        value = np.concatenate(values)
        try:
            choice = solve_knapsack(ptr, np.concatenate(costs), value, self.num_gpus).choice
        except InfeasibleError:
            return None
        item = np.full(len(self.sizes), -1, np.int64)
        used = np.full(len(mate), -1, np.int64)
        num_single = int(np.count_nonzero(single))
        item[single] = lone[choice[:num_single]]
        places = (choice[num_single:] - ptr[num_single:-1]).tolist()
        for place, (i, (a, b)) in zip(places, fronts.items(), strict=True):
            j = int(mate[i])
            if place == len(a) * len(b):
                used[i], used[j] = j, i
            else:
                item[jobs[i]], item[jobs[j]] = a[place // len(b)], b[place % len(b)]
        return item, used, float(np.sum(value[choice]))

    def _front(self, job: int) -> Ints:
        """The job's menu items that no cheaper one matches in value."""
        items = np.arange(self.menu.ptr[job], self.menu.ptr[job + 1])
        cost, value = self.menu.cost[items], self.menu.value[items]
        order = np.lexsort((-value, cost))
        best = np.maximum.accumulate(np.append(-np.inf, value[order]))
        return items[order[value[order] > best[:-1]]]

    def thriftiest(self) -> tuple[Ints, Ints, float] | None:
        """A selection built on the pairing that needs the fewest GPUs: it exists whenever anything feasible does."""
        menu = self.menu
        none = self.num_gpus + 1
        least = np.full(len(self.sizes), none, np.int64)
        np.minimum.at(least, np.repeat(np.arange(len(self.sizes)), self.sizes), menu.cost)
        need = least[self.graph.jobs]
        saving = np.where(self.pair > -np.inf, need[:, None] + need - 1, 0).astype(np.float64)
        quick = self.decide(assignment_matching(saving).mate)
        return quick if quick is not None else self.decide(exact_matching(saving))

    # -- both --------------------------------------------------------------------------------------------------------

    def solve(self) -> PairedSelection:
        """The best selection found and the proven bound; a gap within the tolerance is not worked on.

        Raises:
            InfeasibleError: the floor cannot be kept (the caller's threshold search rules this out).
        """
        relaxed = self.relax(self.first_split())
        tightest, bound = relaxed, relaxed.value
        best: tuple[Ints, Ints, float] | None = None
        prices = _Prices()
        rounds = _ROUNDS if self.graph.size <= _LARGE else _ROUNDS_LARGE if self.graph.size <= _HUGE else 1
        for step in range(rounds):
            mate = self.perfect(relaxed)
            if mate is not None:
                return PairedSelection(relaxed.item, mate, relaxed.value, relaxed.value)
            answer = self.decide(self.pairing(relaxed))
            if answer is not None and (best is None or answer[2] > best[2]):
                best = answer
            if step + 1 == rounds or (best is not None and self._close_enough(bound, best[2])):
                break
            tried = prices.next(relaxed.price)
            if tried is None:
                break
            relaxed = self.relax(self.fractional_split(tried))
            prices.saw(tried, relaxed.price)
            if relaxed.value < bound:
                tightest, bound = relaxed, relaxed.value
        best = best if best is not None else self.thriftiest()
        if best is None:
            raise InfeasibleError
        if self._close_enough(bound, best[2]):
            return PairedSelection(*best, max(bound, best[2]))
        return self._closed(best, tightest, max(bound, best[2]))

    def _close_enough(self, bound: float, value: float) -> bool:
        return bound - value <= max(1e-13 * self.scale, self.tolerance * abs(bound))

    def _closed(self, best: tuple[Ints, Ints, float], relaxed: _Relaxed, bound: float) -> PairedSelection:
        """Let the ILP decide what the bound leaves open, if that is little."""
        item, mate, value = best
        for _ in range(_CORE_PASSES):  # each pass works at the resolution of what is still open
            core = self._open_choices(relaxed, value) if bound - value > _CLOSED * abs(bound) else None
            if core is None:
                break
            found = solve_core(core, _CORE_NODES)
            if found.chosen is not None and core.top - found.loss > value:
                item, mate, value = self._from_core(core, found.chosen)
            bound = max(value, min(bound, core.top - found.least_loss))
        return PairedSelection(item, mate, value, bound)

    def _open_choices(self, relaxed: _Relaxed, value: float) -> Core | None:
        """The items and pairs that an answer better than ``value`` may use, by their losses; None: too many."""
        menu, price, split = self.menu, relaxed.price, relaxed.split
        jobs = self.graph.jobs
        owner = np.repeat(np.arange(len(self.sizes)), self.sizes)
        net = menu.value - price * menu.cost
        half = np.where(self.linked, split - price / 2, -np.inf)
        top = np.full(len(self.sizes), -np.inf)
        np.maximum.at(top, owner, net)
        top[jobs] = np.maximum(top[jobs], half)
        total = price * self.num_gpus + float(top.sum())
        allowed = total - value
        if allowed <= 0.0:
            return None
        loss = top[owner] - net
        i, j = np.nonzero(np.triu(self.pair > -np.inf, 1))
        pair_loss = top[jobs[i]] + top[jobs[j]] - (self.pair[i, j] - price)
        items, pairs = np.flatnonzero(loss < allowed), np.flatnonzero(pair_loss < allowed)
        if len(items) + len(pairs) > _CORE_SIZE + len(self.sizes):
            return None
        return Core(
            num_jobs=len(self.sizes),
            num_gpus=self.num_gpus,
            price=price,
            top=total,
            allowed=allowed,
            item=items,
            item_job=owner[items],
            item_cost=menu.cost[items],
            item_loss=loss[items],
            pair=np.stack([i[pairs], j[pairs]]),
            pair_job=np.stack([jobs[i[pairs]], jobs[j[pairs]]]),
            pair_loss=pair_loss[pairs],
        )

    def _from_core(self, core: Core, chosen: Bools) -> tuple[Ints, Ints, float]:
        item = np.full(len(self.sizes), -1, np.int64)
        mate = np.full(self.graph.size, -1, np.int64)
        which = chosen[: len(core.item)]
        item[core.item_job[which]] = core.item[which]
        i, j = core.pair[:, chosen[len(core.item) :]]
        mate[i], mate[j] = j, i
        value = float(np.sum(self.menu.value[item[item >= 0]]) + np.sum(self.pair[i, j]))
        return item, mate, value
