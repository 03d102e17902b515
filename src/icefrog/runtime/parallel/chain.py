"""Cuts a model that is a chain of modules, each called on the output of the one before, into pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import nn

from icefrog.errors import UserError
from icefrog.estimate.stages import balanced_split
from icefrog.runtime.layers import Layer


@dataclass(frozen=True)
class Link:
    """One call of the chain. ``first`` and ``last`` are the layers (indices) whose parameters it uses.

    A link without trainable parameters counts to the layer after it (behind the last layer: to the last), as in
    :mod:`icefrog.runtime.layers`, so ``first == last`` there.
    """

    name: str
    module: nn.Module
    first: int
    last: int


@dataclass(frozen=True)
class StageSpan:
    """One stage: links ``[start, stop)`` of the chain, layers ``[first_layer, end_layer)``."""

    start: int
    stop: int
    first_layer: int
    end_layer: int

    def trains(self, frozen_layers: int) -> bool:
        """Whether some layer of the stage trains, so that it runs a backward pass (and so does every stage after it)."""
        return frozen_layers < self.end_layer


def find_links(model: nn.Module, layers: Sequence[Layer]) -> list[Link]:
    """The chain, in the order of calls. A Sequential that spans several layers is opened, anything else is one link.

    Raises:
        UserError: the model is not a Sequential, or its order is not that of the layers.
    """
    if not _opens(model):
        raise UserError(
            f"a pipeline needs a chain of layers, each called on the output of the one before; {type(model).__name__} has "
            "a forward of its own",
            "write the model as nn.Sequential of its layers (nested ones are fine), or use data parallelism",
        )
    owner = {id(param): index for index, layer in enumerate(layers) for param in layer.params.values()}
    found = [
        (name, module, sorted({owner[id(p)] for p in module.parameters() if id(p) in owner}))
        for name, module in _walk("", model, owner)
    ]
    links: list[Link] = []
    following = len(layers) - 1
    for name, module, used in reversed(found):
        first, last = (used[0], used[-1]) if used else (following, following)
        following = first
        links.append(Link(name, module, first, last))
    return links[::-1]


def _opens(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and len(module) > 0


def _walk(name: str, module: nn.Module, owner: dict[int, int]) -> Iterator[tuple[str, nn.Module]]:
    several = len({owner[id(param)] for param in module.parameters() if id(param) in owner}) > 1
    if not _opens(module) or (name and not several):
        yield name, module
        return
    # Not ``named_children``: a module that stands twice in the chain is called twice.
    for key, child in module._modules.items():
        if child is not None:
            yield from _walk(f"{name}.{key}" if name else key, child, owner)


def cuts(links: Sequence[Link]) -> list[int]:
    """Where a stage may begin: indices of links with all earlier layers before them, and no parameter on both sides."""
    params = [{id(tensor) for tensor in (*link.module.parameters(), *link.module.buffers())} for link in links]
    possible = []
    for at in range(1, len(links)):
        before = max(link.last for link in links[:at])
        after = min(link.first for link in links[at:])
        if before < after and not set().union(*params[:at]) & set().union(*params[at:]):
            possible.append(at)
    return possible


def split(
    links: Sequence[Link],
    num_layers: int,
    num_stages: int,
    layer_costs: Sequence[float],
    first_layers: Sequence[int] | None = None,
) -> list[StageSpan]:
    """Stages in forward order, the dearest as cheap as possible.

    Args:
        links: the chain.
        num_layers: L.
        num_stages: p.
        layer_costs: of each layer, in any unit (FLOPs, bytes, seconds), shape (L,).
        first_layers: the first layer of each stage but the first, to say where the cuts are.

    Raises:
        UserError: the chain has too few places to cut, or none where ``first_layers`` wants one.
    """
    begins = {links[at].first: at for at in cuts(links)}
    if first_layers is not None:
        if len(first_layers) != num_stages - 1 or any(layer not in begins for layer in first_layers):
            raise UserError(
                f"stages cannot begin at layers {list(first_layers)}",
                f"give {num_stages - 1} of {sorted(begins)}: the first layer of each stage but the first",
            )
        chosen = sorted(set(first_layers))
    else:
        if len(begins) < num_stages - 1:
            raise UserError(
                f"the model can be cut into {len(begins) + 1} stages at most, not {num_stages}",
                "use fewer stages; a weight that two layers share keeps both, and all between them, in one stage",
            )
        chosen = _balanced(sorted(begins), num_layers, num_stages, layer_costs)
    if len(chosen) != num_stages - 1:
        raise UserError(f"stages begin twice at one layer: {list(first_layers or ())}", "give different layers")
    starts = [0, *(begins[layer] for layer in chosen), len(links)]
    edges = [0, *chosen, num_layers]
    return [StageSpan(starts[i], starts[i + 1], edges[i], edges[i + 1]) for i in range(num_stages)]


def _balanced(places: Sequence[int], num_layers: int, num_stages: int, layer_costs: Sequence[float]) -> list[int]:
    """The ``num_stages - 1`` places whose dearest stage costs least; what lies between two places stays together."""
    edges = [0, *places, num_layers]
    runs = [sum(layer_costs[begin:end]) for begin, end in pairwise(edges)]
    counts = balanced_split(runs, num_stages)
    return [edges[cut] for cut in accumulate(counts[:-1])]


def release(modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """Free what other stages hold: parameters and buffers become meta tensors, which keep names, shapes and identity.

    So the optimizer's groups stay what they are; without a gradient it leaves such a parameter alone. Call it before
    anything is hooked to the parameters.
    """
    for module in modules:
        for child in module.modules():
            for param in child.parameters(recurse=False):
                optimizer.state.pop(param, None)  # Adagrad makes it beforehand
                param.grad = None
                empty = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
                torch.utils.swap_tensors(param, empty)  # type: ignore[no-untyped-call]
            for name, buffer in child.named_buffers(recurse=False):
                child._buffers[name] = torch.empty_like(buffer, device="meta")
