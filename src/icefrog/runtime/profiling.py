"""From step times to a Profile: an online calibration that starts from a prior and uses every point seen so far.

Points are kept by (GPUs, nodes, batch per GPU, micro-steps, depth) as medians over recent steps; they travel in the
checkpoint, and so accumulate over resizes. Backward is known for *every* depth from the times at which the gradients of each
layer become ready in a full step: freezing l layers ends backward when layer l + 1 is ready. A depth that was tried counts
with what its whole step took (:mod:`icefrog.runtime.savings`).
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from icefrog.estimate.occupancy import OccupancyPoint, fit_occupancy
from icefrog.profile import (
    ComputeCurve,
    FloatArray,
    LayerCost,
    OccupancyParams,
    Parallel,
    Pipelined,
    Profile,
    Replicated,
    SyncCurve,
    ThroughputParams,
)
from icefrog.runtime.savings import Saving, fit_depth, saving, tried_depths
from icefrog.runtime.timing import StepTimes

PRIOR_FIXED_SHARE = 0.1
"""Part of a pass that does not shrink with the batch, until two batch sizes have been measured."""
PRIOR_BYTES_PER_S = {"cpu": 1e9, "cuda": 2e10}
"""All-reduce speed until more than one GPU has been measured."""
RECENT_STEPS = 64
ENOUGH_STEPS = 5
"""Steps at a depth from which on its time is believed."""
OCCUPANCY_S = 1.0
"""Decisions that follow each other more closely share one reading of memory and utilisation."""
SKIPPED_STEPS = 2  # allocator and autotuner warm-up after each start or move of the boundary

_NOTHING_OCCUPIED = OccupancyParams(mem_bytes=(0.0, 0.0, 0.0, 0.0), util_pct=(0.0, 0.0, 0.0, 0.0))


class PointKey(NamedTuple):
    """What a measured point was measured at."""

    num_gpus: int
    num_nodes: int
    batch_per_gpu: int
    accum_steps: int
    frozen_layers: int


class _Recent:
    """Recent steps at one key; rows: rest (step - bwd - sync), bwd, sync, ready by layer."""

    def __init__(
        self,
        rows: Sequence[Sequence[float]] = (),
        steps_s: Sequence[float] = (),
        fwds_s: Sequence[float] = (),
    ) -> None:
        self.rows: deque[list[float]] = deque((list(row) for row in rows), maxlen=RECENT_STEPS)
        self.steps_s: deque[float] = deque(steps_s, maxlen=RECENT_STEPS)
        self.fwds_s: deque[float] = deque(fwds_s, maxlen=RECENT_STEPS)

    def median(self) -> FloatArray:
        return np.median(np.asarray(self.rows, dtype=np.float64), axis=0)

    def slower_than(self, full: _Recent) -> float:
        """By how much the machine is slower than it was for ``full``, at least 1: freezing never makes forward longer."""
        if not self.fwds_s or not full.fwds_s:
            return 1.0
        return max(float(np.median(self.fwds_s) / max(np.median(full.fwds_s), 1e-12)), 1.0)


class Profiler:
    """Keeps the points of one job and turns them into its Profile.

    Args:
        name: of the profile.
        layers: (name, parameter bytes) of each layer.
        device_type: ``cpu`` or ``cuda``.
        describe: how the model is spread, as the profile says it; asked whenever that matters.
        fills_cache: whether frozen steps also fill a prefix cache, which takes time before their backward pass.
    """

    def __init__(
        self,
        name: str,
        layers: Sequence[tuple[str, float]],
        device_type: str,
        describe: Callable[[], Parallel] = Replicated,
        fills_cache: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name = name
        self.layers = list(layers)
        self.device_type = device_type
        self._describe = describe
        self._fills_cache = fills_cache
        self.flops: list[float] = [0.0] * len(layers)  # training FLOPs of one sample; 0 until counted
        self._points: dict[PointKey, _Recent] = {}
        self._forward: dict[PointKey, deque[float]] = {}  # seconds of recent steps' forward passes
        self._occupancy: dict[PointKey, tuple[float, float]] = {}
        self.last: StepTimes | None = None  # of the last typical step; whoever takes it away sees each once
        self._skip = SKIPPED_STEPS
        self._cpu = (_cpu_demand_s(), time.perf_counter())
        self._sampled: tuple[tuple[PointKey, bool], float, tuple[float, float | None]] | None = None

    def moved(self) -> None:
        """The boundary moved, or training resumed: the next steps are not typical."""
        self._skip = SKIPPED_STEPS

    def observe(self, key: PointKey, times: StepTimes) -> None:
        """Take in one step."""
        if self._skip > 0:
            self._skip -= 1
            return
        recent = self._points.setdefault(key, _Recent())
        rest = times.step_s - times.bwd_s - times.sync_s
        if isinstance(self._describe(), Pipelined):  # stages work at the same time
            rest = times.fwd_s
        recent.rows.append([max(rest, 1e-9), times.bwd_s, times.sync_s, *times.ready_s])
        recent.steps_s.append(times.step_s)
        recent.fwds_s.append(times.fwd_s)
        self.last = times
        self._forward.setdefault(key, deque(maxlen=RECENT_STEPS)).append(times.fwd_s)

    def sample_occupancy(self, key: PointKey, *, alone: bool = True) -> tuple[float, float | None]:
        """(peak memory of this process in bytes, utilisation in percent since the last call or None if unknown).

        What is measured beside another job on the GPU (``alone`` False) is returned, not learnt from.
        """
        mem, util = process_peak_bytes(self.device_type), self._utilisation()
        if util is not None and alone:
            self._occupancy[key] = (mem, util)
        return mem, util

    def recent_occupancy(self, key: PointKey, *, alone: bool = True) -> tuple[float, float | None]:
        """As :meth:`sample_occupancy`, at most once in ``OCCUPANCY_S`` at one key: the kernel takes its time to answer."""
        now_s, found = time.monotonic(), self._sampled
        if found is None or found[0] != (key, alone) or now_s - found[1] >= OCCUPANCY_S:
            found = self._sampled = (key, alone), now_s, self.sample_occupancy(key, alone=alone)
        return found[2]

    def _utilisation(self) -> float | None:
        if self.device_type == "cuda":
            try:
                return float(torch.cuda.utilization())
            except (RuntimeError, ModuleNotFoundError):
                return None
        now = (_cpu_demand_s(), time.perf_counter())
        (cpu, wall), self._cpu = self._cpu, now
        return min(100.0 * (now[0] - cpu) / max(now[1] - wall, 1e-9), 100.0)

    def measured_step_s(self, key: PointKey) -> float | None:
        """Median seconds of a step at this key."""
        recent = self._points.get(key)
        if recent is None or not recent.rows:
            return None
        return float(np.median(recent.steps_s)) if recent.steps_s else float(recent.median()[:3].sum())

    def largest_batch(self, num_gpus: int) -> int:
        """The most samples a GPU and micro-step that were measured long enough on so many GPUs; 0: none were."""
        known = [key for key, recent in self._points.items() if len(recent.rows) >= ENOUGH_STEPS]
        return max((key.batch_per_gpu for key in known if key.num_gpus == num_gpus), default=0)

    def forward_s(self, key: PointKey) -> float | None:
        """Median seconds of a step's forward passes at this key, since this process started."""
        recent = self._forward.get(key)
        return float(np.median(recent)) if recent else None

    def profile(self, samples_per_epoch: int, max_local_batch: int) -> Profile | None:
        """The calibrated profile; None before the first typical step."""
        points = self._medians()
        if not points:
            return None
        layers = self._layer_costs()
        draft = Profile(
            name=self.name,
            layers=layers,
            throughput=ThroughputParams(fwd=ComputeCurve(alpha_s=0, beta_s=0), bwd=ComputeCurve(alpha_s=0, beta_s=0)),
            occupancy=_NOTHING_OCCUPIED,
            samples_per_epoch=samples_per_epoch,
            max_local_batch=max_local_batch,
            parallel=self._describe(),
            provenance="",
        )
        params, notes = _calibrate(points, draft, self._prior_sync_s())
        return draft.model_copy(
            update={
                "throughput": params,
                "occupancy": self._occupancy_params(draft.theta, draft.omega),
                "provenance": f"measured online over {len(points)} configurations; {notes}",
            }
        )

    def _medians(self) -> dict[PointKey, FloatArray]:
        """Rows by key; those of frozen steps as the machine was when full steps were measured."""
        rows = {key: recent.median() for key, recent in self._points.items() if recent.rows}
        if isinstance(self._describe(), Pipelined):
            return rows
        for key, full, row in tried_depths(rows):
            if self._fills_cache():
                row[0] = full[0]
            else:
                row /= self._points[key].slower_than(self._points[key._replace(frozen_layers=0)])
        return rows

    def steps_by_depth(self, key: PointKey) -> dict[int, float]:
        """Seconds of a whole step at each depth that was measured for long enough, all else as at ``key``."""
        if isinstance(self._describe(), Pipelined):
            return {}
        return {
            other.frozen_layers: float(row[:3].sum())
            for other, row in self._medians().items()
            if other[:4] == key[:4] and len(self._points[other].rows) >= ENOUGH_STEPS
        }

    def saving(self, key: PointKey) -> Saving | None:
        """What freezing to the depth of ``key`` was to save and what it saves; None until both are known."""
        full_key = key._replace(frozen_layers=0)
        if not {key.frozen_layers, 0} <= self.steps_by_depth(key).keys() or key.frozen_layers == 0:
            return None
        rows, sizes = self._medians(), np.array([size for _, size in self.layers])
        sent = float(sizes[key.frozen_layers :].sum() / sizes.sum()) if key.num_gpus > 1 else 1.0
        return saving(rows[full_key], rows[key], key.frozen_layers, sent)

    def _layer_costs(self) -> tuple[LayerCost, ...]:
        total = sum(self.flops)
        return tuple(
            LayerCost(name=name, flops=flops if total > 0 else size, param_bytes=max(size, 1.0))
            for (name, size), flops in zip(self.layers, self.flops, strict=True)
        )

    def _prior_sync_s(self) -> float:
        return 1e-4 + 2.0 * sum(size for _, size in self.layers) / PRIOR_BYTES_PER_S[self.device_type]

    def _occupancy_params(self, theta: FloatArray, omega: FloatArray) -> Any:
        measured = [
            OccupancyPoint(
                batch_per_gpu=key.batch_per_gpu,
                theta=float(theta[min(key.frozen_layers, len(theta) - 1)]),
                omega=float(omega[min(key.frozen_layers, len(omega) - 1)]),
                mem_bytes=mem,
                util_pct=util,
            )
            for key, (mem, util) in self._occupancy.items()
        ]
        return fit_occupancy(measured or [OccupancyPoint(1.0, 1.0, 1.0, process_peak_bytes(self.device_type), 100.0)])

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "flops": list(self.flops),
            "kind": self._kind(),
            "points": [
                [list(key), [list(row) for row in recent.rows], list(recent.steps_s), list(recent.fwds_s)]
                for key, recent in self._points.items()
            ],
            "occupancy": [[list(key), list(pair)] for key, pair in self._occupancy.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`. Times of another pipeline, or of none, say nothing of this one."""
        self.flops = list(state["flops"])
        known = state["points"] if state.get("kind") == self._kind() else []
        self._points = {PointKey(*key): _Recent(*rows) for key, *rows in known}
        self._occupancy = {PointKey(*key): (pair[0], pair[1]) for key, pair in state["occupancy"]}
        self.moved()

    def _kind(self) -> list[Any] | None:
        """Of a pipeline, what its points depend on."""
        kind = self._describe()
        return [kind.num_stages, kind.micro_batches] if isinstance(kind, Pipelined) else None


class _Passes(NamedTuple):
    """A point as passes of the whole model: samples of a pass, passes of a step, copies of the model."""

    samples: int
    number: int
    copies: int

    @classmethod
    def of(cls, key: PointKey, parallel: Parallel) -> _Passes:
        """In a pipeline a pass is a micro-batch on its way through all stages."""
        if not isinstance(parallel, Pipelined):
            return cls(key.batch_per_gpu, key.accum_steps, key.num_gpus)
        copies = 1 if parallel.num_stages is None else max(key.num_gpus // parallel.num_stages, 1)
        samples = key.batch_per_gpu * key.num_gpus / (copies * parallel.micro_batches)
        return cls(max(round(samples), 1), key.accum_steps * parallel.micro_batches, copies)


def _calibrate(points: dict[PointKey, FloatArray], draft: Profile, prior_sync_s: float) -> tuple[ThroughputParams, str]:
    theta, omega = draft.theta, draft.omega
    pipelined = isinstance(draft.parallel, Pipelined)
    fixed_share, exponent = fit_depth(points, theta, omega, pipelined=pipelined)
    kept = fixed_share + (1.0 - fixed_share) * theta**exponent
    told: set[PointKey] = set() if pipelined else {key for key, _, _ in tried_depths(points)}  # by the depth fit
    fwd: dict[int, list[float]] = {}
    bwd: dict[int, list[float]] = {}
    sync: dict[tuple[int, bool], list[float]] = {}
    for key, row in points.items():
        if key in told:
            continue
        passes = _Passes.of(key, draft.parallel)
        # With one GPU, what comes between the last gradient and the optimizer is not synchronisation (clipping in the loop).
        rest = float(row[0]) if pipelined or key.num_gpus > 1 else float(row[0] + row[2])
        fwd.setdefault(passes.samples, []).append(rest / passes.number)
        full_bwd = float(row[1]) / passes.number / max(float(kept[key.frozen_layers]), 1e-3)
        bwd.setdefault(passes.samples, []).append(full_bwd)
        if passes.copies > 1:
            share = max(float(omega[key.frozen_layers]), 1e-2)
            sync.setdefault((passes.copies, key.num_nodes > 1), []).append(float(row[2]) / share)
    params = ThroughputParams(
        fwd=_fit_batch(fwd, 0.0),
        bwd=_fit_batch(bwd, fixed_share),
        sync=_fit_sync(sync, prior_sync_s),
        flop_alpha_s=0.0,
        flop_gamma=exponent,
    )
    smallest = min(bwd)
    full_s = float(np.mean(bwd[smallest]))
    alpha = min(fixed_share * full_s, params.bwd.alpha_s)
    if alpha < fixed_share * full_s and full_s > 0:  # T_bwd grows with m from nothing: the exponent has to say it
        _, exponent = fit_depth(points, theta, omega, pipelined=pipelined, most_fixed=alpha / full_s)
    params = params.model_copy(update={"flop_alpha_s": alpha, "flop_gamma": exponent})
    notes = "batch scaling " + ("fitted" if len(fwd) > 1 else "from a prior (one batch per GPU measured)")
    notes += ", synchronisation " + ("measured" if sync else "from a prior (one GPU measured)")
    return params, notes


def _fit_batch(seconds: dict[int, list[float]], least_fixed_share: float) -> ComputeCurve:
    """Affine in m, both coefficients >= 0; a prior for the fixed part where one m was measured."""
    batches = np.array(sorted(seconds), dtype=np.float64)
    times = np.array([np.mean(seconds[int(m)]) for m in batches])
    if len(batches) == 1:
        fixed = max(PRIOR_FIXED_SHARE, least_fixed_share)
        return ComputeCurve(alpha_s=fixed * times[0], beta_s=(1 - fixed) * times[0] / batches[0])
    slope, intercept = np.polyfit(batches, times, 1, w=1.0 / times)
    if slope < 0:
        slope, intercept = 0.0, float(times.mean())
    elif intercept < 0:
        slope, intercept = float(np.sum(batches / times) / np.sum((batches / times) ** 2)), 0.0
    return ComputeCurve(alpha_s=float(intercept), beta_s=float(slope))


def _fit_sync(seconds: dict[tuple[int, bool], list[float]], prior_s: float) -> SyncCurve:
    """Affine in the replicas beyond two, within a node and over nodes; what was not measured is taken from the other."""
    fitted: dict[bool, tuple[float, float]] = {}
    for inter in (False, True):
        counts = np.array(sorted(a for a, spans in seconds if spans == inter), dtype=np.float64)
        if not len(counts):
            continue
        # What is left of a step beside compute: below zero where the machine's speed changed between the two.
        times = np.maximum([np.mean(seconds[int(a), inter]) for a in counts], 0.0)
        if len(counts) == 1:
            fitted[inter] = (float(times[0]), 0.0)
        else:
            slope, intercept = np.polyfit(counts - 2.0, times, 1)
            fitted[inter] = (max(float(intercept), 0.0), max(float(slope), 0.0))
    intra = fitted.get(False, fitted.get(True, (prior_s, 0.0)))
    inter_pair = fitted.get(True, intra)
    return SyncCurve(
        intra_alpha_s=intra[0], intra_beta_s=intra[1], inter_alpha_s=inter_pair[0], inter_beta_s=inter_pair[1]
    )


def process_peak_bytes(device_type: str) -> float:
    """Peak memory of the current device's allocator (``cuda``), or of this process, since it began."""
    if device_type == "cuda":
        return float(torch.cuda.max_memory_reserved())
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def num_nodes(world_size: int) -> int:
    """Nodes that the job spans, from the launcher's LOCAL_WORLD_SIZE; 1 where unknown."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return max(1, -(-world_size // max(local, 1)))


def _cpu_demand_s() -> float:
    """Seconds that the calling thread computed *or waited for a core*.

    On a busy machine the share of time that a process gets says how crowded the core is, not how much of it the job would
    use; waiting to run is demand. Blocking (data, other ranks) is not. Without the kernel's figures: the CPU time alone.
    """
    try:
        run_ns, wait_ns, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except (OSError, ValueError):
        return time.process_time()
    return (int(run_ns) + int(wait_ns)) / 1e9
