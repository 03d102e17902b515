"""The training side: freezing, statistics, resize, checkpoints, and the reports to the controller.

``icefrog.runtime.protocol`` needs no torch; everything else does, and is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from icefrog.estimate.boundary import Guards as Guards
    from icefrog.runtime.decision import Decision as Decision
    from icefrog.runtime.decision import Stopped as Stopped
    from icefrog.runtime.elastic import LayerElastic as LayerElastic
    from icefrog.runtime.parallel.pipeline import Pipeline as Pipeline
    from icefrog.runtime.peers import PeerLostError as PeerLostError
    from icefrog.runtime.sampler import ElasticSampler as ElasticSampler
    from icefrog.runtime.world import DivergenceError as DivergenceError

__all__ = [
    "Decision",
    "DivergenceError",
    "ElasticSampler",
    "Guards",
    "LayerElastic",
    "PeerLostError",
    "Pipeline",
    "Stopped",
]

_HOME = {
    "Decision": "decision",
    "DivergenceError": "world",
    "ElasticSampler": "sampler",
    "Guards": "rules",
    "LayerElastic": "elastic",
    "PeerLostError": "peers",
    "Pipeline": "parallel.pipeline",
    "Stopped": "decision",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
