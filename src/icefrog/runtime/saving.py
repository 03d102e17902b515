"""What is in a checkpoint, and the order in which it must be restored: boundary, weights, optimizer, the rest."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, Protocol

from icefrog.errors import UserError
from icefrog.runtime import checkpoint
from icefrog.runtime.deciding import Decider
from icefrog.runtime.engine import Engine
from icefrog.runtime.reporting import Counters

TENSORS = ("statistics", "rule_tensors")
"""What of :func:`pack_own` holds tensors; :func:`unpack` does without, but then some measurements begin anew."""


class Stateful(Protocol):
    """What :meth:`LayerElastic.register` takes: an LR scheduler, an EMA, ..."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Inverse."""
        ...


def pack(
    engine: Engine,
    decider: Decider,
    counters: Counters,
    registered: Mapping[str, Stateful],
    *,
    held_only: bool = False,
) -> dict[str, Any]:
    """Everything needed to go on at any world size and boundary: tensors and plain values.

    Collective where the parallelism is ``sharded``, but not with ``held_only``: what this rank holds of a sharded state.
    """
    spread = engine.parallel
    return {
        **pack_own(engine, decider, counters, held_only=held_only),
        "model": spread.held_model_state() if held_only else spread.model_state(),
        "optimizer": (spread.held_optimizer_state if held_only else spread.optimizer_state)(engine.optimizer),
        "registered": {name: item.state_dict() for name, item in registered.items()},
        "rng": checkpoint.rng_state(),
    }


def pack_own(engine: Engine, decider: Decider, counters: Counters, *, held_only: bool = False) -> dict[str, Any]:
    """What nobody else knows: the boundary, statistics, times, the rule's memory and counters.

    JSON values, but for what is under :data:`TENSORS`.
    """
    names = {id(param): name for name, param in engine.inner.named_parameters()}
    return {
        "schema": 1,
        "frozen_layers": engine.boundary,
        "layers": [layer.name for layer in engine.layers],
        "pieces": [piece.name for piece in engine.pieces],
        "psi": engine.psi,
        "batch": decider.batching.state_dict(),
        "tracker": engine.tracker.state_dict(),
        "profiler": engine.profiler.state_dict(),
        "decider": decider.state_dict(),
        "counters": asdict(counters),
        "statistics": engine.statistics.state_dict(names, held_only=held_only),
        "rule_tensors": decider.tensors(),
    }


def unpack(state: Mapping[str, Any], engine: Engine, decider: Decider, registered: Mapping[str, Stateful]) -> Counters:
    """Collective. Inverse of :func:`pack` or :func:`pack_own`; returns the counters.

    Raises:
        UserError: the state is of a model with other layers, or the optimizer holds other parameters.
    """
    engine.abandon()
    engine.move(0)
    pieces = [piece.name for piece in engine.pieces]
    if state["pieces"] != pieces and sorted(state["pieces"]) == sorted(pieces):
        engine.rebuild(state["pieces"])
    names = [layer.name for layer in engine.layers]
    if names != state["layers"]:
        raise UserError(
            f"the checkpoint has layers {state['layers']}, the model has {names}",
            "resume with the model that wrote it, or start in an empty checkpoint folder",
        )
    engine.move(state["frozen_layers"])
    whole = "model" in state
    if whole:
        engine.parallel.load_model_state(state["model"])
        engine.parallel.load_optimizer_state(engine.optimizer, state["optimizer"])
        for name, item in registered.items():
            if name in state["registered"]:
                item.load_state_dict(state["registered"][name])
        _tell_of_others(state["registered"], registered, engine.world.rank)
    if state["counters"].get("step", 0) > 0:
        engine.order_is_known()
    decider.batching.load_state_dict(state.get("batch"))
    engine.tracker.load_state_dict(state["tracker"])
    if "statistics" in state:
        engine.statistics.load_state_dict(state["statistics"], dict(engine.inner.named_parameters()))
    engine.profiler.load_state_dict(state["profiler"])
    engine.psi = state["psi"]
    engine.renew_cache()
    decider.load_state_dict(state["decider"])
    decider.load_tensors(state.get("rule_tensors", {}))
    if whole:
        rank, every_rng = engine.world.rank, state.get("every_rng", [])
        if len(every_rng) == engine.world.size:
            checkpoint.set_rng_state(every_rng[rank])
        else:
            checkpoint.set_rng_state(state["rng"], rank)
    known = {field.name for field in fields(Counters)}
    return Counters(**{key: value for key, value in state["counters"].items() if key in known})


def _tell_of_others(saved: Mapping[str, Any], registered: Mapping[str, Stateful], rank: int) -> None:
    """Warn of what starts anew beside a job that goes on: a schedule that was not registered, or only since."""
    forgotten, new = sorted(set(saved) - set(registered)), sorted(set(registered) - set(saved))
    if rank == 0 and (forgotten or new):
        what = [f"{name!r} is in the checkpoint and not registered" for name in forgotten]
        what += [f"{name!r} is registered and not in the checkpoint" for name in new]
        warnings.warn(
            f"{'; '.join(what)}: it starts anew (elastic.register() comes before elastic.epochs() or begin())",
            stacklevel=2,
        )
