"""Whether a cache may take the prefix's place in a network, from one forward pass that ran without it.

It may if the rest of the network reads nothing of the prefix but its last output: with that, and zeros in place of all
others, the pass gives the same again. And if the prefix is a fixed function, which one or two outputs do not tell (a branch
may be left out for one batch of ten); but who draws random numbers changes a generator's state.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from icefrog.runtime.tensors import tensors_of


class Trial:
    """A forward pass, from before it begins; the model then runs again as in that pass.

    Args:
        model: whose buffers may change in a pass.
        args: what it is called with.
        kwargs: as above.
    """

    def __init__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self.random = False
        """Whether random numbers were drawn before the prefix's last output."""
        self.args, self.kwargs = args, kwargs
        self._model = model
        self._generators = _generators()
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def prefix_ran(self) -> None:
        """A module of the prefix has run; the last call counts."""
        self.random = not _same(_generators(), self._generators)

    def again(self) -> list[torch.Tensor]:
        """The outputs of one more run, without gradients; generators and buffers are left as they are now."""
        copies = {
            name: buffer.clone() for name, buffer in self._buffers.items()
        }  # backward may need the others untouched
        with torch.no_grad(), generators_kept():
            _set_generators(self._generators)
            return list(tensors_of(functional_call(self._model, copies, self.args, self.kwargs)))


@contextmanager
def generators_kept() -> Iterator[None]:
    """What is drawn inside is drawn again behind it."""
    before = _generators()
    try:
        yield
    finally:
        _set_generators(before)


def all_equal(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor], *, exactly: bool) -> bool:
    """Whether two runs gave the same.

    Args:
        one: outputs.
        other: as above.
        exactly: on the CPU, to the bit; else (and on a GPU, some of whose kernels add in another order) to rounding.
    """
    return len(one) == len(other) and all(_equal(a, b, exactly=exactly) for a, b in zip(one, other, strict=True))


def _equal(a: torch.Tensor, b: torch.Tensor, *, exactly: bool) -> bool:
    if a.shape != b.shape:
        return False
    if (exactly and a.device.type == "cpu") or not a.is_floating_point():
        return torch.equal(a, b) or bool(torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True))
    half = a.element_size() < 4 or torch.is_autocast_enabled(a.device.type)
    rtol, of_largest = (3e-2, 3e-2) if half else (1e-3, 1e-5)
    largest = float(a.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()) if a.numel() else 0.0
    return bool(torch.allclose(a, b, rtol=rtol, atol=of_largest * max(largest, 1.0), equal_nan=True))


def _generators() -> tuple[Any, ...]:
    """States of torch's, CUDA's, numpy's (global) and Python's generators."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return torch.get_rng_state(), cuda, np.random.get_state(), random.getstate()  # noqa: NPY002 - users draw from it


def _set_generators(states: tuple[Any, ...]) -> None:
    torchs, cudas, numpys, pythons = states
    torch.set_rng_state(torchs)
    if cudas is not None:
        torch.cuda.set_rng_state(cudas)
    np.random.set_state(numpys)  # noqa: NPY002
    random.setstate(pythons)


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    (torch_a, cuda_a, numpy_a, python_a), (torch_b, cuda_b, numpy_b, python_b) = one, other
    cuda = cuda_a is cuda_b is None or torch.equal(cuda_a, cuda_b)
    numpys = np.array_equal(numpy_a[1], numpy_b[1]) and numpy_a[2:] == numpy_b[2:]
    return cuda and torch.equal(torch_a, torch_b) and numpys and bool(python_a == python_b)
