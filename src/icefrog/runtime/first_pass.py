"""What one forward pass tells before anything is known of a model: the order of its parts, and what each costs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from icefrog.runtime.layers import Layer, Piece, forward_order
from icefrog.runtime.timing import LayerFlops


class FirstPass:
    """Counts from its making to :meth:`end`.

    Args:
        pieces: in the order they are declared; empty where the user has given the layers.
        layers: as they are now.
        samples: of the pass; 0: unknown.
    """

    def __init__(self, pieces: Sequence[Piece], layers: Sequence[Layer], samples: int) -> None:
        self.samples = samples
        self.running = True
        self._pieces = list(pieces)
        roots: list[tuple[int, nn.Module]]
        if pieces:
            roots = [(i, piece.module) for i, piece in enumerate(pieces)]
        else:
            roots = [(i, root) for i, layer in enumerate(layers) for root in layer.modules]
        self._counts = LayerFlops(roots)
        self._counts.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """The pass is over, or failed. Idempotent."""
        if self.running:
            self.running = False
            self._counts.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._counts.finish()

    @property
    def reentrant(self) -> bool:
        """A layer ran inside a reentrant activation checkpoint."""
        return self._counts.reentrant

    def order(self) -> list[Piece]:
        """The pieces as they really run."""
        return forward_order(self._pieces, self._counts.order)

    def training_flops(self, layers: Sequence[Layer]) -> list[float]:
        """Of one sample, by layer, shape (L,); zeros where the number of samples is unknown.

        Args:
            layers: made of the same pieces, in any order.
        """
        found = [0.0] * len(layers)
        at = {id(root): i for i, layer in enumerate(layers) for root in layer.modules}
        for key, forward in self._counts.flops.items():
            if key >= 0 and self.samples:
                layer = at[id(self._pieces[key].module)] if self._pieces else key
                found[layer] += training_flops(forward) / self.samples
        return found


def training_flops(forward: float) -> float:
    """Backward costs twice the forward: one pass for the weights, one for the inputs."""
    return 3.0 * forward
