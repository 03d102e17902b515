"""Exact multiple-choice knapsack: a Lagrangian bound, then dynamic programming on the undecided classes only.

One item of every class is chosen, the costs (GPUs) add up to at most the capacity, the value is largest. With the price
``lam`` of a GPU, every class has a best item; any other item *loses* ``loss >= 0`` against it, and for every selection

    value = U - sum(loss) - lam * (GPUs left over),      U = lam * capacity + sum_k max_j (value_kj - lam * cost_kj).

So a selection is optimal when ``sum(loss) + lam * slack`` is smallest, and an item whose loss alone reaches that of the
best known selection is out. What survives (the *core*, after Pisinger, EJOR 83(2), 1995) is a handful of classes; they
enter a list of undominated states in the order of their smallest loss until the next one cannot matter any more. Losses
are small numbers computed class by class, so no precision is lost to the size of the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_MAX_WORK = 2_000_000_000
"""State expansions after which the search stops with an honest bound; far above what real instances need."""
_DEDUP_FROM = 64


class InfeasibleError(Exception):
    """No selection fits: even the cheapest items cost more than the capacity."""


@dataclass(frozen=True, slots=True)
class Selection:
    """``choice``: (n,) index of each class's item into the flat arrays. ``excess`` >= 0: optimum <= value + excess.

    ``price``: of one unit of cost at the optimum of the linear relaxation.
    """

    choice: Ints
    excess: float
    price: float


@dataclass(frozen=True, slots=True)
class _Items:
    """The items sorted by (class, cost, -value); costs relative to the class's cheapest item, divided by their gcd."""

    starts: Ints  # (n,) first item of each class
    cls: Ints  # (m,) class of each item
    cost: Ints  # (m,)
    value: Floats  # (m,)
    capacity: int
    parity: int | None  # of the total relative cost; None: any


def solve_knapsack(ptr: Ints, cost: Ints, value: Floats, capacity: int, even_total: bool = False) -> Selection:
    """The best selection of one item a class with total cost at most ``capacity``.

    Args:
        ptr: (n+1,) class k owns items ``ptr[k]:ptr[k+1]``, at least one.
        cost: (m,) non-negative.
        value: (m,) finite.
        capacity: in units of ``cost``.
        even_total: only selections of an even total cost count (the half-GPU items of ``sharing``).

    Raises:
        InfeasibleError: nothing fits.
    """
    n = len(ptr) - 1
    if n == 0:
        return Selection(np.empty(0, np.int64), 0.0, 0.0)
    order, items, unit = _sorted_items(ptr, cost, value, capacity, even_total)
    lam, choice = _price(items)
    chosen, excess = _Core(items, lam, choice).search()
    return Selection(order[chosen], excess, lam / unit)


def _sorted_items(ptr: Ints, cost: Ints, value: Floats, capacity: int, even: bool) -> tuple[Ints, _Items, int]:
    sizes = np.diff(ptr)
    cls = np.repeat(np.arange(len(sizes)), sizes)
    order = np.lexsort((-value, cost, cls))
    starts = ptr[:-1]
    sorted_cost = cost[order]
    base = sorted_cost[starts]
    rest = int(capacity) - int(base.sum())
    if rest < 0:
        raise InfeasibleError
    rel = sorted_cost - base[cls]
    parity = int(base.sum()) % 2 if even else None
    unit = 1 if even else max(1, int(np.gcd.reduce(rel)))
    return order, _Items(starts, cls, rel // unit, value[order], rest // unit, parity), unit


def _best_items(items: _Items, lam: float) -> Ints:
    """Each class's cheapest item among those of the largest ``value - lam * cost``."""
    reduced = items.value - lam * items.cost
    top = np.maximum.reduceat(reduced, items.starts)
    index = np.where(reduced >= top[items.cls], np.arange(len(reduced)), len(reduced))
    return np.minimum.reduceat(index, items.starts)


def _price(items: _Items) -> tuple[float, Ints]:
    """The price of a GPU at which demand falls to the capacity, and the demand there (it fits)."""
    low = _best_items(items, 0.0)
    if int(items.cost[low].sum()) <= items.capacity:
        return 0.0, low
    gain = items.value - items.value[items.starts][items.cls]
    lam_lo, lam_hi = 0.0, float(np.max(gain[items.cost > 0] / items.cost[items.cost > 0]))
    high = items.starts
    for step in range(200):
        cost_lo, cost_hi = int(items.cost[low].sum()), int(items.cost[high].sum())
        # The lines of the two selections cross at the next price to try; every third step bisects, lest one end sticks.
        lam = float(np.sum(items.value[low] - items.value[high])) / (cost_lo - cost_hi)
        if step % 3 == 2:
            lam = (lam_lo + lam_hi) / 2
        if not lam_lo < lam < lam_hi:
            break
        choice = _best_items(items, lam)
        used = int(items.cost[choice].sum())
        if used <= items.capacity:
            done = used == cost_hi and step % 3 != 2
            lam_hi, high = lam, choice
        else:
            done = used == cost_lo and step % 3 != 2
            lam_lo, low = lam, choice
        if done or used == items.capacity:
            break
    return lam_hi, high


class _Core:
    """The search of one instance; see the module's docstring. All costs are relative to the starting selection."""

    def __init__(self, items: _Items, lam: float, choice: Ints) -> None:
        self.items, self.lam = items, lam
        reduced = items.value - lam * items.cost
        loss = np.maximum.reduceat(reduced, items.starts)[items.cls] - reduced
        loss[loss <= 4e-16 * float(np.max(np.abs(items.value)))] = 0.0
        self.loss = loss
        self.choice = self._filled(choice)
        self.slack = items.capacity - int(items.cost[self.choice].sum())
        self.parity = None if items.parity is None else (items.parity + int(items.cost[self.choice].sum())) % 2
        self.best = lam * self.slack if self.parity in (None, 0) else np.inf
        self.shift = items.cost - items.cost[self.choice][items.cls]  # (m,) cost against the chosen item

    def _filled(self, choice: Ints) -> Ints:
        """Take dearer items that lose nothing while they fit: with many equal jobs most of the work is done here."""
        items = self.items
        index = np.where(self.loss == 0.0, np.arange(len(self.loss)), -1)
        dear = np.maximum.reduceat(index, items.starts)
        step = items.cost[dear] - items.cost[choice]
        slack = items.capacity - int(items.cost[choice].sum())
        up = np.flatnonzero(step > 0)
        if len(up) == 0 or slack <= 0:
            return choice
        choice = choice.copy()
        taken = up[np.cumsum(step[up]) <= slack]
        choice[taken] = dear[taken]
        return choice

    def search(self) -> tuple[Ints, float]:
        """The optimal choice (item per class), and by how much the optimum may exceed it (0 unless the work limit hit)."""
        if self.best <= 0.0:
            return self.choice, 0.0
        members = self._members()
        return self._expand(members) if members else (self.choice, 0.0)

    def _members(self) -> list[tuple[float, Ints]]:
        """Classes with an alternative that may matter: (smallest loss, items sorted as given), in that order."""
        starts = self.items.starts
        alternative = self.loss < self.best
        alternative[self.choice] = False
        least = np.minimum.reduceat(np.where(alternative, self.loss, np.inf), starts)
        cand = np.flatnonzero(np.isfinite(least))
        cand = cand[np.argsort(least[cand], kind="stable")]
        flat = np.flatnonzero(alternative)
        bounds = np.searchsorted(self.items.cls[flat], np.stack([cand, cand + 1]))
        groups = [flat[a:b] for a, b in bounds.T]
        keep = self._deduplicated(groups) if len(groups) > _DEDUP_FROM else range(len(groups))
        return [(float(least[cand[i]]), groups[i]) for i in keep]

    def _deduplicated(self, groups: list[Ints]) -> list[int]:
        """Drop superfluous twins.

        Changes whose costs cancel can be undone without loss, so some optimum has no such subset; with cost steps of at
        most D it then changes fewer than 4 D + slack classes. Of equal classes no more than that many need be looked at.
        """
        flat = np.concatenate(groups)
        limit = 4 * int(np.max(np.abs(self.shift[flat]))) + self.slack + 2
        if limit >= len(groups):
            return list(range(len(groups)))
        seen: dict[tuple[bytes, bytes], int] = {}
        keep = []
        for i, group in enumerate(groups):
            key = (self.shift[group].tobytes(), self.loss[group].tobytes())
            seen[key] = count = seen.get(key, 0) + 1
            if count <= limit:
                keep.append(i)
        return keep

    def _suffix_rates(self, members: list[tuple[float, Ints]]) -> tuple[Floats, Floats]:
        """Least loss per GPU given back, and per GPU taken up, among this member and all later ones."""
        flat = np.concatenate([g for _, g in members])
        sizes = np.array([len(g) for _, g in members])
        first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        shift, loss = self.shift[flat], self.loss[flat]
        with np.errstate(divide="ignore", invalid="ignore"):
            down = np.where(shift < 0, loss / -shift, np.inf)
            up = np.where(shift > 0, loss / shift, np.inf)
        rates = []
        for rate in (down, up):
            per_member = np.minimum.reduceat(rate, first)
            suffix = np.minimum.accumulate(per_member[::-1])[::-1]
            rates.append(np.append(suffix, np.inf))
        return rates[0], np.minimum(rates[1], self.lam)

    def _expand(self, members: list[tuple[float, Ints]]) -> tuple[Ints, float]:
        down, up = self._suffix_rates(members)
        over = np.array([-self.slack], dtype=np.int64)  # GPUs above the capacity
        loss = np.zeros(1)
        history: list[tuple[Ints, Ints]] = []  # (parent state, item or -1) of every state, member by member
        found: tuple[int, int] | None = None
        work = 0
        for k, (least, group) in enumerate(members):
            if least >= self.best or work > _MAX_WORK:
                break
            group = group[self.loss[group] < self.best]
            shifts = np.append(0, self.shift[group])
            losses = np.append(0.0, self.loss[group])
            new_over = (shifts[:, None] + over).ravel()
            new_loss = (losses[:, None] + loss).ravel()
            work += len(new_over)
            promise = new_loss + np.where(new_over > 0, new_over * _finite(down[k + 1]), -new_over * up[k + 1])
            alive = np.flatnonzero(promise < self.best)
            alive = alive[self._undominated(new_over[alive], new_loss[alive])]
            history.append((alive % len(over), np.append(-1, group)[alive // len(over)]))
            over, loss = new_over[alive], new_loss[alive]
            total = np.where(self._allowed(over), loss - self.lam * over, np.inf)
            if len(total) == 0:
                break
            at = int(np.argmin(total))
            if total[at] < self.best:
                self.best, found = float(total[at]), (k, at)
        choice = self.choice.copy()
        if found is not None:
            step, state = found
            for parent, item in reversed(history[: step + 1]):
                if item[state] >= 0:
                    choice[self.items.cls[item[state]]] = item[state]
                state = int(parent[state])
        return choice, (self.best if work > _MAX_WORK else 0.0)

    def _allowed(self, over: Ints) -> Bools:
        fits = over <= 0
        if self.parity is not None:
            fits &= (over + self.slack + self.parity) % 2 == 0
        return fits

    def _undominated(self, over: Ints, loss: Floats) -> Ints:
        """Indices, ascending in GPUs, of states that no cheaper state (of the same parity) matches in value."""
        order = np.lexsort((loss, over))
        value = self.lam * over[order] - loss[order]
        if self.parity is None:
            return order[_rises(value)]
        odd = over[order] % 2 == 1
        keep = np.zeros(len(order), dtype=bool)
        for half in (odd, ~odd):
            keep[half] = _rises(value[half])
        return order[keep]


def _rises(value: Floats) -> Bools:
    """Which entries exceed everything before them."""
    keep = np.ones(len(value), dtype=bool)
    if len(value) > 1:
        keep[1:] = value[1:] > np.maximum.accumulate(value)[:-1]
    return keep


def _finite(rate: float) -> float:
    """An infinite rate as a huge number, so that 0 GPUs times it is 0."""
    return min(float(rate), 1e300)
