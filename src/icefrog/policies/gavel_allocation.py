"""Gavel's policies as optimisation problems (OSDI'20, section 4): how much of its time a job should spend on each GPU type.

An allocation X has a row a job and a column a type: X[m, j] is the share of its time that job m runs on type j. It is valid
(section 3.1) if X >= 0, every row sums to at most 1, and on every type sum_m s_m X[m, j] <= the GPUs of that type, s_m being
the GPUs that job m runs on. Every objective here is a max-min problem in the *gains* of the jobs, sum_j gain[m, j] X[m, j]:

- max-min fairness, or LAS (4.1): gain = T[m, j] s_m / (w_m throughput(m, X_equal)), the share of GPU time in units of what
  an equal share of every type would give;
- makespan, or minimum total duration (4.2): gain = 1 / (seconds that job m still needs on type j);
- finish-time fairness (4.2, from Themis): the least rho at which all gains (rho D_m - t_m) / (seconds still needed) reach 1.

Of all allocations with the best minimum, one is taken that is best in the sum, so that nothing is left unused (the paper's
water filling in one step). T: throughputs, w: weights.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, brentq, milp
from scipy.sparse import coo_array

from icefrog.profile import FloatArray

_SLACK = 1e-7
"""How much of the best minimum may be lost, relatively, while the sum is made best."""


def equal_throughput(throughput: FloatArray, capacity: FloatArray) -> FloatArray:
    """throughput(m, X_equal), shape (M,): on every type for the share of the time that it has of all GPUs."""
    return np.asarray(throughput @ (capacity / capacity.sum()))


def isolated(num_gpus: FloatArray, capacity: FloatArray) -> FloatArray:
    """X_isolated, shape (M, J): each of M jobs has 1/M of every type for itself, and runs no more than all of its time."""
    share = capacity[None, :] / (len(num_gpus) * num_gpus[:, None])
    return np.asarray(share / np.maximum(share.sum(axis=1, keepdims=True), 1.0))


def las_gains(throughput: FloatArray, num_gpus: FloatArray, weight: FloatArray, capacity: FloatArray) -> FloatArray:
    """Gains of max-min fairness, shape (M, J) (section 4.1); 0 on a type that has no GPUs."""
    normal = equal_throughput(throughput, capacity)[:, None]
    there = (throughput > 0.0) & (capacity > 0.0)
    relative = np.divide(throughput, normal, out=np.zeros_like(throughput), where=there)
    return np.asarray(relative * (num_gpus / weight)[:, None])


def max_min(gain: FloatArray, num_gpus: FloatArray, capacity: FloatArray) -> FloatArray:
    """The valid allocation with the largest minimum gain, and the largest sum (relative to each job's best type) of those.

    Args:
        gain: of each job on each type, shape (M, J); 0: it cannot run there.
        num_gpus: GPUs of each job, shape (M,).
        capacity: GPUs of each type, shape (J,).

    Returns:
        X, shape (M, J). Jobs that can run nowhere have a row of zeros and do not count.
    """
    gain = np.where(num_gpus[:, None] <= capacity[None, :], gain, 0.0)
    able = np.flatnonzero(gain.max(axis=1, initial=0.0) > 0.0)
    allocation = np.zeros(gain.shape)
    if able.size == 0:
        return allocation
    types = np.flatnonzero(gain.max(axis=0) > 0.0)
    if types.size == 1:
        allocation[able, types[0]] = water_fill(gain[able, types[0]], num_gpus[able], float(capacity[types[0]]))
        return allocation
    problem = _Problem(gain[able], num_gpus[able], capacity)
    allocation[able] = problem.most_in_sum(problem.best_minimum())
    return allocation


def water_fill(gain: FloatArray, num_gpus: FloatArray, capacity: float) -> FloatArray:
    """Max-min on one type, shape (M,): all rise to one level z of gain, but nobody beyond all of its time.

    X = min(1, z / gain), with the largest z for which sum s X <= capacity.
    """
    if num_gpus.sum() <= capacity:
        return np.ones(len(gain))
    order = np.argsort(gain, kind="stable")  # those with small gains are full first
    full = np.cumsum(num_gpus[order])  # GPUs of the jobs that are full, were the level at each one's gain
    rest = np.cumsum((num_gpus / gain)[order][::-1])[::-1]  # sum s / gain of the jobs from here on
    used = np.concatenate(([0.0], full[:-1])) + gain[order] * rest
    first = int(np.argmax(used > capacity))  # the first that does not become full
    before = full[first - 1] if first else 0.0
    level = (capacity - before) / rest[first]
    return np.asarray(np.minimum(1.0, level / gain))


def finish_time_fair(
    remaining_s: FloatArray, age_s: FloatArray, isolated_s: FloatArray, num_gpus: FloatArray, capacity: FloatArray
) -> tuple[FloatArray, float]:
    """The allocation with the least max_m rho_m = (t_m + time left) / D_m, and that rho.

    Args:
        remaining_s: seconds that each job still needs on each type, were it there all the time, (M, J); inf: it cannot run.
        age_s: t_m, since its submission, (M,).
        isolated_s: D_m, what it would take from submission to end with 1/M of the cluster, (M,).
        num_gpus: GPUs of each job, (M,).
        capacity: GPUs of each type, (J,).
    """
    speed = np.where(num_gpus[:, None] <= capacity[None, :], 1.0 / remaining_s, 0.0)
    able = np.flatnonzero(speed.max(axis=1, initial=0.0) > 0.0)
    allocation = np.zeros(remaining_s.shape)
    if able.size == 0:
        return allocation, 0.0
    speed, age_s, isolated_s, num_gpus = speed[able], age_s[able], isolated_s[able], num_gpus[able]

    def gains(rho: float) -> FloatArray:
        return np.asarray(speed * (rho * isolated_s - age_s)[:, None])

    def excess(rho: float) -> float:
        found = max_min(gains(rho), num_gpus, capacity)
        return float((gains(rho) * found).sum(axis=1).min()) - 1.0

    low = float(((age_s + 1.0 / speed.max(axis=1)) / isolated_s).max())  # nobody can do better than to run all the time
    rho = low
    if excess(low) < -_SLACK:
        high = 2.0 * low
        while excess(high) < 0.0:
            high *= 2.0
        rho = float(brentq(excess, low, high, rtol=1e-6))
    allocation[able] = max_min(gains(rho), num_gpus, capacity)
    return allocation, rho


class _Problem:
    """The two linear programs over the shares of jobs that can run somewhere, and the least gain.

    Gains are taken relative to each job's best type, and the least gain to the smallest of those, so that all numbers lie
    between 0 and 1 however different the jobs are.
    """

    def __init__(self, gain: FloatArray, num_gpus: FloatArray, capacity: FloatArray) -> None:
        self._shape = gain.shape
        best = gain.max(axis=1)
        self._job, self._type = np.nonzero(gain)
        self._worth = (gain / best[:, None])[self._job, self._type]
        self._unit = best.min() / best  # of the least gain, in each job's own scale
        self._gpus = num_gpus[self._job]
        self._capacity = capacity

    def best_minimum(self) -> float:
        """The largest least gain, in units of the smallest best gain."""
        found = self._solve(np.append(np.zeros(len(self._job)), -1.0), free_level=True)
        return float(found[-1])

    def most_in_sum(self, level: float) -> FloatArray:
        """The allocation that reaches that level everywhere and has the largest sum, shape (M, J)."""
        found = self._solve(np.append(-self._worth, 0.0), level=level * (1.0 - _SLACK))
        allocation = np.zeros(self._shape)
        allocation[self._job, self._type] = np.clip(found[:-1], 0.0, 1.0)
        return allocation

    def _solve(self, cost: FloatArray, *, level: float = 0.0, free_level: bool = False) -> FloatArray:
        jobs, types = self._shape
        count = len(self._job)
        each = np.arange(count)
        # Rows: the level of each job, the time of each job, the GPUs of each type. The last column is the level.
        rows = np.concatenate([self._job, self._job + jobs, self._type + 2 * jobs, np.arange(jobs)])
        columns = np.concatenate([each, each, each, np.full(jobs, count)])
        values = np.concatenate([-self._worth, np.ones(count), self._gpus, self._unit])
        limits = np.concatenate([np.zeros(jobs), np.ones(jobs), self._capacity])
        low, high = np.zeros(count + 1), np.ones(count + 1)
        low[count], high[count] = (0.0, math.inf) if free_level else (level, level)
        matrix = coo_array((values, (rows, columns)), shape=(2 * jobs + types, count + 1)).tocsr()
        result = milp(cost, constraints=LinearConstraint(matrix, ub=limits), bounds=Bounds(low, high))
        if result.x is None:
            raise ArithmeticError(f"no allocation found: {result.message}")
        return np.asarray(result.x)
