"""What is known of one training job's cost: layers, throughput and occupancy parameters.

A :class:`Profile` holds *estimates*: the scheduler and the Layer Tuner read it, and a simulator's world
keeps a truth of its own beside it. Symbols and equations: ``docs/model.md``. Profiles are versioned JSON
files (``schema``).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from icefrog.copying import copied
from icefrog.gpu_types import ANY_GPU, measured_as

FloatArray = npt.NDArray[np.float64]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ignored_types=(cached_property,))

    def __copy__(self) -> Self:
        """A copy without cached values: ``model_copy(update=...)`` would otherwise keep those of the old fields."""
        copied = super().__copy__()
        for name in set(copied.__dict__) - set(type(self).model_fields):
            del copied.__dict__[name]
        return copied


M = TypeVar("M", bound=_Frozen)


def altered(model: M, **changes: Any) -> M:
    """A copy with other values, which are not checked: for products of valid numbers, and a trace of 80,000 jobs.

    What follows from the layers alone is handed on, unless they change.
    """
    values = model.__dict__ | changes
    if "memo" in values:
        del values["memo"]
    if "layers" in changes:
        values.pop("theta", None)
        values.pop("omega", None)
    return copied(model, values)


class LayerCost(_Frozen):
    """One freezable unit, in forward order; it holds at least one trainable parameter."""

    name: str
    flops: float = Field(ge=0, description="training FLOPs of one sample (forward + backward)")
    param_bytes: float = Field(gt=0)
    activation_bytes: float = Field(
        default=0.0, ge=0, description="its output for one sample, as the next layer gets it; 0: not measured"
    )
    fwd_s: float = Field(default=0.0, ge=0, description="forward time of one sample; 0: not measured")
    bwd_s: float = Field(default=0.0, ge=0, description="backward time of one sample; 0: not measured")


class ComputeCurve(_Frozen):
    """Time of one pass over a local batch m: ``((alpha_s^k + (beta_s * m)^k)^(1/k))``; k = 1 is the affine model.

    A larger ``smooth`` (k) is flatter at small m, where the GPU is not yet full.
    """

    alpha_s: float = Field(ge=0)
    beta_s: float = Field(ge=0, description="seconds per sample")
    smooth: float = Field(default=1.0, ge=1.0)


class SyncCurve(_Frozen):
    """Gradient synchronisation of the full model: 0 on one GPU, else affine in the replicas beyond two.

    One node and several nodes have curves of their own; two nodes have one term more, since measurements show them to be
    a case apart (``docs/evidence/throughput-model.md``).
    """

    intra_alpha_s: float = Field(default=0.0, ge=0)
    intra_beta_s: float = Field(default=0.0, ge=0)
    inter_alpha_s: float = Field(default=0.0, ge=0)
    inter_beta_s: float = Field(default=0.0, ge=0)
    pair_beta_s: float = Field(
        default=0.0, ge=0, description="added for each GPU beyond one per node where exactly two nodes are used"
    )


class ThroughputParams(_Frozen):
    """Parameters of compute and gradient synchronisation, Eq. 5-7 (with the l = 0 consistency decision)."""

    fwd: ComputeCurve
    bwd: ComputeCurve
    sync: SyncCurve = SyncCurve()
    overlap_gamma: float = Field(default=1.0, ge=1.0, description="gamma of Eq. 5")
    flop_alpha_s: float = Field(
        default=0.0, ge=0, description="part of T_bwd that freezing cannot remove (launch cost)"
    )
    flop_gamma: float = Field(default=1.0, gt=0, description="gamma_flop of Eq. 6")
    straggler: float = Field(
        default=0.0,
        ge=0,
        description="compute grows by straggler * (a - 1) / (a + 1): the wait for the slowest replica",
    )
    sync_alpha_s: float = Field(default=0.0, ge=0, description="part of T_sync that freezing cannot remove")


class Replicated(_Frozen):
    """Every GPU holds the model (DDP): :class:`ThroughputParams` say it all."""

    kind: Literal["ddp"] = "ddp"


class Sharded(_Frozen):
    """Parameters, gradients and optimizer state are split over the GPUs (FSDP, ZeRO-3), Eq. 9, 10.

    ``ThroughputParams.sync`` is then the reduce-scatter of gradients.
    """

    kind: Literal["sdp"] = "sdp"
    gather: SyncCurve = Field(default=SyncCurve(), description="all-gather of all parameters, T_para(a, 0)")
    gather_alpha_s: float = Field(default=0.0, ge=0, description="part of it that freezing cannot remove")
    gather_gamma: float = Field(default=1.0, ge=1.0, description="gamma_lm of Eq. 9: overlap with compute")


class Link(_Frozen):
    """Sending an activation or a gradient from one stage to the next: a time a message and a time a byte."""

    intra_alpha_s: float = Field(default=0.0, ge=0)
    intra_s_per_byte: float = Field(default=0.0, ge=0)
    inter_alpha_s: float = Field(default=0.0, ge=0, description="where a pipeline spans nodes")
    inter_s_per_byte: float = Field(default=0.0, ge=0)


class Pipelined(_Frozen):
    """Layers are split over stages in forward order, Eq. 11, 12; with replicas of the pipeline Eq. 13."""

    kind: Literal["pipeline"] = "pipeline"
    num_stages: int | None = Field(default=None, ge=1, description="p, in a / p replicas; None: every GPU is a stage")
    micro_batches: int = Field(default=1, ge=1, description="mu: parts in which a replica's batch passes the stages")
    stage_layers: tuple[int, ...] | None = Field(
        default=None, description="layers of each stage; None, or for another number of stages: balanced by FLOPs"
    )
    link: Link = Link()

    @model_validator(mode="after")
    def _stages_hold_layers(self) -> Self:
        if self.stage_layers is not None and min(self.stage_layers, default=0) < 1:
            raise ValueError(f"every stage needs a layer, got {list(self.stage_layers)}")
        return self


Parallel: TypeAlias = Annotated[Replicated | Sharded | Pipelined, Field(discriminator="kind")]
"""What the kind of parallelism adds to :class:`ThroughputParams`."""


class OccupancyParams(_Frozen):
    """Two linear regressions on (m, theta_l, omega_l): peak memory and GPU utilisation (section 8 of the paper)."""

    mem_bytes: tuple[float, float, float, float] = Field(description="intercept, per sample, per theta, per omega")
    util_pct: tuple[float, float, float, float]


class GpuCost(_Frozen):
    """What differs on another GPU type; layers and memory are those of the profile."""

    throughput: ThroughputParams
    util_pct: tuple[float, float, float, float] = Field(description="as in OccupancyParams")


class Profile(_Frozen):
    """Estimated cost of one job. Versioned: ``Profile.model_validate_json(path.read_text())``."""

    schema_: Literal[1] = Field(default=1, alias="schema")
    name: str
    layers: tuple[LayerCost, ...] = Field(min_length=1)
    throughput: ThroughputParams
    parallel: Parallel = Replicated()
    occupancy: OccupancyParams
    samples_per_epoch: int = Field(gt=0)
    min_local_batch: int = Field(default=1, ge=1)
    max_local_batch: int = Field(ge=1)
    gpu_type: str = ANY_GPU
    by_gpu_type: Mapping[str, GpuCost] = Field(
        default_factory=dict, description="what it costs on other types than gpu_type, by measured type"
    )
    provenance: str = Field(description="where each number comes from; 'modelled' where it was not measured")

    @model_validator(mode="after")
    def _stages_hold_all_layers(self) -> Self:
        given = self.parallel.stage_layers if isinstance(self.parallel, Pipelined) else None
        if given is not None and sum(given) != len(self.layers):
            raise ValueError(f"stages of {list(given)} layers for a network of {len(self.layers)}")
        return self

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    @cached_property
    def theta(self) -> FloatArray:
        """theta_l for l = 0..L: FLOPs of the unfrozen layers over all, shape (L + 1,)."""
        return _unfrozen_share(np.array([layer.flops for layer in self.layers]))

    @cached_property
    def omega(self) -> FloatArray:
        """omega_l for l = 0..L: parameter bytes of the unfrozen layers over all, shape (L + 1,)."""
        return _unfrozen_share(np.array([layer.param_bytes for layer in self.layers]))

    def on(self, gpu_type: str) -> Profile:
        """What the job costs on one GPU type (a name that users write, ``icefrog.gpu_types``).

        The profile itself for its own type, for ``any``, and for a type of which nothing is known.
        """
        measured = measured_as(gpu_type)
        cost = None if measured in (None, ANY_GPU, self.gpu_type) else self.by_gpu_type.get(measured or "")
        if cost is None:
            return self
        known = self.memo.get(("on", measured))
        if not isinstance(known, Profile):
            occupancy = self.occupancy.model_copy(update={"util_pct": cost.util_pct})
            update: dict[str, Any] = {"throughput": cost.throughput, "occupancy": occupancy}
            update |= {"gpu_type": measured, "by_gpu_type": {}}
            known = self.memo[("on", measured)] = self.model_copy(update=update)
        return known

    def knows(self, gpu_type: str) -> bool:
        """Whether :meth:`on` has costs of that type."""
        measured = measured_as(gpu_type)
        return ANY_GPU in (gpu_type, self.gpu_type) or measured == self.gpu_type or measured in self.by_gpu_type

    @cached_property
    def memo(self) -> dict[Hashable, object]:
        """Tables derived from this (immutable) profile by ``estimate.tuner``; never compared, copied or written."""
        return {}

    def __getstate__(self) -> dict[Any, Any]:
        state = super().__getstate__()
        state["__dict__"] = {key: value for key, value in state["__dict__"].items() if key != "memo"}
        return state


def _unfrozen_share(cost: FloatArray) -> FloatArray:
    total = float(cost.sum())
    if total <= 0:
        return np.linspace(1.0, 0.0, len(cost) + 1)
    share = 1.0 - np.concatenate(([0.0], np.cumsum(cost))) / total
    share[-1] = 0.0
    return np.clip(share, 0.0, 1.0)
