"""An optimizer's state by parameter name, so that it survives another order of parameters and another number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from icefrog.errors import UserError


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, *, whole: bool = True) -> dict[str, Any]:
    """The optimizer's state with parameter names in place of positions.

    Parameters that are not of the model (a learned loss weight) are named by group and position. Optimizers that it holds
    (SAM, Lookahead) are under ``inner``, by attribute, where their state is not its own and ``whole`` (not of a shard).
    """
    names = _names(model, optimizer)
    packed = optimizer.state_dict()
    groups = []
    for group, live in zip(packed["param_groups"], optimizer.param_groups, strict=True):
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append({**settings, "params": [names[id(param)] for param in live["params"]]})
    by_index = dict(_indexed(packed, optimizer))
    state = {names[id(param)]: packed["state"][index] for index, param in by_index.items() if index in packed["state"]}
    found = {"kind": type(optimizer).__name__, "groups": groups, "state": state}
    inner = {name: optimizer_state(model, held) for name, held in _inner(optimizer)} if whole else {}
    return {**found, "inner": inner} if inner else found


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Restore by name, whatever the order of parameters in the groups is now.

    Raises:
        UserError: the groups hold other parameters than when it was saved, or it was another kind of optimizer.
    """
    names = _names(model, optimizer)
    now = [{names[id(param)] for param in group["params"]} for group in optimizer.param_groups]
    then = [set(group["params"]) for group in saved["groups"]]
    if now != then:
        odd = sorted(set().union(*now) ^ set().union(*then))
        what = f"{', '.join(odd[:5])}" if odd else "the same parameters in other groups"
        raise UserError(
            f"the optimizer's parameter groups differ from the checkpoint's: {what}",
            "build the optimizer as in the run that wrote the checkpoint, or start in an empty checkpoint folder",
        )
    kind = type(optimizer).__name__
    if saved.get("kind", kind) != kind:  # Adam and AdamW have the same settings and state, and train otherwise
        raise UserError(
            f"the checkpoint is of another kind of optimizer: {saved['kind']}, not {kind}",
            "build the optimizer as in the run that wrote the checkpoint, or start in an empty checkpoint folder",
        )
    lacking = sorted(set(optimizer.defaults).difference(*saved["groups"]))
    if lacking:
        raise UserError(
            f"the checkpoint is of another kind of optimizer: this {kind} wants {', '.join(lacking)}",
            "build the optimizer as in the run that wrote the checkpoint, or start in an empty checkpoint folder",
        )
    packed = optimizer.state_dict()
    groups = [
        {**{key: value for key, value in old.items() if key != "params"}, "params": group["params"]}
        for old, group in zip(saved["groups"], packed["param_groups"], strict=True)
    ]
    # Copies: PyTorch takes the tensors themselves, the optimizer would change them, and a state may be loaded twice.
    state = {
        index: {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in saved["state"][names[id(param)]].items()
        }
        for index, param in _indexed(packed, optimizer)
        if names[id(param)] in saved["state"]
    }
    inner = dict(_inner(optimizer))
    sharing = [held for held in inner.values() if held.param_groups is optimizer.param_groups]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for name, held in inner.items():
        if name in saved.get("inner", {}):
            load_optimizer_state(model, held, saved["inner"][name])
        if held in sharing:  # loading makes new groups, and a schedule would reach one of the two only
            held.param_groups = optimizer.param_groups


def refuse_inner(optimizer: torch.optim.Optimizer) -> None:
    """Where a rank holds a part of the model: the state of an optimizer inside another would not be in checkpoints.

    Raises:
        UserError: it holds one with a state of its own (SAM, Lookahead).
    """
    if names := [name for name, _ in _inner(optimizer)]:
        raise UserError(
            f"{type(optimizer).__name__} holds another optimizer ({', '.join(names)}), and a rank a part of the model only",
            "use data parallelism (parallel='ddp'), or an optimizer that holds none",
        )


def _inner(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """The optimizers that it holds, with a state of their own."""
    for name, held in vars(optimizer).items():
        if isinstance(held, torch.optim.Optimizer) and held is not optimizer and held.state is not optimizer.state:
            yield name, held


def _indexed(packed: dict[str, Any], optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, torch.Tensor]]:
    for group, live in zip(packed["param_groups"], optimizer.param_groups, strict=True):
        yield from zip(group["params"], live["params"], strict=True)


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    names = {id(param): name for name, param in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            names.setdefault(id(param), f"extra.{number}.{position}")
    return names
