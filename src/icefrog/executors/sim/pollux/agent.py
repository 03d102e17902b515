"""What a job that may move its batch knows of itself: the agent that Pollux puts into each job. Immutable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from icefrog.executors.sim.pollux.application import Application, LocalBatch
from icefrog.executors.sim.pollux.fit import Where, fit_params
from icefrog.executors.sim.pollux.goodput import NOISY, PerfParams, best_batches
from icefrog.executors.sim.pollux.measurements import Times
from icefrog.profile import LayerCost, OccupancyParams, Profile


@dataclass(frozen=True, slots=True)
class Agent:
    """Steps measured so far, what was fitted to them, and the last gradient statistics."""

    seen: Mapping[Where, Times]
    params: PerfParams | None
    grad_stats: tuple[float, float]  # (|G|^2, variance) at the initial batch

    @classmethod
    def new(cls) -> Agent:
        """Of a job that has not run."""
        return cls({}, None, (0.0, 0.0))

    def observe(self, where: Where, times: Times, grad_stats: tuple[float, float]) -> Agent:
        """After a step: re-fitted where the configuration is new; itself where nothing is."""
        if where not in self.seen:
            only_batch = any(known[:2] == where[:2] for known in self.seen)
            seen = {**self.seen, where: times}
            return Agent(seen, fit_params(seen, self.params, only_there=only_batch), grad_stats)
        return self if grad_stats == self.grad_stats else replace(self, grad_stats=grad_stats)

    def best_batch(self, app: Application, num_nodes: int, num_gpus: int) -> LocalBatch:
        """The batch of the best goodput; before any fit the initial one."""
        if self.params is None:
            return app.local_batch(max(app.init_batch, app.min_local * num_gpus), num_gpus)
        (best,) = best_batches(self.params, self.noise, app.grid((num_gpus,)), (num_nodes,), (num_gpus,))
        return LocalBatch(best.batch_per_gpu, best.accum_steps)

    @property
    def noise(self) -> float:
        """var / |G|^2 at the initial batch."""
        sqr, var = self.grad_stats
        return max(var, 0.0) / sqr if sqr > 0 else NOISY

    def reported_stats(self, app: Application) -> tuple[tuple[float], tuple[float]]:
        """(|G|^2, per-sample variance) for a report: the model counts as one layer."""
        sqr, var = self.grad_stats
        return (sqr,), (max(var, 0.0) * app.init_batch,)

    def profile(self, app: Application) -> Profile | None:
        """The fit, in the form in which jobs report their cost; None before there is one."""
        if self.params is None:
            return None
        return Profile(
            schema=1,
            name=app.name,
            layers=(LayerCost(name="model", flops=1.0, param_bytes=1.0),),
            throughput=self.params.throughput_params(),
            occupancy=OccupancyParams(mem_bytes=(0.0, 0.0, 0.0, 0.0), util_pct=(100.0, 0.0, 0.0, 0.0)),
            samples_per_epoch=max(round(app.thresholds[-1] * app.init_batch / app.epochs), 1),
            min_local_batch=app.min_local,
            max_local_batch=app.max_local,
            gpu_type="t4",
            provenance="fitted by the simulated job to the steps it has run (Pollux world)",
        )
