"""What a job says to the controller, and the counters it says it about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from icefrog.profile import Profile
from icefrog.runtime import protocol
from icefrog.runtime.agent import Agent
from icefrog.runtime.protocol import Outcome
from icefrog.types import GradientStats


@dataclass
class Counters:
    """The job's place in its training; part of the checkpoint."""

    epoch: int = 0
    cursor: int = 0  # samples of the epoch consumed, where the elastic sampler is used
    step: int = 0
    samples: int = 0
    effective_samples: float = 0.0
    samples_per_epoch: int | None = None
    metric: float | None = None
    outcome: str | None = None
    epoch_samples: int = 0  # of the epoch in progress
    in_epoch: bool = False  # steps of it were made, if only before a stop behind which it is repeated
    lost_samples: int = 0  # of steps whose gradient was not finite
    base_batch: int | None = None  # M0: global batch of the first step, or what the user said

    def count(self, samples: int, psi: float | None, *, dealt: bool) -> None:
        """An optimizer step is over.

        Args:
            samples: M of this step.
            psi: what one of them is worth; None: the gradient was not finite, so they are gone for this epoch, but count as
                no progress.
            dealt: by the elastic sampler.
        """
        self.in_epoch = True
        self.epoch_samples += samples
        self.cursor += samples if dealt else 0
        if psi is not None:
            self.step += 1
            self.samples += samples
            self.effective_samples += psi * samples
        else:
            self.lost_samples += samples


@dataclass(frozen=True, slots=True)
class Interval:
    """What was measured over one tuning interval."""

    step_s: float
    throughput: float  # samples/s
    sample_worth: float  # while it ran: psi, and EFF of the batch
    mem_bytes: float
    util_pct: float | None


class Reporter:
    """Writes the lines. Silent on ranks other than 0 and where no executor listens."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent

    @property
    def _min_frozen_layers(self) -> int:
        return self.agent.grant.min_frozen_layers if self.agent.grant is not None else 0

    @property
    def listened_to(self) -> bool:
        """Whether a report made now would be written."""
        return self.agent.active and self.agent.rank == 0

    def started(
        self,
        at: Counters,
        layers: tuple[str, ...],
        frozen_layers: int,
        batch: tuple[int, int] | None,
        profile: Profile | None,
        resumed: bool,
    ) -> None:
        """The job is up; ``batch``: (samples a GPU, micro-steps) in force, None: as granted."""
        self.agent.report(
            protocol.Started(
                time_s=self.agent.now_s(),
                layers=layers,
                samples_per_epoch=at.samples_per_epoch,
                epoch=at.epoch,
                effective_samples=at.effective_samples,
                resumed=resumed,
                frozen_layers=frozen_layers,
                min_frozen_layers=self._min_frozen_layers,
                batch_per_gpu=batch[0] if batch else None,
                accum_steps=batch[1] if batch else None,
                profile=profile,
            )
        )

    def bounded(self, frozen_layers: int) -> None:
        """A changed grant is obeyed; ``frozen_layers`` are in force."""
        self.agent.report(
            protocol.Bounded(
                time_s=self.agent.now_s(),
                frozen_layers=frozen_layers,
                min_frozen_layers=self._min_frozen_layers,
            )
        )

    def progress(
        self,
        at: Counters,
        interval: Interval,
        *,
        total: float | None,
        frozen_layers: int,
        batch_per_gpu: int,
        accum_steps: int,
        psi: float,
        stats: GradientStats | None,
        signal: Sequence[float] | None,
        reason: str,
        profile: Profile | None,
    ) -> None:
        """One tuning interval is over; ``total`` is P0; layers, batch and ``psi`` hold from now on."""
        self.agent.report(
            protocol.Progress(
                time_s=self.agent.now_s(),
                epoch=at.epoch,
                step=at.step,
                samples=at.samples,
                effective_samples=at.effective_samples,
                remaining_samples=max(total - at.effective_samples, 0.0) if total is not None else None,
                metric=at.metric,
                frozen_layers=frozen_layers,
                min_frozen_layers=self._min_frozen_layers,
                batch_per_gpu=batch_per_gpu,
                accum_steps=accum_steps,
                psi=psi,
                throughput=interval.throughput,
                step_s=interval.step_s,
                effective_progress=interval.sample_worth * interval.throughput,
                variance=stats.variance if stats else None,
                sqr_norm=stats.sqr_norm if stats else None,
                signal=None if signal is None else tuple(signal),
                mem_bytes=interval.mem_bytes,
                util_pct=interval.util_pct,
                reason=reason,
                profile=profile,
            )
        )

    def checkpointed(self, path: Path, effective_samples: float, wait_s: float) -> None:
        """A checkpoint is on disk. The one report that comes from another thread."""
        self.agent.report(
            protocol.Checkpointed(
                time_s=self.agent.now_s(), path=str(path), effective_samples=effective_samples, wait_s=wait_s
            )
        )

    def warned(self, message: str) -> None:
        """Something the user should know."""
        self.agent.report(protocol.Warned(time_s=self.agent.now_s(), message=message))

    def stopped(self, at: Counters) -> None:
        """The job leaves, as it was asked to."""
        report = protocol.StoppedReport(time_s=self.agent.now_s(), effective_samples=at.effective_samples)
        self.agent.report(report, last=True)

    def finished(self, at: Counters, outcome: Outcome) -> None:
        """The job is over."""
        self.agent.report(
            protocol.Finished(
                time_s=self.agent.now_s(),
                outcome=outcome,
                metric=at.metric,
                effective_samples=at.effective_samples,
            ),
            last=True,
        )
