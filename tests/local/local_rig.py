"""A rig that plays the controller by hand: commands in, events out, everything applied to a real state and checked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from icefrog import events as ev
from icefrog.driver import RealClock
from icefrog.executors.local import Devices, LocalExecutor
from icefrog.executors.local.attempts import JobFolder
from icefrog.executors.local.files import read_json, stragglers
from icefrog.home import Home
from icefrog.spec import BatchRule, ClusterSpec, JobSpec, NodeSpec
from icefrog.state import ClusterState, Phase
from icefrog.types import GpuId

JOB = Path(__file__).with_name("counting_job.py")
PATIENCE_S = 60.0  # until a test gives up; nothing here takes as long


def job_spec(name: str, *args: object, **fields: object) -> JobSpec:
    """A job of ``counting_job.py``."""
    given = {
        "name": name,
        "command": (sys.executable, "-S", str(JOB), *map(str, args)),
        "gpus": (1, 2),
        "batch": BatchRule(**{"global": 8}),
        "max_epochs": 50,
        "cwd": str(JOB.parent),
        **fields,
    }
    return JobSpec.model_validate(given)


def grant(num_gpus: int = 1, *, shared: bool = False, min_frozen_layers: int = 0) -> ev.Grant:
    """A grant of so many GPUs."""
    return ev.Grant(num_gpus=num_gpus, batch_per_gpu=8 // num_gpus, shared=shared, min_frozen_layers=min_frozen_layers)


def gpus(*devices: int) -> tuple[GpuId, ...]:
    """Devices of the one node."""
    return tuple(GpuId(0, device) for device in devices)


class Rig:
    """See the module."""

    def __init__(self, home: Path, num_gpus: int = 4) -> None:
        self.home = Home(home)
        self.home.path.mkdir()
        self.clock = RealClock(0.02)
        self.cluster = ClusterSpec(nodes=(NodeSpec(gpus=num_gpus),))
        self.log: list[ev.AnyRecord] = []
        self.silent_s = 20.0
        self.obey_s = 300.0
        self.state = ClusterState(self.cluster)
        self.executor = self._new_executor()

    def _new_executor(self) -> LocalExecutor:
        devices = Devices(tuple(str(index) for index in range(self.cluster.num_gpus)))
        executor = LocalExecutor(self.home.jobs_dir, devices, self.clock, silent_s=self.silent_s, obey_s=self.obey_s)
        executor.adopt(self.state)
        return executor

    def controller_dies(self) -> None:
        """All that is in memory is gone; what is in the log is not."""
        self.state = ClusterState(self.cluster)
        self.state.replay(self.log)
        self.executor = self._new_executor()

    def _record(self, record: ev.AnyRecord) -> None:
        self.log.append(record)
        self.state.apply(record)
        self.state.check()

    def submit(self, spec: JobSpec) -> None:
        self._record(ev.JobSubmitted(time_s=self.clock.now_s(), job=spec))

    def start(self, job: str, *devices: int, shared: bool = False, min_frozen_layers: int = 0) -> None:
        self._take(ev.Start, job, devices, shared, min_frozen_layers)

    def resize(self, job: str, *devices: int, shared: bool = False) -> None:
        self._take(ev.Resize, job, devices, shared)

    def regrant(self, job: str, *, shared: bool = False, min_frozen_layers: int = 0) -> None:
        state = self.state.jobs[job]
        told = grant(len(state.gpus), shared=shared, min_frozen_layers=min_frozen_layers)
        self.command(ev.Regrant(time_s=self.clock.now_s(), job_id=job, attempt=state.attempt, grant=told))

    def _take(
        self,
        kind: type[ev.Start] | type[ev.Resize],
        job: str,
        devices: tuple[int, ...],
        shared: bool,
        min_frozen_layers: int = 0,
    ) -> None:
        attempt = self.state.jobs[job].attempt + 1
        self.command(
            kind(
                time_s=self.clock.now_s(),
                job_id=job,
                attempt=attempt,
                gpus=gpus(*devices),
                grant=grant(len(devices), shared=shared, min_frozen_layers=min_frozen_layers),
            )
        )

    def leave(self, job: str) -> None:
        self.command(ev.Preempt(time_s=self.clock.now_s(), job_id=job, attempt=self.state.jobs[job].attempt))

    def cancel(self, job: str) -> None:
        self._record(ev.CancelRequested(time_s=self.clock.now_s(), job_id=job))
        self.command(ev.Stop(time_s=self.clock.now_s(), job_id=job, attempt=self.state.jobs[job].attempt))

    def command(self, command: ev.AnyCommand, *, submit: bool = True) -> None:
        self._record(command)
        if submit:
            self.executor.submit([command])

    def look(self) -> list[ev.Event]:
        """One poll."""
        events = self.executor.poll(self.clock.now_s())
        for event in events:
            self._record(event)
        return events

    def until(self, condition: Callable[[], object]) -> None:
        """Poll until it holds."""
        deadline_s = self.clock.now_s() + PATIENCE_S
        while not condition():
            self.look()
            assert self.clock.now_s() < deadline_s, [str(record) for record in self.log[-5:]]
            self.clock.wait_until(deadline_s)

    def until_phase(self, job: str, phase: Phase) -> None:
        self.until(lambda: self.state.jobs[job].phase is phase)

    def kinds(self, job: str) -> list[str]:
        """The job's records, without its submission and reports."""
        boring = {"job_submitted", "progress_reported"}
        return [r.kind for r in self.log if getattr(r, "job_id", None) == job and r.kind not in boring]

    def reason(self, job: str) -> str:
        return self.state.jobs[job].reason

    def pids(self, job: str, attempt: int) -> tuple[int, list[int]]:
        """(supervisor, ranks) once they are there."""
        folder = JobFolder(self.home.jobs_dir / job).attempt(attempt).path
        self.until(lambda: (folder / "ranks.json").exists())
        supervisor, ranks = read_json(folder / "supervisor.pid"), read_json(folder / "ranks.json")
        assert supervisor is not None
        assert ranks is not None
        return supervisor["pid"], ranks["pids"]

    def processes(self) -> list[int]:
        """Whatever runs for any job of this home."""
        return [pid for job in self.home.jobs_dir.glob("*") for pid in job_processes(job)]

    def violations(self) -> str:
        path = self.home.path / "violations"
        return path.read_text() if path.exists() else ""


def job_processes(job: Path) -> list[int]:
    """Processes that belong to a job folder."""
    return stragglers(job / "run.lock", f"ICEFROG_CHECKPOINT_DIR={job / 'checkpoint'}")
