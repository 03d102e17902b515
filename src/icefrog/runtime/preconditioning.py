"""In what gradients are measured: as they are, or divided by sqrt(v) + eps where the optimizer does so.

Parameters come in lists and each operation runs over a whole list (``torch._foreach_*``, what PyTorch's own optimizers are
made of), so that a network of many small tensors costs few Python calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from icefrog.runtime.shards import local_part

Precondition = Literal["auto", "raw"]
Tensors: TypeAlias = list[torch.Tensor]
_SECOND_MOMENTS = ("max_exp_avg_sq", "exp_avg_sq", "square_avg", "sum", "variance")
_FACTORS = (("row_var", "col_var"), ("exp_avg_sq_row", "exp_avg_sq_col"))
"""Adafactor's, in PyTorch and in transformers: of a matrix v is the outer product of two means, over the mean of either."""
_BLOCK = 65536
"""Elements that pass through all operations together on a CPU: they stay in its cache."""


@dataclass(frozen=True, slots=True)
class Scale:
    """What the gradients of some parameters are divided by, not computed yet: max(sqrt(v) + eps, floor), infinite at v = 0.

    ``moments``, ``eps`` and ``floors`` are those before the optimizer's bias correction c of v; :attr:`corrections` has its
    inverse square root, by which a quotient is still to be multiplied.
    """

    moments: Tensors
    eps: list[float]
    floors: Tensors
    corrections: list[float]

    def by_element(self) -> Tensors:
        """One tensor a parameter."""
        return _divisors(self.moments, self.eps, self.floors)


def _divisors(moments: Tensors, eps: list[float], floors: Tensors) -> Tensors:
    found = torch._foreach_sqrt(moments)
    torch._foreach_add_(found, eps)
    torch._foreach_maximum_(found, floors)
    torch._foreach_div_(found, torch._foreach_sign(moments))  # an element without history: x / 0
    return list(found)


class Preconditioner:
    """1 / (sqrt(v) + eps) by parameter, read from the optimizer's state.

    Args:
        optimizer: the state is looked at, never changed.
        mode: ``auto``: preconditioned where the optimizer keeps second moments; ``raw``: never.
        largest_over_ranks: of one number a parameter, where each rank holds a part of it.

    Attributes:
        active: gradients are divided. With the first state it may turn out that the optimizer keeps what we cannot read
            (8-bit moments, a Hessian's diagonal); gradients are then taken as they are, all of them, from there on.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        mode: Precondition,
        largest_over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.optimizer = optimizer
        adaptive = any(word in type(optimizer).__name__.lower() for word in ("ada", "rms", "lamb"))
        self.active = mode == "auto" and adaptive and not isinstance(optimizer, torch.optim.Adadelta)
        self._known = False  # the optimizer has state, and it is of a kind that we know
        self._group = {id(param): group for group in optimizer.param_groups for param in group["params"]}
        self._largest_over_ranks = largest_over_ranks

    def scale(self, params: Sequence[torch.Tensor]) -> Scale | Literal[False] | None:
        """What gradients of these parameters are divided by; None before the optimizer has state for all of them.

        An element that never had a gradient has v = 0; its first one would weigh 1e8-fold and drown all others for
        hundreds of steps. It is not measured (infinity) until v includes it. Where v is tiny beside the parameter's
        largest, a floor stops the same. The scale is common to all replicas' gradients and their mean, as the estimate
        of a variance needs: cutting each ratio off is not linear, and gave the rare rows of embeddings a variance < 0.

        Returns:
            False: gradients are not divided.
        """
        if not self.active or not self._look():
            return False
        states = [self.optimizer.state.get(param) or {} for param in params]
        steps = _steps(states)
        # Adagrad has a state before its first step, of zeros.
        if not all(states) or any(step == 0 and "step" in state for step, state in zip(steps, states, strict=True)):
            if self._largest_over_ranks is not None:  # no rank waits for this one
                self._largest_over_ranks(torch.zeros(len(states), device=params[0].device))
            return None
        groups = [self._group.get(id(param), {}) for param in params]
        found = [_moment(*each) for each in zip(states, groups, steps, strict=True)]
        moments = [moment.v for moment in found]
        corrections = [math.sqrt(moment.correction) for moment in found]
        # Of a parameter whose v is 0 everywhere, eps alone is the divisor: it must not be 0.
        eps = [max(moment.eps * root, 1e-38) for moment, root in zip(found, corrections, strict=True)]
        # The largest |g| / sqrt(v) that the optimizer itself can produce at this step, its v including g.
        bounds = [math.sqrt(of.correction / (1.0 - of.decay)) if of.decay < 1.0 else math.inf for of in found]
        tops = [moment.max() if moment.numel() else moment.new_zeros(()) for moment in moments]
        if self._largest_over_ranks is not None:
            tops = list(self._largest_over_ranks(torch.stack(tops)))
        floors = list(torch._foreach_sqrt(tops))
        torch._foreach_div_(floors, bounds)
        return Scale(moments, eps, floors, corrections)

    def _look(self) -> bool:
        """Whether gradients can be divided, as far as is known."""
        if not self._known:
            states = [state for state in self.optimizer.state.values() if state]
            self._known = bool(states)
            self.active = all(_is_known(state) for state in states)
        return self.active


class _Moment(NamedTuple):
    """Of one parameter."""

    v: torch.Tensor
    eps: float
    decay: float
    """Share of v that is left after a step."""
    correction: float
    """By which v is divided to be free of its start at 0."""


def _is_known(state: Mapping[str, Any]) -> bool:
    keys = [*((name,) for name in _SECOND_MOMENTS), ("exp_inf",), *_FACTORS]
    return any(all(isinstance(state.get(name), torch.Tensor) for name in names) for names in keys)


def _moment(state: Mapping[str, Any], group: Mapping[str, Any], step: float) -> _Moment:
    def held(name: str) -> torch.Tensor:
        return real(local_part(state[name]))

    eps = group.get("eps", 1e-8)
    decay = float(group["betas"][1]) if "betas" in group else 0.0
    if "exp_inf" in state:  # Adamax: the largest |g| there was, decaying, eps included
        return _Moment((held("exp_inf") - eps).clamp_(min=0.0).square_(), eps, decay, 1.0)
    if isinstance(eps, tuple | list):  # Adafactor: its first eps is a floor, its memory grows with the steps
        eps = eps[0] if eps[0] is not None else torch.finfo(torch.float32).eps
        decay = 1.0 - max(step, 1.0) ** float(group.get("beta2_decay", group.get("decay_rate", -0.8)))
    for over_columns, over_rows in _FACTORS:
        if isinstance(state.get(over_columns), torch.Tensor):
            rows, columns = held(over_columns), held(over_rows)
            if over_columns != "row_var":  # kept without the dimension of length 1
                rows, columns = rows.unsqueeze(-1), columns.unsqueeze(-2)
            return _Moment(rows @ columns / rows.mean(dim=-2, keepdim=True).clamp_(min=1e-38), eps, decay, 1.0)
    name = next(name for name in _SECOND_MOMENTS if name in state)
    if name == "square_avg":
        decay = float(group.get("alpha", 0.0))
    if name == "sum":  # Adagrad: the mean of all g^2 so far, but for a factor that is common to all elements
        decay = 1.0 - 1.0 / max(step, 1.0)
    correction = 1.0 - decay**step if "betas" in group and "step" in state else 1.0
    return _Moment(held(name), eps, decay, correction)


def _steps(states: Sequence[Mapping[str, Any]]) -> list[float]:
    """Steps that the optimizer has counted, with at most one wait for the device; 0 where it counts none."""
    counts = [state.get("step", 0.0) for state in states]
    if all(isinstance(count, torch.Tensor) for count in counts):
        found: list[float] = torch.stack([count.float() for count in counts]).tolist()
        return found
    return [float(count) for count in counts]


def sqr_norms(grads: Sequence[torch.Tensor], scale: Scale | None, divisors: Tensors | None = None) -> torch.Tensor:
    """|g / s|^2 by parameter, shape (P,), of real gradients.

    Args:
        grads: by parameter.
        scale: s; None: 1.
        divisors: ``scale.by_element()`` if that is known already.
    """
    if scale is not None:
        grads = torch._foreach_div(list(grads), divisors if divisors is not None else scale.by_element())
    return _sqr(torch._foreach_norm(list(grads)), scale)


def successive(now: Tensors, last: Tensors, scale: Scale | None) -> torch.Tensor:
    """|(a - b) / s|^2 and (a / s) . (b / s) by parameter, shape (2, P), of real gradients a and b.

    By 4 a . b = |a + b|^2 - |a - b|^2: two norms. In blocks, and so that the gradients pass through the cache once.

    Args:
        now: a.
        last: b.
        scale: s; None: 1.
    """
    where: list[int] = []
    minus: Tensors = []
    plus: Tensors = []
    for rows, (a, b, moments) in _blocks(now, last, now if scale is None else scale.moments):
        both = [list(torch._foreach_sub(a, b)), list(torch._foreach_add(a, b))]
        if scale is not None:
            divisors = _divisors(moments, [scale.eps[i] for i in rows], [scale.floors[i] for i in rows])
            for values in both:
                torch._foreach_div_(values, divisors)
        where += rows
        minus += torch._foreach_norm(both[0])
        plus += torch._foreach_norm(both[1])
    found = torch.stack([_wide_stack(minus), _wide_stack(plus)]).square()
    sums = found.new_zeros(2, len(now)).index_add_(1, torch.tensor(where, device=found.device), found)
    if scale is not None:
        sums *= sums.new_tensor(scale.corrections).square()
    return torch.stack([sums[0], (sums[1] - sums[0]) / 4.0])


def real(tensor: torch.Tensor) -> torch.Tensor:
    """As real numbers of at least 32 bits, dense: sums of squares need them."""
    plain = tensor.to_dense() if tensor.is_sparse else tensor
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    return plain if plain.dtype in (torch.float32, torch.float64) else plain.to(torch.float32)


def _sqr(norms: Sequence[torch.Tensor], scale: Scale | None) -> torch.Tensor:
    found = _wide_stack(norms).square()
    return found if scale is None else found * found.new_tensor(scale.corrections).square()


def _wide_stack(values: Sequence[torch.Tensor]) -> torch.Tensor:
    if len({value.dtype for value in values}) > 1:
        values = [value.double() for value in values]
    return torch.stack(list(values)).double()


def _blocks(*operands: Tensors) -> Iterator[tuple[list[int], tuple[Tensors, ...]]]:
    """(places, the operands' parts) of lists of tensors, of equal shapes at equal places; a part is whole, or flat.

    Each block has about ``_BLOCK`` elements on a CPU; elsewhere one has all.
    """
    first = operands[0]
    if not first or first[0].device.type != "cpu":
        yield list(range(len(first))), operands
        return
    rows: list[int] = []
    parts: tuple[Tensors, ...] = tuple([] for _ in operands)
    held = 0
    for row, tensors in enumerate(zip(*operands, strict=True)):
        cut = tensors[0].numel() > _BLOCK and all(tensor.is_contiguous() for tensor in tensors)
        pieces = zip(*(tensor.view(-1).split(_BLOCK) for tensor in tensors), strict=True) if cut else (tensors,)
        for piece in pieces:
            if held and held + piece[0].numel() > _BLOCK:
                yield rows, parts
                rows, parts, held = [], tuple([] for _ in operands), 0
            rows.append(row)
            held += piece[0].numel()
            for kept, tensor in zip(parts, piece, strict=True):
                kept.append(tensor)
    yield rows, parts
