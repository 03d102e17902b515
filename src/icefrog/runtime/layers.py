"""Finds the freezable units of a model, in forward order.

A *layer* holds at least one trainable parameter; the layers are a partition of the trainable parameters. Modules without
trainable parameters join the next layer; a normalisation layer joins the one before it, whose output it normalises. A
parameter that several modules use (found by storage) belongs to the last layer that uses it, and a module that is called
several times stands where its last call is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from icefrog.errors import UserError

_NORMS: tuple[type[nn.Module], ...] = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_CONTAINERS: tuple[type[nn.Module], ...] = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_BIG_SHARE = 0.5


@dataclass
class Layer:
    """One freezable unit: ``modules`` are the roots of its subtrees, ``params`` its trainable parameters by name."""

    name: str
    modules: list[nn.Module] = field(default_factory=list)
    params: dict[str, nn.Parameter] = field(default_factory=dict)

    @property
    def param_bytes(self) -> int:
        """Bytes of the trainable parameters."""
        return sum(param.numel() * param.element_size() for param in self.params.values())

    def submodules(self) -> Iterator[nn.Module]:
        """Every module of the layer, each once."""
        seen: set[int] = set()
        for root in self.modules:
            for module in root.modules():
                if id(module) not in seen:
                    seen.add(id(module))
                    yield module


@dataclass
class Piece:
    """The smallest thing that is moved between layers: one leaf module or block, and loose parameters of its parents."""

    name: str
    module: nn.Module
    params: dict[str, nn.Parameter]


def find_pieces(model: nn.Module) -> list[Piece]:
    """The model cut into leaves and blocks, in registration order.

    A block is a module inside a Sequential, ModuleList or ModuleDict (a residual or transformer block), or a module that
    holds no such stack. A block with over half of all parameters and a stack inside is cut further.
    """
    total = sum(param.numel() for param in model.parameters())
    pieces: list[Piece] = []
    _cut("", model, False, total, {}, pieces)
    return pieces


def _cut(
    name: str,
    module: nn.Module,
    in_stack: bool,
    total: int,
    loose: dict[str, nn.Parameter],
    pieces: list[Piece],
) -> None:
    children = list(module.named_children())
    stack = isinstance(module, _CONTAINERS)
    big = sum(param.numel() for param in module.parameters()) > _BIG_SHARE * total
    open_up = children and (name == "" or stack or (_has_stack(module) and (not in_stack or big)))
    if not open_up:
        own = {_join(name, key): param for key, param in module.named_parameters(remove_duplicate=False)}
        pieces.append(Piece(name, module, loose | own))
        return
    own = {_join(name, key): param for key, param in module.named_parameters(recurse=False)}
    loose = loose | own  # they go with the first piece below: usually added to the input of the first block
    for key, child in children:
        before = len(pieces)
        _cut(_join(name, key), child, stack, total, loose, pieces)
        if len(pieces) > before:
            loose = {}


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _has_stack(module: nn.Module) -> bool:
    """Whether some Sequential, ModuleList or ModuleDict below has two children with parameters."""
    return any(
        isinstance(inner, _CONTAINERS) and sum(any(True for _ in child.parameters()) for child in inner.children()) >= 2
        for inner in module.modules()
    )


def group_pieces(model: nn.Module, pieces: Sequence[Piece]) -> list[Layer]:
    """Pieces in forward order -> layers.

    Raises:
        UserError: the model has no trainable parameter.
    """
    owner = _owners(model, [piece.params for piece in pieces])
    layers: list[Layer] = []
    waiting: list[nn.Module] = []
    for index, piece in enumerate(pieces):
        params = {name: param for name, param in owner.items() if param[0] == index}
        trainable = {name: param for name, (_, param) in params.items()}
        if not trainable:
            waiting.append(piece.module)
            continue
        if layers and isinstance(piece.module, _NORMS):
            layer = layers[-1]
        else:
            layer = Layer(piece.name)
            layers.append(layer)
        layer.modules += [*waiting, piece.module]
        layer.params.update(trainable)
        waiting = []
    if not layers:
        raise UserError(
            "the model has no trainable parameter",
            "set requires_grad=True on what should be trained before LayerElastic",
        )
    layers[-1].modules += waiting
    return layers


def _owners(model: nn.Module, uses: Sequence[dict[str, nn.Parameter]]) -> dict[str, tuple[int, nn.Parameter]]:
    """Canonical name of each trainable parameter -> (index of the last piece that uses its storage, the parameter)."""
    last: dict[object, int] = {}
    for index, params in enumerate(uses):
        for param in params.values():
            last[_storage_key(param)] = index
    return {
        name: (last[_storage_key(param)], param)
        for name, param in model.named_parameters()
        if param.requires_grad and _storage_key(param) in last
    }


def _storage_key(param: nn.Parameter) -> object:
    """Equal for parameters that share memory; the object itself where there is none (meta, empty)."""
    try:
        pointer = param.data_ptr()
    except RuntimeError:  # fake or functional tensors
        pointer = 0
    return (param.device, pointer) if pointer and param.numel() else id(param)


def layers_from_user(model: nn.Module, given: Sequence[nn.Module | str | Sequence[nn.Module | str]]) -> list[Layer]:
    """Layers as the user lists them in forward order: modules, names, or lists of modules for one layer.

    Trainable parameters outside every given layer join the next given one in registration order (the last one at the end).

    Raises:
        UserError: a name that does not exist, a module of another model, or a layer without a trainable parameter.
    """
    names = {id(module): name for name, module in model.named_modules()}
    by_name = dict(model.named_modules())
    roots = [_as_modules(item, by_name) for item in given]
    position: dict[int, int] = {}
    for index, modules in enumerate(roots):
        for root in modules:
            if id(root) not in names:
                raise UserError(f"layer {index} is not a module of this model", "list modules of the model itself")
            for module in root.modules():
                position[id(module)] = index
    uses: list[dict[str, nn.Parameter]] = [{} for _ in roots]
    extra: list[list[nn.Module]] = [[] for _ in roots]
    current = len(roots) - 1
    for name, module in reversed(list(model.named_modules())):
        own = dict(module.named_parameters(recurse=False))
        current = position.get(id(module), current)
        uses[current].update({_join(name, key): param for key, param in own.items()})
        if id(module) not in position and not list(module.children()):
            extra[current].append(module)
    owner = _owners(model, uses)
    layers = []
    for index, modules in enumerate(roots):
        params = {name: param for name, (where, param) in owner.items() if where == index}
        name = names[id(modules[0])]
        if not params:
            raise UserError(
                f"layer {name!r} has no trainable parameter of its own",
                "leave it out: it joins the next layer; tied parameters belong to the last layer that uses them",
            )
        layers.append(Layer(name, [*extra[index], *modules], params))
    return layers


def _as_modules(item: nn.Module | str | Sequence[nn.Module | str], by_name: dict[str, nn.Module]) -> list[nn.Module]:
    if isinstance(item, str):
        if item not in by_name:
            raise UserError(f"the model has no module named {item!r}", f"names are: {', '.join(by_name)[:300]}")
        return [by_name[item]]
    return [item] if isinstance(item, nn.Module) else [root for part in item for root in _as_modules(part, by_name)]


def forward_order(pieces: Sequence[Piece], called: Sequence[int]) -> list[Piece]:
    """Pieces sorted by their last call; one that was not called keeps its place behind its predecessor.

    Args:
        pieces: in registration order.
        called: indices of pieces in the order of their last call.
    """
    rank = {index: position for position, index in enumerate(called)}
    keys: list[tuple[int, int]] = []
    previous = -1
    for index in range(len(pieces)):
        previous = rank.get(index, previous)
        keys.append((previous, index))
    return [pieces[index] for _, index in sorted(keys)]
