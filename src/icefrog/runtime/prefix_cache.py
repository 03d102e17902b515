"""The frozen prefix's outputs, computed once (an extension of the paper; section 5, *frozen-prefix cache*).

A frozen prefix is a fixed function, so its output for a sample that was seen before need not be computed again. The cache is
*content-addressed*: its key is a 128-bit hash of everything that the model is called with, row by row. So it needs to know
nothing of samplers, shuffling or resizes, and a sample that is augmented anew each epoch simply never hits. Of a batch
that was seen in part, the prefix computes the other rows only: a boundary that moves in mid-pass meets its first samples
again in every batch of the next.

On a hit the modules of the prefix do not run: they hand on zeros of the right shape, and the one that finishes last hands
on the cached rows. That is right only if everything that the rest of the network reads of the prefix comes through that
last output, and if the prefix is a fixed function of each row by itself. So behind the first forward pass at a boundary the
rest of the network runs once more on what the prefix handed on there (:mod:`icefrog.runtime.prefix_trial`), and the prefix
on some of the rows; and before the first use of a kind of input one batch is run both ways. Unless the results are equal, no
random number was drawn and nothing that trains ran before that last output, the cache stays off.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from icefrog.runtime.compiled import CompiledForward
from icefrog.runtime.freezing import Freezer
from icefrog.runtime.hook_owner import HookOwner
from icefrog.runtime.prefix_trial import Trial, all_equal, generators_kept
from icefrog.runtime.rows import UnsupportedError, by_row, leaves, pack, row_keys, take_rows, template, unpack, zeros
from icefrog.runtime.rowstore import Key, RowStore
from icefrog.runtime.tensors import tensors_of, wants_gradient

_TRIAL_ROWS = 4096
"""Rows looked up without one hit, after a whole store of them was written, before the cache gives up."""


def cache_folder(where: str, job_folder: Path | None) -> Path:
    """Where the rows go: in memory (shared between processes), or on the disk that holds the job's checkpoints.

    A job's folder decides the name, so that a restarted job finds what it wrote before.

    """
    shared = Path("/dev/shm")
    temporary = shared if where == "memory" and shared.is_dir() else Path(tempfile.gettempdir())
    if job_folder is None:
        return temporary / f"icefrog-prefix-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    if where == "disk":
        return job_folder / "prefix-cache"
    name = hashlib.sha256(str(job_folder.resolve()).encode()).hexdigest()[:16]
    return temporary / f"icefrog-prefix-{name}"


class PrefixCache(HookOwner):
    """Caches the output of the frozen prefix of one model in one process.

    Args:
        model: unwrapped.
        freezer: whose boundary holds now.
        folder: for the rows; several ranks of one machine may share it.
        budget_bytes: most bytes that this process writes.
    """

    def __init__(self, model: nn.Module, freezer: Callable[[], Freezer], folder: Path, budget_bytes: float) -> None:
        self.model = model
        self._freezer = freezer
        self.folder = folder
        self.budget_bytes = budget_bytes
        self.off_reason = "nothing is frozen"
        """Why it is not in use; empty while it is."""
        self.hits = 0
        """Training forwards taken from the cache since the boundary moved."""
        self.misses = 0
        self.hit = False
        """Whether the forward pass in progress, or the last one, was taken from the cache."""
        self.used = False
        """Whether a forward pass was taken from the cache since this was last set to False."""
        self._store: RowStore | None = None
        self._kind = ""
        self._depth = 0
        self._watched: list[torch.Tensor] = []
        self._versions = -1
        self._stale = True
        self._roots: list[nn.Module] = []
        self._last: nn.Module | None = None
        self._calls: list[nn.Module] = []
        self._input = ("", 0)  # kind and rows of the forward pass in progress
        self._outputs: dict[nn.Module, Any] = {}  # its roots' output templates
        self._shapes: dict[tuple[str, int], dict[nn.Module, Any]] = {}  # the same of earlier ones
        self._structure: Any = None  # of one row of the last output
        self._trial: Trial | None = None  # of the forward pass in progress
        self._tried = False
        self._alone = False  # rows were shown not to depend on each other
        self._verified: set[str] = set()  # kinds of input
        self._inside = False  # a verification is running, or the prefix alone
        self._filling = False  # the prefix alone is running
        self._filled = False  # rows were computed in smaller batches: equal to rounding, not to the bit
        self._keys: list[Key] = []
        self._batch = 0
        self._own_forward: dict[nn.Module, Callable[..., Any]] = {}
        self._looked_up = 0
        self._refresh_at = 1
        self._captured: list[torch.Tensor] = []  # copies of the last output's tensors: what follows may work in place
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._after, always_call=True),
        ]
        self._root_handles: list[RemovableHandle] = []

    # -- the boundary ------------------------------------------------------------------------------------------------------

    def renew(self) -> None:
        """The boundary may have moved, or the prefix's values may have changed: look before the next training forward."""
        self._stale = True

    def _settle(self) -> None:
        """Make the store that of the present prefix; whatever is still right stays."""
        freezer = self._freezer()
        moved = self._stale or freezer.frozen_layers != self._depth
        if not moved and _versions(self._watched) == self._versions:
            return
        kind = freezer.prefix_digest()
        self._watched = freezer.prefix_tensors()
        self._stale, self._versions = False, _versions(self._watched)
        if freezer.frozen_layers == self._depth and kind == self._kind:
            return
        self._drop_store()
        self._depth, self._kind, self._roots = freezer.frozen_layers, kind, freezer.prefix_roots()
        self._last, self._structure = None, None
        self._tried = self._alone = self._filled = False
        self._verified, self._shapes = set(), {}
        self.hits, self.misses, self._looked_up, self._refresh_at = 0, 0, 0, 1
        self.off_reason = "" if self._roots else "nothing is frozen"
        for handle in self._root_handles:
            handle.remove()
        self._root_handles = [root.register_forward_hook(self._root_done) for root in self._roots]

    def close(self) -> None:
        """Remove hooks and rows."""
        self._restore()
        self._drop_store()
        with contextlib.suppress(OSError):  # another process has rows there, or nothing was ever written
            self.folder.rmdir()
        for handle in [*self._handles, *self._root_handles]:
            handle.remove()

    def _drop_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _give_up(self, reason: str) -> None:
        self._restore()
        self._drop_store()
        self.off_reason = reason

    # -- one forward pass --------------------------------------------------------------------------------------------------

    def _before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if model is not self.model or self._inside:
            return
        self._restore()
        self.hit, self._keys, self._trial = False, [], None
        if not model.training or not torch.is_grad_enabled() or wants_gradient((args, kwargs)):
            return
        if isinstance(model.forward, CompiledForward):
            self.off_reason = "the model is compiled"
            return
        self._settle()
        if self.off_reason:
            return
        self._calls, self._outputs, self._captured = [], {}, []
        try:
            self._batch, self._keys, kind = row_keys((args, kwargs))
        except UnsupportedError as problem:
            self._give_up(str(problem))
            return
        self._input = (kind, self._batch)
        rows = self._look_up()
        if rows is None and self._fill(args, kwargs):
            rows = self._look_up()
        if rows is None:
            self.misses += 1
            known = self._tried and (self._alone or self._batch == 1)
            self._trial = None if known else Trial(model, args, kwargs)
            return
        if kind not in self._verified and not self._verify(args, kwargs, rows):
            self._give_up(_READS_MORE)
            return
        self.hits += 1
        self.hit = self.used = True
        self._install(rows)

    def _after(self, model: nn.Module, _args: Any, output: Any) -> None:
        if model is not self.model or self._inside:
            return
        self._restore()
        if not self.hit and self._keys and not self.off_reason:
            self._keep()
            if self._trial is not None and self._input in self._shapes and not self.off_reason:
                self._try_out(self._trial, output)
        self._keys, self._trial, self._captured = [], None, []

    def _root_done(self, root: nn.Module, _args: Any, output: Any) -> None:
        if self._filling and root is self._last:
            raise _PrefixDone(output)
        if self._inside or self.hit or not self._keys or root not in self._roots:
            return
        self._calls.append(root)
        if self._trial is not None:
            self._trial.prefix_ran()
        if wants_gradient(output):
            self._give_up("a layer that trains runs before the prefix's last output")
            return
        try:
            self._outputs[root] = template(output)
        except UnsupportedError as problem:
            self._give_up(f"{type(root).__name__}: {problem}")
            return
        if self._last is None or root is self._last:
            self._captured = [tensor.detach().clone() for tensor in tensors_of(output)]

    def _look_up(self) -> torch.Tensor | None:
        """The packed rows of the last output, if all are there."""
        if self._store is None or self._last is None or self._input not in self._shapes:
            return None
        self._looked_up += self._batch
        found = self._store.read(self._keys)
        if found is None and self.misses >= self._refresh_at:
            self._refresh_at = self.misses + 8
            if self._store.refresh():
                found = self._store.read(self._keys)
        if found is None:
            hopeless = self.hits == 0 and self._store.full and self._looked_up > 2 * len(self._store) + _TRIAL_ROWS
            if hopeless:
                self._give_up("no batch was ever seen twice: samples are changed at random, or do not fit the budget")
            return None
        return torch.from_numpy(found)

    def _keep(self) -> None:
        """After a real forward: write the rows that are new."""
        ran = self._calls
        if len(ran) != len(set(ran)):
            self._give_up("a module of the prefix runs several times in one forward pass")
            return
        if not ran:
            return
        last = ran[-1]
        try:
            structure = by_row(self._outputs[last], self._batch)
        except UnsupportedError as problem:
            self._give_up(f"{type(last).__name__}: {problem}")
            return
        parts = list(leaves(structure))
        if not parts:
            self._give_up(f"{type(last).__name__} hands on no tensor")
            return
        if self._last is None:
            self._last, self._structure = last, structure
        elif last is not self._last or structure != self._structure:
            return  # of another shape: batches of a dozen lengths are not worth a dozen stores
        self._shapes[self._input] = self._outputs
        if self._store is None:
            row_bytes = sum(leaf.row_bytes for leaf in parts)
            try:
                self._store = RowStore(self.folder, f"{self._kind}/{structure}", row_bytes, self.budget_bytes)
            except OSError as error:
                self._give_up(f"{self.folder}: {error.strerror or error}")
                return
            if self._store.capacity == 0:
                self._give_up(f"one row of {row_bytes} bytes exceeds the budget")
                return
            self._store.refresh()
        self._write(self._keys, pack(self._captured, self._batch))

    def _write(self, keys: list[Key], rows: torch.Tensor) -> bool:
        """Add rows to the store; False: the disk cannot take them, and the cache is off."""
        assert self._store is not None
        try:
            self._store.write(keys, rows.numpy())
        except OSError as error:  # and whoever else needs the room has it
            self._give_up(f"cannot write to {self.folder}: {error.strerror}")
            return False
        return True

    def _fill(self, args: Any, kwargs: Any) -> bool:
        """Where some rows of the batch are there: compute the others, by the prefix alone. Whether all are there now."""
        if self._store is None or self._last is None or self._store.full or self._input not in self._shapes:
            return False
        missing = [place for place, key in enumerate(self._keys) if key not in self._store]
        if not self._alone or not 0 < len(missing) < self._batch:
            return False
        if len(missing) == 1:  # some modules squeeze a batch of one away
            missing.append((missing[0] + 1) % self._batch)
        output = self._prefix_of(args, kwargs, missing)
        if output is None:
            return False
        self._filled = True
        written = self._write([self._keys[place] for place in missing], pack(output, len(missing)))
        return written and all(key in self._store for key in self._keys)

    def _prefix_of(self, args: Any, kwargs: Any, chosen: list[int]) -> Any:
        """The prefix's last output for some rows of the batch; None: it cannot be had without the others."""
        output = None
        self._inside = self._filling = True
        try:
            args, kwargs = (take_rows(part, self._batch, torch.tensor(chosen)) for part in (args, kwargs))
            with torch.no_grad(), generators_kept():
                self.model(*args, **kwargs)
        except _PrefixDone as done:
            output = done.output
        except Exception:  # whatever it is
            return None
        finally:
            self._inside = self._filling = False
        try:
            return output if by_row(template(output), len(chosen)) == self._structure else None
        except UnsupportedError:
            return None

    # -- taking the prefix's place -----------------------------------------------------------------------------------------

    def _install(self, rows: torch.Tensor) -> None:
        """``rows``: packed; what follows may work in place on them."""
        device = next(self.model.parameters()).device
        whole = unpack(self._structure, rows, device)
        for root, structure in self._shapes[self._input].items():  # of those that ran
            self._own_forward[root] = root.__dict__.get("forward", _MISSING)
            root.forward = _hands_on(whole if root is self._last else zeros(structure, device))

    def _restore(self) -> None:
        for root, own in self._own_forward.items():
            if own is _MISSING:
                root.__dict__.pop("forward", None)
            else:
                root.forward = own
        self._own_forward = {}

    def _try_out(self, trial: Trial, output: Any) -> None:
        """Behind the first forward pass: what cannot work is said at once."""
        if trial.random:
            self._give_up(
                "random numbers are drawn before the prefix's last output (dropout in the model's own forward?)"
            )
            return
        if self._batch > 1 and not self._rows_stand_alone(trial):
            self._give_up(
                "the prefix's output of a sample depends on the samples beside it, or cannot be had without them"
            )
            return
        self._alone = self._alone or self._batch > 1
        if self._tried:
            return
        self._tried = True
        short = self._in_its_place(pack(self._captured, self._batch), trial.again)
        # Gradients may choose other kernels.
        if short is None or not all_equal(list(tensors_of(output)), short, exactly=False):
            self._give_up(_READS_MORE)

    def _rows_stand_alone(self, trial: Trial) -> bool:
        """Whether the prefix gives the same for every second row, from the last one on, without those between."""
        chosen = list(range(self._batch - 1, -1, -2)) if self._batch > 2 else [1, 1]
        found = self._prefix_of(trial.args, trial.kwargs, chosen)
        if found is None:
            return False
        return all_equal([tensor[chosen] for tensor in self._captured], list(tensors_of(found)), exactly=False)

    def _verify(self, args: Any, kwargs: Any, rows: torch.Tensor) -> bool:
        """Run one batch both ways, leaving generators and buffers as they were."""
        trial = Trial(self.model, args, kwargs)
        self._inside = True
        try:
            real = trial.again()
        finally:
            self._inside = False
        short = self._in_its_place(rows, trial.again)
        if short is None or not all_equal(real, short, exactly=not self._filled):
            return False
        self._verified.add(self._input[0])
        return True

    def _in_its_place(self, rows: torch.Tensor, run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor] | None:
        """What ``run`` gives with ``rows`` in the prefix's place; None: the network cannot do with zeros."""
        self._inside = True
        self._install(rows.clone())
        try:
            return run()
        except Exception:  # whatever it is
            return None
        finally:
            self._restore()
            self._inside = False


_READS_MORE = "the rest of the network reads more of the prefix than its last output"
_MISSING: Any = object()


class _PrefixDone(Exception):
    """Leaves a forward pass behind the prefix."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


def _versions(tensors: Sequence[torch.Tensor]) -> int:
    """Grows with every change in place."""
    return sum(tensor._version for tensor in tensors)


def _hands_on(value: Any) -> Callable[..., Any]:
    def forward(*_args: Any, **_kwargs: Any) -> Any:
        return value

    return forward
