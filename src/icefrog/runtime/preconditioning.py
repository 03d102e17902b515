"""In what gradients are measured: as they are, or divided by sqrt(v) + eps where the optimizer does so.

Parameters come in lists and each operation runs over a whole list (``torch._foreach_*``, what PyTorch's own optimizers are
made of), so that a network of many small tensors costs few Python calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from icefrog.runtime.shards import local_part

Precondition = Literal["auto", "raw"]
Tensors: TypeAlias = list[torch.Tensor]
_SECOND_MOMENTS = ("max_exp_avg_sq", "exp_avg_sq", "square_avg", "sum")
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
        self._group = {id(param): group for group in optimizer.param_groups for param in group["params"]}
        self._largest_over_ranks = largest_over_ranks

    def scale(self, params: Sequence[torch.Tensor]) -> Scale | None:
        """What gradients of these parameters are divided by; None before the optimizer has state for all of them.

        An element that never had a gradient has v = 0; its first one would weigh 1e8-fold and drown all others for
        hundreds of steps. It is not measured (infinity) until v includes it. Where v is tiny beside the parameter's
        largest, a floor stops the same. The scale is common to all replicas' gradients and their mean, as the estimate
        of a variance needs: cutting each ratio off is not linear, and gave the rare rows of embeddings a variance < 0.
        """
        states = [self.optimizer.state.get(param) or {} for param in params]
        keys = [next((name for name in _SECOND_MOMENTS if name in state), None) for state in states]
        moments = [real(local_part(state[key])) for state, key in zip(states, keys, strict=True) if key is not None]
        if len(moments) < len(states):
            if self._largest_over_ranks is not None:  # no rank waits for this one
                self._largest_over_ranks(torch.zeros(len(states), device=params[0].device))
            return None
        eps, bounds, corrections = [], [], []
        for param, state, key, step in zip(params, states, keys, _steps(states), strict=True):
            group = self._group.get(id(param), {})
            decay = group["betas"][1] if "betas" in group else group.get("alpha", 0.0) if key == "square_avg" else 0.0
            correction = 1.0 - float(decay) ** step if "betas" in group and "step" in state else 1.0
            root = math.sqrt(correction)
            corrections.append(root)
            # Of a parameter whose v is 0 everywhere, eps alone is the divisor: it must not be 0.
            eps.append(max(group.get("eps", 1e-8) * root, 1e-38))
            # The largest |g| / sqrt(v) that the optimizer itself can produce at this step, its v including g.
            bounds.append(math.sqrt(correction / (1.0 - decay)) if decay < 1.0 else math.inf)
        tops = [moment.max() if moment.numel() else moment.new_zeros(()) for moment in moments]
        if self._largest_over_ranks is not None:
            tops = list(self._largest_over_ranks(torch.stack(tops)))
        floors = list(torch._foreach_sqrt(tops))
        torch._foreach_div_(floors, bounds)
        return Scale(moments, eps, floors, corrections)


def _steps(states: Sequence[dict[str, torch.Tensor | float]]) -> list[float]:
    """Steps that the optimizer has counted, with at most one wait for the device; 0 where it counts none."""
    counts = [state.get("step", 0.0) for state in states]
    if all(isinstance(count, torch.Tensor) for count in counts):
        found: list[float] = torch.stack([count.float() for count in counts]).tolist()  # type: ignore[union-attr]
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
