"""What the training loop is told."""

from __future__ import annotations

from dataclasses import dataclass


class Stopped(SystemExit):
    """Raised at a step boundary, after a checkpoint, when the executor asked the job to stop. Exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided, in force from the next step on."""

    frozen_layers: int
    psi: float
    effective_progress: float  # E, full-layer samples/s; 0 before the first measured step
    reason: str
    effective_samples: float
    metric: float | None
    done: bool  # the target is reached, or P0 is used up
