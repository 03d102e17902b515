"""Models that cannot be made layer-elastic as they are given, said before anything is changed on them."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from icefrog.errors import UserError
from icefrog.runtime.hook_owner import HookOwner


def refuse_model(model: nn.Module) -> None:
    """Look at a model before it is taken.

    Raises:
        UserError: it is wrapped (the wrapper could not follow the boundary), it has lazy modules that have not run yet, or
            it is another LayerElastic's (the two would open and freeze each other's layers).
    """
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise UserError(
            f"LayerElastic takes the plain model, not {type(model).__name__}",
            "give it model.module and use elastic.model, which is data-parallel under torchrun",
        )
    plain = getattr(model, "_orig_mod", model)  # of torch.compile(model)
    lazy = [name for name, param in plain.named_parameters() if is_lazy(param)]
    if lazy:
        raise UserError(
            f"the shapes of {', '.join(lazy[:5])} are not known yet (lazy modules)",
            "call model(x) on one batch before LayerElastic is made",
        )
    owners = [getattr(hook, "__self__", None) for hook in plain._forward_pre_hooks.values()]
    # A copy of a model has the hooks of the original's owner.
    if any(isinstance(owner, HookOwner) and getattr(owner, "inner", None) is plain for owner in owners):
        raise UserError(
            "the model belongs to another LayerElastic already",
            "call close() on that one first, or make model and optimizer anew (re-running a notebook's cell, too); where "
            "several optimizers train one model, give LayerElastic the one that trains most of it",
        )
